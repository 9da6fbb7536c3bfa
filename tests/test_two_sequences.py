"""Attentions to two sequences at once, as models of diffusion have, and what plans of others leave out of such."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from dmp import DistributedModelParallel, InputError, PlanError, ShardingEnv
from sharders import TensorParallelSharder
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

MESHES = {"tp": ((2,), ("tp",)), "shard x tp": ((2, 2), ("shard", "tp"))}
WIDTH, SECOND, HEADS, SIZE = 16, 12, 4, 6
TP = ShardingEnv.abstract((2,), ("tp",))
NORMS = ("norm_q", "norm_k")


class Joint(nn.Module):
    """Queries, keys and values of both sequences; heads are normed by themselves. A model's last has one output."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.inner_dim, self.heads = HEADS * SIZE, HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.add_q, self.add_k, self.add_v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(HEADS * SIZE, WIDTH), nn.Dropout(0.0)])
        self.norm_q, self.norm_k = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        if not is_last:
            self.to_add_out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, Any]:
        length = hidden_states.shape[1]
        own, other = (self.to_q, self.to_k, self.to_v), (self.add_q, self.add_k, self.add_v)
        joined = [
            torch.cat([a(hidden_states), b(encoder_hidden_states)], 1).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for a, b in zip(own, other, strict=True)
        ]
        found = scaled_dot_product_attention(self.norm_q(joined[0]), self.norm_k(joined[1]), joined[2])
        found = found.transpose(1, 2).flatten(2)
        second = found[:, length:]
        return self.to_out[0](found[:, :length]), self.to_add_out(second) if hasattr(self, "to_add_out") else None


class Gelu(nn.Module):
    """A Linear and what follows it in one."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(self.proj(x))


class FeedForward(nn.Module):
    """Its first Linear lies two modules deep."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([Gelu(), nn.Dropout(0.0), nn.Linear(24, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.net:
            x = module(x)
        return x


class Block(nn.Module):
    """Takes two sequences and a vector; has a Linear that is neither an attention's nor an MLP's."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.attn, self.ff = Joint(is_last), FeedForward()

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor) -> Any:
        scale, shift = self.modulation(silu(temb))[:, None].chunk(2, -1)
        own, second = self.attn(hidden_states * (1 + scale) + shift, encoder_hidden_states)
        x = hidden_states + own
        return x + self.ff(x), encoder_hidden_states if second is None else encoder_hidden_states + second


class Model(nn.Module):
    """Takes one tensor, with all in it, so that nobody guesses its input; runs a part of its first block by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context = nn.Linear(SECOND, WIDTH)
        self.blocks = nn.ModuleList([Block(False), Block(False), Block(True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == WIDTH + SECOND
        hidden, second = x[..., :WIDTH], self.context(x[..., WIDTH:])[:, :2]
        vector = hidden.mean(1)
        for block in self.blocks:
            hidden, second = block(hidden, second, vector)
        gate: torch.Tensor = self.blocks[0].modulation(vector)[:, None, :WIDTH]  # type: ignore[operator]
        return hidden * gate


def batch(env: ShardingEnv, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(env.data_size, 2, 3, WIDTH + SECOND, generator=generator).double()


def own_plan(*, sums: bool = False) -> dict[str, str]:
    """As a model's author wrote it for inference: norms of heads are not named."""
    up = [f"blocks.*.attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v")]
    plan = dict.fromkeys([*up, "blocks.*.ff.net.0.proj"], "colwise")
    plan |= dict.fromkeys(["blocks.*.attn.to_out.0", "blocks.*.attn.to_add_out", "blocks.*.ff.net.2"], "rowwise")
    return plan | ({f"blocks.*.attn.{name}": "sum_gradients" for name in NORMS} if sums else {})


def trains_split(on: str, is_planned: bool) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    plain = Model().double()
    if is_planned:
        plain.tp_plan = own_plan()  # type: ignore[assignment]
    model = DistributedModelParallel(plain, env)
    split = {name for name, p in model.named_parameters() if cast("Any", p).placements[-1].is_shard()}
    assert {f"blocks.0.attn.{name}.weight" for name in ("to_q", "add_v", "to_out.0", "to_add_out")} <= split
    assert {"blocks.2.ff.net.0.proj.weight", "blocks.2.ff.net.2.weight", "blocks.2.attn.add_q.weight"} <= split
    assert ("blocks.1.modulation.weight" in split) != is_planned
    trains(model, Model().double(), env, lambda generator: batch(env, generator))


@pytest.mark.parametrize("on", [pytest.param(on, marks=[pytest.mark.slow] * (on != "tp")) for on in MESHES])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.sampled(2)
def test_attentions_to_two_sequences_train_as_in_one_process(on: str, is_planned: bool) -> None:
    """They lay whole; by a model's own plan, gradients of norms were each rank's heads' alone."""
    run_ranks(2 if on == "tp" else 4, trains_split, on, is_planned)


@pytest.mark.parametrize("is_named", [False, True])
def test_norms_of_heads_are_summed_by_a_plan_that_does_not_name_them(is_named: bool) -> None:
    found = TensorParallelSharder(own_plan(sums=is_named)).place(Model(), {}, TP)
    sums = {path for path, style in found.styles.items() if style == "sum_gradients"}
    assert sums == {f"blocks.{i}.attn.{name}" for i in range(3) for name in NORMS}


def test_a_plan_that_says_otherwise_of_a_norm_is_wrong() -> None:
    said = own_plan() | {f"blocks.*.attn.{name}": "replicate" for name in NORMS}
    with pytest.raises(PlanError, match=r"gradient of '(\w+\.)*norm_[qk].weight'"):
        TensorParallelSharder(said).place(Model(), {}, TP)


class Hidden(nn.Module):
    """No attention by its looks, and nobody can guess what it takes; a weight is used on the rank's part alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(8, 12), nn.Linear(12, 8), nn.Parameter(torch.ones(1))

    def forward(self, page: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(page["x"]).relu() * self.scale)
        return out


def parts_unseen() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    sharder = TensorParallelSharder({"up": "colwise", "down": "rowwise"})
    model = DistributedModelParallel(Hidden(), env, sharders=[sharder])
    page = {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(0))}
    with pytest.raises(InputError, match=r"'scale' is whole on each rank of mesh axis 'tp'.* gradient on rank 1"):
        model(page).square().sum().backward()


def test_gradients_that_part_under_a_plan_that_is_not_proved_are_told() -> None:
    """Copies of such a weight parted in silence."""
    run_ranks(2, parts_unseen)


class Annotated(nn.Module):
    """An attention whose number of heads is `h`; -1 hides a wrong one from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, WIDTH // HEADS
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, query: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.linear_q(query).view(query.size(0), -1, self.h, self.d_k).transpose(1, 2)
        k, v = (each(other).view(len(other), -1, self.h, self.d_k) for each in (self.linear_k, self.linear_v))
        scores = q @ k.permute(0, 2, 3, 1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        found = scores.softmax(-1) @ v.transpose(1, 2)
        out: torch.Tensor = self.linear_out(found.transpose(1, 2).reshape(len(query), -1, self.h * self.d_k))
        return out


def rearrange(x: torch.Tensor, pattern: str, h: int) -> torch.Tensor:
    """einops' one, of the one pattern here: it takes the size of a head from the tensor."""
    assert pattern == "b n (h d) -> b h n d"
    return x.reshape(*x.shape[:2], h, -1).transpose(1, 2)


class Rearranged(Annotated):
    """Of heads of half the size on each rank the numbers were wrong, in silence."""

    def forward(self, query: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = rearrange(self.linear_q(query), "b n (h d) -> b h n d", h=self.h)
        k, v = (rearrange(each(other), "b n (h d) -> b h n d", h=self.h) for each in (self.linear_k, self.linear_v))
        found = scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.linear_out(found.transpose(1, 2).flatten(2))
        return out


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.src_attn = Annotated(), Annotated()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor, mask: Any, memory: torch.Tensor, memory_mask: Any) -> torch.Tensor:
        x = x + self.self_attn(x, x, mask)
        x = x + self.src_attn(x, memory, memory_mask)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Unguessed(Decoding):
    """Asks for what nobody can guess."""

    def forward(self, x: torch.Tensor, step: Any, memory: torch.Tensor, other: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, step["mask"], memory, other)


class InSilence(Unguessed):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.src_attn = Rearranged(), Rearranged()


class Decoder(nn.Module):
    def __init__(self, kind: type[Decoding]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(len(x), x.shape[1], x.shape[1]).tril()
        for layer in self.layers:
            x = layer(x, {"mask": mask} if isinstance(layer, Unguessed) else mask, memory, None)
        return x[:, : int(lengths.max())]


@pytest.mark.parametrize("kind", [Decoding, Unguessed, InSilence])
def test_heads_by_another_name_are_divided(kind: type[Decoding]) -> None:
    """ESPnet's decoder raised in the first step: its number of heads is not of a usual name."""
    found = TensorParallelSharder().place(Decoder(kind), {}, TP)
    assert found is not None and len(found.divided) == 4 and set(found.divided.values()) == {HEADS // 2}
    assert "layers.1.src_attn.linear_out.weight" in found.layouts
    assert any(note.startswith("layers.0: verified by a dry run") for note in found.notes) == (kind is Decoding)
