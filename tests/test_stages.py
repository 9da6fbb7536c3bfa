"""Models of stages with few heads first and many later, as vision models have: what does not divide is whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv
from sharders import TensorParallelSharder
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

TP2 = ShardingEnv.abstract((2,), ("tp",))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Stages(nn.Module):
    """(B, T, 8) -> (B, T, 24)."""

    def __init__(self, heads: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList([Block(8, heads[0])])
        self.wider = nn.Linear(8, 24)
        self.second = nn.ModuleList(Block(24, heads[1]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = block(x)
        x = self.wider(x)
        for block in self.second:
            x = block(x)
        return x


def trains_split() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model = DistributedModelParallel(Stages((1, 4)).double(), env)
    trains(model, Stages((1, 4)).double(), env, lambda g: torch.randn(1, 2, 3, 8, generator=g).double())


def test_a_stage_that_does_not_divide_is_whole() -> None:
    """It refused the model, though a small part of it has one head."""
    found = TensorParallelSharder().place(Stages((1, 4)), {}, TP2)
    assert "first.0.q" not in found.styles and found.styles["second.1.q"] == "colwise"
    assert any("first.0" in note and "number of heads 1 is not divisible by 2" in note for note in found.notes)
    run_ranks(2, trains_split)


def test_most_of_a_model_that_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match=r"module 'second.0.*number of heads 3 is not divisible by 2"):
        TensorParallelSharder().place(Stages((2, 3)), {}, TP2)
