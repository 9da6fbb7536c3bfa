"""A sharded module in whose place a program puts another after wrapping: an error, not a table that each rank trains
on its own samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, row_wise
from tests.ranks import mesh, run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))


def replaced(shape: tuple[int, ...], axes: tuple[str, ...], before: bool) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, axes))
    model = DistributedModelParallel(net(), env, plan={"0.weight": row_wise()})
    ids = torch.tensor([[1, 2, env.data_rank]])
    if before:
        model(ids).sum().backward()
    model.module[0] = nn.Embedding(12, 4)  # type: ignore[index]
    for _ in range(2):  # and it stays one
        with pytest.raises(ShardError, match=r"the sharded module at '0' was replaced by .*Embedding after wrapping"):
            model(ids)


@pytest.mark.parametrize(
    ("shape", "axes", "before"),
    [((2,), ("dp",), False), ((2,), ("dp",), True), ((2,), ("replicate",), True), ((2,), ("shard",), True)],
)
@pytest.mark.sampled(2)
def test_a_table_that_was_replaced_is_named(shape: tuple[int, ...], axes: tuple[str, ...], before: bool) -> None:
    run_ranks(2, replaced, shape, axes, before)


def taken_out() -> None:
    model = DistributedModelParallel(net(), ShardingEnv.from_mesh(mesh((2,), ("dp",))), plan={"0.weight": row_wise()})
    del model.module[0]  # type: ignore[operator]
    model.module.append(nn.Linear(4, 1))  # type: ignore[operator]
    with pytest.raises(ShardError, match=r"the sharded module at '0' was (taken out|replaced by .*Linear)"):
        model(torch.ones(2, 4))


def test_a_table_that_was_taken_out_is_named() -> None:
    run_ranks(2, taken_out)


class Tied(nn.Module):
    """Scores of all words, by a weight of their own at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(ids))
        return out

    def tie_weights(self) -> None:
        self.head.weight = self.words.weight


def tied(axis: str, is_new: bool) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    model = DistributedModelParallel(Tied(), env, plan={"words.weight": row_wise()})
    ids = torch.tensor([[1, 2, env.data_rank]])
    model(ids).sum().backward()
    if is_new:
        model.module.head = nn.Linear(4, 10, bias=False)  # type: ignore[union-attr]
    model.module.tie_weights()  # type: ignore[union-attr, operator]
    for _ in range(2):
        with pytest.raises(ShardError, match=r"'head.weight' was tied to the weight of a sharded table"):
            model(ids)


@pytest.mark.parametrize(("axis", "is_new"), [("dp", False), ("dp", True), ("tp", False)])
def test_a_table_that_was_tied_is_named(axis: str, is_new: bool) -> None:
    """Each rank computed scores of its own words alone, and trained them so."""
    run_ranks(2, tied, axis, is_new)
