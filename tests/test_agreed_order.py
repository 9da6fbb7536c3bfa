"""Ranks that run different units of FSDP2, or reach different ones, are told: they took each other's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, RanksError, ShardingEnv, local_of, ranks
from sharders import FSDPWrapper
from tests.ranks import mesh, run_ranks
from tests.test_survival import mortal_ranks


class Stack(nn.Module):
    """Blocks of which some are passed over, and a head."""

    def __init__(self, wide: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [12 if i == wide else 8 for i in range(3)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, h), nn.ReLU(), nn.Linear(h, 6)) for h in hidden)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, without: int, of: int) -> torch.Tensor:
        found = []
        for i, layer in enumerate(self.layers):
            if i != without:
                x = x + layer(x)
            found.append(x)
        out: torch.Tensor = self.head(found[of])
        return out


Calls = Sequence[Sequence[tuple[int, int]]]
"""For each step, the arguments of each rank."""


def steps(shape: tuple[int, ...], names: tuple[str, ...], calls: Calls, wide: int | None = None) -> tuple[str, float]:
    """What the last step raises, in which no rank may write a weight, and after how many seconds."""
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model = DistributedModelParallel(
        Stack(wide), env, data_parallel_wrapper=FSDPWrapper(units=["layers.*"], reshard_after_forward=True)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, of_ranks in enumerate(calls):
        before = [local_of(p).clone() for p in model.parameters()]
        began = time.monotonic()
        try:
            model(torch.ones(2, 6), *of_ranks[env.rank]).square().mean().backward()
            optimizer.step()
        except Exception as error:
            assert number == len(calls) - 1
            assert all(map(torch.equal, before, (local_of(p) for p in model.parameters())))
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        optimizer.zero_grad()
    return "", 0.0


ALL, SKIP, EXIT = (9, 2), (0, 2), (9, 0)
OTHERS: dict[str, Callable[[int], tuple[int, int]]] = {
    "a block": lambda rank: (rank, 2),
    "none": lambda rank: (0, 2) if rank else ALL,
    "loss": lambda rank: (9, rank),
}


@pytest.mark.parametrize("wide", [None, 1], ids=["alike", "of other sizes"])  # which ended the process
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.sampled(16)
def test_ranks_that_run_different_units(kind: str, is_first: bool, wide: int | None) -> None:
    calls = [*([[ALL, ALL]] * (0 if is_first else 2)), [OTHERS[kind](rank) for rank in range(2)]]
    for message, seconds in mortal_ranks(2, steps, (2,), ("shard",), calls, wide):
        assert message.startswith("RanksError: the ranks have parted ways: rank 0 is in "), message
        assert "the weights of 'layers." in message and seconds < 8.0, (message, seconds)


@pytest.mark.slow
def test_copies_that_run_different_units() -> None:
    calls = [[ALL] * 4, [SKIP, SKIP, ALL, ALL]]
    for message, seconds in mortal_ranks(4, steps, (2, 2), ("replicate", "shard"), calls):
        assert "RanksError: the ranks have parted ways" in message and seconds < 12.0, (message, seconds)


def test_ranks_that_run_the_same_units() -> None:
    calls = [[ALL, ALL], [SKIP, SKIP], [EXIT, EXIT], [ALL, ALL]]
    assert run_ranks(2, steps, (2,), ("shard",), calls) == [("", 0.0)] * 2


def turns() -> int:
    """Exchanges of ten turns that repeat themselves."""
    group = mesh((2,), ("shard",)).get_group()
    before = ranks.calls_so_far(group)
    for _ in range(5):
        with ranks.take_turn("one", group), ranks.take_turn("the other", group):
            pass
    return ranks.calls_so_far(group) - before


def test_what_follows_again_is_not_exchanged() -> None:
    assert run_ranks(2, turns) == [13, 13]  # ten, and three: each, and the first one behind the other


def turn_of_rank() -> None:
    with ranks.take_turn(f"turn {mesh((2,), ('shard',)).get_local_rank()}", mesh((2,), ("shard",)).get_group()):
        pass


def test_a_turn_of_each_rank_of_its_own() -> None:
    for error in run_ranks(2, turn_of_rank, expect=RanksError):
        assert "rank 0 is in turn 0" in str(error) and "rank 1 is in turn 1" in str(error)
