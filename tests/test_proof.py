"""Plans are proved before they are used: what is wrong is refused, or left whole, and said by module and parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from dmp import DistributedModelParallel, PlanError, ShardingEnv, sequence
from sharders import TensorParallelSharder
from sharders.tensor_parallel import head_counts as local_attributes
from sharders.tensor_parallel.proof.sample import Sample
from sharders.tensor_parallel.proof.simulated import SimulationError, simulate
from sharders.tensor_parallel.sharder import TensorParallelPlacement
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import GPT, Bert, Llama, RMSNorm, SwiGLU

TP2 = ShardingEnv.abstract((2,), ("tp",))


def place(model: nn.Module, env: ShardingEnv = TP2, **options: Any) -> TensorParallelPlacement:
    return TensorParallelSharder(**options).place(model, {}, env)


class Attention(nn.Module):
    """Of 4 heads that no attribute of a known name counts."""

    def __init__(self, join: Callable[[torch.Tensor, Attention], torch.Tensor], dim: int = 32) -> None:
        super().__init__()
        self.count, self.size, self.join = 4, dim // 4, join
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.join(w(x), self) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def by_count(x: torch.Tensor, of: Attention) -> torch.Tensor:
    """(B, T, D) -> (B, H, T, E)."""
    return x.view(*x.shape[:2], of.count, -1).transpose(1, 2)


def by_length(x: torch.Tensor, of: Attention) -> torch.Tensor:
    """As OPT: with all heads of a split x, T is halved."""
    return x.view(x.shape[0], -1, of.count, of.size).transpose(1, 2)


def by_size(x: torch.Tensor, of: Attention) -> torch.Tensor:
    """Right whatever is split."""
    return x.unflatten(-1, (-1, of.size)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2, self.attention, self.mlp = RMSNorm(32), RMSNorm(32), attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(
        self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module] = lambda: SwiGLU(32, 64)
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(attention(), mlp()) for _ in range(2))
        self.norm, self.head = RMSNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


QKVO = {**{f"blocks.*.attention.w{n}": "colwise" for n in "qkv"}, "blocks.*.attention.wo": "rowwise"}


@pytest.mark.parametrize("join", [by_count, by_length])
def test_heads_under_a_name_of_the_modules_own(join: Callable[..., torch.Tensor]) -> None:
    model = Model(lambda: Attention(join))
    with pytest.raises(PlanError, match=r"output 0 \(2, 8, 64\) on rank 0 differs .* by|run split it raises"):
        place(model, plan=QKVO)
    assert place(Model(lambda: Attention(by_size)), plan=QKVO).notes[-1].startswith("proved")


@pytest.mark.parametrize("join", [by_count, by_length, by_size])
def test_chunks_that_an_attention_is_given_are_gathered_or_refused(join: Callable[..., torch.Tensor]) -> None:
    """It keeps no number of heads, so nothing gathers its input: q, k and v would be of each rank's own chunk."""
    model = Model(lambda: Attention(join))
    mlps = {"blocks.*.mlp.w[13]": "colwise", "blocks.*.mlp.w2": "rowwise"}
    with pytest.raises(PlanError):
        place(model, plan=mlps, sequence_parallel=True)
    norms = {f"blocks.{i}.{n}.weight": sequence() for i in range(2) for n in ("n1", "n2")}
    with pytest.raises(PlanError):
        TensorParallelSharder().place(model, norms, TP2)


def test_a_block_that_does_something_else_is_proved_too() -> None:
    """The same class and shapes, and another flag."""

    def by_flag(x: torch.Tensor, of: Attention) -> torch.Tensor:
        return (by_count if of.counts else by_size)(x, of)

    model = Model(lambda: Attention(by_flag))
    for i, block in enumerate(model.blocks):
        block.attention.counts, block.attention.index = i == 1, i
    with pytest.raises(PlanError, match=r"run split|differs"):
        place(model, plan=QKVO)
    model.blocks[1].attention.counts = False
    assert place(model, plan=QKVO).notes[-1].startswith("proved")


class FusedAttention(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (by.unflatten(-1, (-1, 8)).transpose(1, 2) for by in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_fused_projection_is_not_split_across_its_thirds() -> None:
    plan = {"blocks.*.attention.c_attn": "colwise", "blocks.*.attention.c_proj": "rowwise"}
    with pytest.raises(PlanError, match=r"output 0 .* differs from the whole module's by .*'blocks.0"):
        place(Model(FusedAttention), plan=plan)


class Tempered(nn.Module):
    """A weight that every rank has whole, and uses on its own hidden units."""

    def __init__(self, parameter: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        if parameter == "temperature":
            self.temperature = nn.Parameter(torch.ones(2))
        else:
            self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h.tanh() * self.temperature.prod() if hasattr(self, "temperature") else self.act(h))


@pytest.mark.parametrize("parameter", ["temperature", "act.weight"])
def test_a_whole_weight_inside_a_split_mlp(parameter: str, caplog: pytest.LogCaptureFixture) -> None:
    name = rf"the gradient of 'blocks.0.mlp.{parameter}' on rank 0 differs from the whole module's by \d"
    model = Model(lambda: Attention(by_size), lambda: Tempered(parameter))
    with pytest.raises(PlanError, match=name):
        place(model, plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"})
    gpt = GPT()
    for block in gpt.h:
        block.mlp = Tempered(parameter)
    with caplog.at_level(logging.WARNING, "dmp"):
        found = place(gpt)
    if parameter == "act.weight":  # one number, of which each rank has a part of the gradient
        assert found.styles["h.0.mlp.act"] == "sum_gradients" and "h.0.mlp.up" in found.styles
        return
    whole = "h.0.mlp (and 1 like it): left whole, because the gradient of 'h.0.mlp." + parameter
    assert any(n.startswith(whole) for n in found.notes)
    assert whole in caplog.text
    assert "h.0.attn.query" in found.styles and "h.0.mlp.up" not in found.styles


class TiledAttention(nn.Module):
    """A bias of positions for all heads, from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).view(*x.shape[:2], self.heads, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bias = nn.Embedding(64, 32), nn.Embedding(1, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"a": TiledAttention(), "m": SwiGLU(32, 64)}) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        bias = self.bias(ids.new_zeros(ids.shape[1], ids.shape[1])).permute(2, 0, 1)
        for layer in self.layers:
            x = x + layer["a"](x, bias)
            x = x + layer["m"](x)
        return x


def test_a_bias_for_all_heads_from_outside() -> None:
    plan = {**{f"layers.*.a.w{n}": "colwise" for n in "qkv"}, "layers.*.a.wo": "rowwise"}
    with pytest.raises(PlanError, match="run split it raises"):
        place(Biased(), plan=plan)


class OfOne(ParallelStyle):
    """Splits the output features, and forgets to gather them."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.weight = nn.Parameter(module.weight.detach().chunk(2, 0)[device_mesh.get_local_rank()].clone())
        module.bias = None
        return module


def test_styles_of_ones_own() -> None:
    model = GPT(tied=False)
    mlps = {"h.*.mlp.0": ColwiseParallel(), "h.*.mlp.2": RowwiseParallel()}
    assert place(model, plan=mlps).notes[-1].startswith("proved")
    with pytest.raises(PlanError, match="run split it raises"):
        place(model, plan={"h.*.mlp.0": OfOne()})
    assert not hasattr(model.h[0].mlp[0].weight, "placements") and model.h[0].mlp[0].bias is not None


def test_without_inputs_a_part_is_proved_alone_and_the_note_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Towers(nn.Module):
        def __init__(self, activation: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.over = nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 4))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.over(batch["dense"])

    plan = {"over.0": "colwise", "over.2": "rowwise"}
    with caplog.at_level(logging.WARNING, "dmp"):
        found = place(Towers(nn.ReLU), plan=plan)
    assert found.notes[-1].startswith("not proved: outside 'over': ")
    assert "not proved" in caplog.text
    with pytest.raises(PlanError, match=r"in module 'over' alone, the gradient of '1.weight' on rank 0 differs"):
        place(Towers(nn.PReLU), plan=plan)


class Batched(nn.Module):
    """A model whose inputs nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Llama()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.body(batch["ids"])


def test_an_mlp_that_is_wrong_stays_whole_though_the_rest_does_not_run() -> None:
    model = Batched()
    for layer in model.body.layers:
        layer.feed_forward = Tempered("temperature")
    found = place(model)
    assert "body.layers.1.attention.wq" in found.styles and "body.layers.1.feed_forward.up" not in found.styles
    assert any("feed_forward" in n and "temperature' on rank 0 differs" in n for n in found.notes)
    assert any(n.startswith("not proved: ") for n in found.notes)


class ByWidth(Attention):
    """The size of a head is that of the input's width, as in CaiT's attention of the class token."""

    def __init__(self, join: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__(join)
        self.num_heads = self.count

    def forward(self, x: torch.Tensor, positions: Any = None) -> torch.Tensor:
        return super().forward(x)


def by_width(x: torch.Tensor, of: Any) -> torch.Tensor:
    """With a part of the heads, and all of the width, there are more numbers than x has."""
    return x.view(*x.shape[:2], of.num_heads, 32 // of.num_heads).transpose(1, 2)


def test_an_attention_that_raises_once_split_stays_whole_though_the_rest_does_not_run() -> None:
    model = Batched()
    for layer in model.body.layers:
        layer.attention = ByWidth(by_width)
    found = place(model)
    assert "body.layers.1.feed_forward.w1" in found.styles and "body.layers.1.attention.wq" not in found.styles
    assert any("body.layers.0.attention (and 1 like it): left whole" in n and "raises" in n for n in found.notes)


def test_a_model_of_seventy_billion_is_proved_on_a_narrower_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sample] = []

    class Seen(Sample):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append(self)

    monkeypatch.setattr(local_attributes, "Sample", Seen)
    with torch.device("meta"):
        model = Llama(128256, 8192, 4, 64, 8, 28672)
    found = place(model, ShardingEnv.abstract((8,), ("tp",)))
    assert found.divided["layers.3.attention", "heads"] == 8
    assert found.notes[-1].endswith("on 2 simulated ranks are the whole module's, of a narrower copy")
    (sample,) = seen
    assert sample.ranks == 2 and sample.count < 20e6


def test_a_plan_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = 0

    def counted(*args: Any) -> str | None:
        nonlocal proofs
        proofs += 1
        return proof(*args)

    proof = local_attributes.disproof
    monkeypatch.setattr(local_attributes, "disproof", counted)
    place(Llama())
    assert proofs == 1


def test_one_proof_for_blocks_that_know_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbered(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.body = Llama(layers=layers)
            for number, layer in enumerate(self.body.layers):
                layer.attention.number = layer.number = number

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.body(batch["ids"])

    samples = 0

    def counted(*args: Any) -> Sample:
        nonlocal samples
        samples += 1
        return Sample(*args)

    monkeypatch.setattr(local_attributes, "Sample", counted)
    seen = []
    for layers in (2, 5):
        samples = 0
        assert f"body.layers.{layers - 1}.attention.wq" in place(Numbered(layers)).styles
        seen.append(samples)
    assert seen[0] == seen[1] > 0


def _refused_on_every_rank() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model = Model(FusedAttention)
    plan = {"blocks.*.attention.c_attn": "colwise", "blocks.*.attention.c_proj": "rowwise"}
    with pytest.raises(PlanError, match="differs from the whole module's"):
        DistributedModelParallel(model, env, sharders=[TensorParallelSharder(plan)])
    assert not any(hasattr(p, "placements") for p in model.parameters())
    wrapped = DistributedModelParallel(model, env)
    ids = torch.arange(16).view(2, 8)
    wrapped(ids).sum().backward()


def test_a_plan_that_is_wrong_is_refused_on_every_rank_and_nothing_is_changed() -> None:
    run_ranks(2, _refused_on_every_rank)


def test_dropout_is_off_in_a_proof_whatever_the_configuration_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), self.args.ffn_dropout, self.training))

    monkeypatch.setattr(SwiGLU, "forward", forward)
    model, args = Llama(), SimpleNamespace(ffn_dropout=0.5)
    for layer in model.layers:
        layer.feed_forward.args = args
    found = place(model)
    assert found.styles["layers.0.feed_forward.w2"] == "rowwise" and args.ffn_dropout == 0.5


def test_proofs_leave_no_trace() -> None:
    """Random numbers, gradients, and the model; under any mode of the caller's."""
    model = Bert(dropout=0.1).eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    torch.manual_seed(3)
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        found = place(model)
    assert found.notes[-1].endswith("on 2 simulated ranks are the whole module's")
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    assert not model.training and model.drop.p == 0.1
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_simulated_ranks_that_part_ways() -> None:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives

    def sums(mesh: Any) -> float:
        return float(collectives.all_reduce(torch.tensor(mesh.get_rank() + 1.0), "sum", mesh))

    assert simulate(3, "tp", sums) == [6.0, 6.0, 6.0]
    with pytest.raises(SimulationError, match=r"rank 0 waits in all_reduce .* rank 1 has come to its end"):
        simulate(2, "tp", lambda mesh: mesh.get_rank() or sums(mesh))
    with pytest.raises(ZeroDivisionError):
        simulate(2, "tp", lambda mesh: sums(mesh) / mesh.get_rank())
    assert not dist.is_initialized()
