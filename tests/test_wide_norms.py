"""Norms over all features that the Linears of an attention or MLP give together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from dmp import DistributedModelParallel, PlanError, ShardError, ShardingEnv, ShardingPlan, colwise
from sharders import TensorParallelSharder
from sharders.tensor_parallel.proof.simulated import simulate
from sharders.tensor_parallel.split.wide_norms import split_norm
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks
from tests.test_values_of_heads import MESHES, TP

WIDTH, HEADS, SIZE = 16, 4, 4


class Own(nn.Module):
    """A norm as `kind` writes it."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width, self.weight = kind, width, nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "means":
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        if self.kind == "sums":
            return x / ((x * x).sum(dim=-1, keepdim=True) / self.width + 1e-6).sqrt() * self.weight
        if self.kind == "variances":
            return (x - torch.mean(x, -1, True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt() * self.weight
        return x / x.abs().amax(-1, keepdim=True) * self.weight  # "largest"


class Attention(nn.Module):
    """Query and key are normalised by `norm`; of keys there are half as many heads."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, half = HEADS, HEADS // 2, WIDTH // 2
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, half, half, WIDTH))
        self.q_norm, self.k_norm, self.inner = norm(WIDTH), norm(half), norm(WIDTH)
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)  # of the hidden state, as wide as all heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (f.unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.last(self.out(self.inner(heads)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(norm)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), norm(24), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "means": lambda n: Own("means", n),
    "sums": lambda n: Own("sums", n),
    "variances": lambda n: Own("variances", n),
}


def model_of(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(norm), Block(norm))
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def trains_split(on: str, kind: str) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    model, whole = (model_of(NORMS[kind]).double() for _ in range(2))
    wrapped = DistributedModelParallel(model, env)
    norms = {name for name, entry in wrapped.plan.items() if entry.layout == colwise() and name.endswith("norm.weight")}
    assert norms == {f"{i}.attention.{n}_norm.weight" for i in range(2) for n in "qk"}
    made = wrapped.module.get_submodule("1.attention.k_norm").weight
    assert made.placements[-1].is_shard() and made.to_local().numel() * env.size == made.numel()  # type: ignore[operator, union-attr]
    trains(wrapped, whole, env, lambda g: torch.randn(env.data_size, 2, 3, WIDTH, generator=g).double())


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("on", [pytest.param(on, marks=[pytest.mark.slow] * (on != "tp")) for on in MESHES])
@pytest.mark.sampled(4)
def test_what_is_normalised_over_all_heads_trains_as_in_one_process(on: str, kind: str) -> None:
    """Such attentions lay whole on every rank of the axis: one with half of the heads has half of the mean."""
    run_ranks(2 if on == "tp" else 4, trains_split, on, kind)


def test_styles_and_layouts_of_wide_norms() -> None:
    model = model_of(nn.RMSNorm)
    found = TensorParallelSharder().place(model, {}, TP)
    norms = {path for path, style in found.styles.items() if style == "colwise_norm"}
    assert norms == {
        f"{i}.{n}" for i in range(2) for n in ("attention.q_norm", "attention.k_norm", "attention.inner", "mlp.2")
    }
    read = ShardingPlan.from_json(ShardingPlan(dict(found.layouts)).to_json())
    wanted = {name: entry.layout for name, entry in read.items()}
    assert wanted["0.mlp.2.weight"] == colwise()
    assert TensorParallelSharder().place(model, wanted, TP).styles == found.styles
    linears = {path: s for path, s in found.styles.items() if isinstance(s, str) and path not in norms}
    assert (
        TensorParallelSharder(linears).place(model, {}, TP).styles == found.styles
    )  # as plans of others leave them out
    some = {name: layout for name, layout in wanted.items() if name.startswith("0.attention.")}
    assert TensorParallelSharder().place(model, some, TP).layouts == some


def test_a_norm_of_another_kind_keeps_what_it_is_of_whole() -> None:
    found = TensorParallelSharder().place(model_of(lambda n: Own("largest", n)), {}, TP)
    assert not found.styles
    assert any("0.attention (and 1 like it): left whole, because" in note for note in found.warnings)


def test_what_a_wide_norm_is_not() -> None:
    model = model_of(nn.LayerNorm)
    for path, said in (
        ("0.attention.q", "by a forward of its class"),
        ("0.attention.first", "outside of what the plan"),
    ):
        with pytest.raises(PlanError, match=said):
            TensorParallelSharder({path: "colwise_norm"}).place(model, {}, TP)
    with pytest.raises(PlanError, match="splits 8 features over the 3 ranks"):
        TensorParallelSharder({"0.attention.k_norm": "colwise_norm"}).place(
            model, {}, ShardingEnv.abstract((3,), ("tp",))
        )


def calls_a_kernel() -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES["tp"]))
    model: Any = DistributedModelParallel(model_of(lambda n: Own("means", n)), env).module
    model[0].attention.q_norm.forward = torch.clone
    with pytest.raises(ShardError, match=r"a .*Own over 16 features, of which this rank has 8, took no mean"):
        model(torch.randn(1, 3, WIDTH))


def test_a_kernel_that_takes_its_own_statistics_is_told() -> None:
    run_ranks(2, calls_a_kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_torchs_norms_written_out_are_torchs(dtype: torch.dtype, is_autocast: bool) -> None:
    """Rounded where torch's round, and of the dtype that autocast gives them."""
    x = torch.randn(4, 64, dtype=dtype)

    def parts_of(norm: nn.Module, on: DeviceMesh) -> torch.Tensor:
        here = copy.deepcopy(norm)
        split_norm(here, on)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return here(x.chunk(2, -1)[on.get_rank()])  # type: ignore[no-any-return]

    for norm in (nn.LayerNorm(64), nn.RMSNorm(64), nn.RMSNorm(64, eps=1e-2)):
        nn.init.normal_(norm.to(dtype).weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            wanted = norm(x)
        torch.testing.assert_close(torch.cat(simulate(2, "tp", functools.partial(parts_of, norm)), -1), wanted)


def compiles(kind: str) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES["tp"]))
    model, whole = (model_of(NORMS[kind]).double() for _ in range(2))
    wrapped: Any = DistributedModelParallel(model, env)
    wrapped.module[0].compile(backend="aot_eager", fullgraph=True)
    trains(wrapped, whole, env, lambda g: torch.randn(1, 2, 3, WIDTH, generator=g).double())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["means", "RMSNorm"])
def test_wide_norms_compile_in_one_graph(kind: str) -> None:
    run_ranks(2, compiles, kind)
