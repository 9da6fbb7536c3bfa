"""Attentions that read their width from their input (`B, T, C = x.shape`), and not from an attribute."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardingEnv, ShardingPlan
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.claimed_width import claim_width
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

WIDTH, HEADS, LENGTH = 32, 4, 3
TP = ShardingEnv.abstract((2,), ("tp",))


class Joint(nn.Module):
    """As in early vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        heads = (q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).reshape(B, N, C))  # type: ignore[no-any-return]


class Apart(nn.Module):
    """Query, key and value by keyword, time first, as in fairseq; it asserts what an attribute says as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = WIDTH, HEADS, WIDTH // HEADS
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tgt_len, bsz, embed_dim = query.size()
        assert embed_dim == self.embed_dim == query.size(-1) == query.size(2)
        parts = zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value), strict=True)
        q, k, v = (f(x).view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1) for f, x in parts)
        heads = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.out_proj(heads.transpose(0, 1).reshape(tgt_len, bsz, embed_dim))  # type: ignore[no-any-return]


class Scaled(Joint):
    """It divides by the root of the whole width, which a rank's part is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / math.sqrt(x.shape[-1])


KINDS: dict[str, type[nn.Module]] = {"joint": Joint, "apart": Apart, "scaled": Scaled}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), KINDS[kind]()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        up, down = self.up, self.down
        self.mlp = lambda x: down(up(x).relu())  # around modules, as minGPT's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if isinstance(self.attn, Apart):
            h = h.transpose(0, 1)
            return x + self.mlp(self.attn(query=h, key=h, value=h).transpose(0, 1))
        return x + self.mlp(self.attn(h))


class Model(nn.Module):
    def __init__(self, kind: str, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def trains_split(on: str, kind: str) -> None:
    shapes = {"tp": ((2,), ("tp",)), "shard x tp": ((2, 2), ("shard", "tp"))}
    env = ShardingEnv.from_mesh(mesh(*shapes[on]))
    model = DistributedModelParallel(Model(kind, again=on != "tp").double(), env)
    split = {name for name, p in model.named_parameters() if not p.placements[-1].is_replicate()}  # type: ignore[attr-defined]
    assert {name for name in split if ".attn." in name and name.endswith("weight")} == {
        name for name, _ in Model(kind).named_parameters() if ".attn." in name and name.endswith("weight")
    }
    trains(
        model, Model(kind).double(), env, lambda g: torch.randn(env.data_size, 2, LENGTH, WIDTH, generator=g).double()
    )


@pytest.mark.parametrize(("on", "kind"), [("tp", "apart"), pytest.param("shard x tp", "joint", marks=pytest.mark.slow)])
def test_attentions_that_read_their_width_from_their_input_train_as_in_one_process(on: str, kind: str) -> None:
    """They lay whole on every rank of the axis."""
    run_ranks(2 if on == "tp" else 4, trains_split, on, kind)


@pytest.mark.parametrize("kind", ["joint", "apart"])
@pytest.mark.sampled(2)
def test_what_is_split_is_proved_and_its_plan_is_taken_again(kind: str) -> None:
    model = Model(kind)
    placed = TensorParallelSharder().place(model, {}, TP)
    assert {name for (_, name), _ in placed.divided.items() if "shape" in name} == {
        "query.shape[-1]" if kind == "apart" else "x.shape[-1]"
    }
    assert "proved: " in placed.notes[-1]
    assert not placed.warnings
    layouts = ShardingPlan.from_json(ShardingPlan(placed.layouts).to_json())
    given = {name: layouts[name].layout for name in placed.layouts}
    assert TensorParallelSharder().place(model, given, TP).divided == placed.divided
    asked = TensorParallelSharder({path: style for path, style in placed.styles.items() if "blocks.0" in path})
    assert any("shape" in name for _, name in asked.place(model, {}, TP).divided)


def test_a_width_that_is_read_for_something_else_is_found_wrong() -> None:
    placed = TensorParallelSharder().place(Model("scaled"), {}, TP)
    assert not placed.divided
    assert set(placed.styles) == {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
    assert any(".attn" in text and "left whole" in text for text in placed.warnings)


class Returned(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[object, ...]:
        sizes = (*x.shape, x.size(-1), x.size(2), x.size(dim=1), x.view(-1, 4).shape[0])
        return x, [x, x.transpose(0, 1), x + x], sizes


def test_only_sizes_are_claimed_and_only_inside() -> None:
    module, x = Returned(), torch.randn(2, 3, 8, requires_grad=True)
    claim_width(module, "x.shape[-1]", 4)
    back, held, sizes = module(x=x)
    assert back is x
    assert [type(each) for each in held] == [torch.Tensor] * 3
    assert sizes == (2, 3, 4, 4, 4, 3, 12)
