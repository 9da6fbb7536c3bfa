"""Ranks that should have samples of their own, called with the same ones: said once, where the first step is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from tests.ranks import mesh, run_ranks
from tests.test_drifted import heard

Shape = dict[str, int]


class Clicks(nn.Module):
    """A table and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.over = nn.EmbeddingBag(32, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.over(self.table(ids))
        return value


def _said(shape: Shape, of_table: bool, apart: str) -> int:
    """Train two steps; how often it was said on this rank."""
    env = ShardingEnv.from_mesh(mesh(tuple(shape.values()), tuple(shape)))
    with heard() as said:
        torch.manual_seed(0)
        model = DistributedModelParallel(Clicks() if of_table else nn.Linear(8, 8), env)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(2):
                own = env.data_rank if apart == "always" or (apart == "later" and micro) else 0
                draw = torch.Generator().manual_seed(10 * step + own)
                batch = torch.randint(32, (4, 3), generator=draw) if of_table else torch.rand(4, 8, generator=draw)
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum("should have samples of their own called" in text for text in said)


@pytest.mark.parametrize("of_table", [False, True], ids=["dense", "table"])
@pytest.mark.parametrize("shape", [{"dp": 2}, {"shard": 2}, {"dp": 2, "tp": 2}, {"data": 2}], ids="x".join)
def test_the_same_samples_are_said_once_by_the_first_rank(shape: Shape, of_table: bool) -> None:
    ranks = 4 if len(shape) > 1 else 2
    assert run_ranks(ranks, _said, shape, of_table, "never") == [1] + [0] * (ranks - 1)


@pytest.mark.parametrize("apart", ["always", "later"])
def test_samples_of_their_own_are_not(apart: str) -> None:
    for shape in ({"dp": 2}, {"shard": 2}, {"data": 2}):
        assert run_ranks(2, _said, shape, True, apart) == [0, 0]


class Padded(nn.Module):
    """What comes in parts of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.over(x.to_padded_tensor(0.0) if x.is_nested else x)
        return value


def _of_any_kind() -> None:
    model = DistributedModelParallel(Padded(), ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    parts = [torch.ones(2, 8), torch.ones(1, 8)]
    for batch in (torch.nested.nested_tensor(parts), torch.zeros(2, 0, 8), torch.ones(()).expand(2, 8)):
        model(batch).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_look_ends_no_program() -> None:
    run_ranks(2, _of_any_kind)


def test_ranks_of_one_tensor_group_have_the_same() -> None:
    assert run_ranks(2, _said, {"tp": 2}, False, "never") == [0, 0]
