"""What is drawn in or like split weights: other values in each part, alike in copies, and generators stay alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, ShardingEnv
from tests.ranks import mesh, run_ranks

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda t: torch.zeros_like(t).normal_(),
    "kaiming": lambda t: nn.init.kaiming_uniform_(torch.zeros_like(t)),
    "dropout": lambda t: nn.functional.dropout(torch.ones_like(t)),
    "exponential_": lambda t: torch.zeros_like(t).exponential_(),
    "generator": lambda t: torch.zeros_like(t).uniform_(generator=torch.Generator().manual_seed(3)),
}


def _draws(shape: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[str, torch.Tensor, int]]:
    """Of each: the whole, and the number that comes next on this rank. 5 rows are not cut evenly."""
    model = DistributedModelParallel(nn.Linear(16, 5), ShardingEnv.from_mesh(mesh(shape, axes)))
    weight, found = model.module.weight, []
    assert isinstance(weight, DTensor)
    for name, draw in DRAWS.items():
        torch.manual_seed(5)
        with torch.no_grad():
            drawn = draw(weight)
            torch.manual_seed(5)
            again = draw(weight)
        assert torch.equal(drawn.to_local(), again.to_local())  # type: ignore[attr-defined]
        found.append((name, drawn.full_tensor(), int(torch.randint(10**6, ()))))  # type: ignore[attr-defined]
    return found


def _are_apart(of_ranks: list[list[tuple[str, torch.Tensor, int]]]) -> None:
    for name, whole, number in of_ranks[0]:
        first, second = whole[:2], whole[3:]
        assert not torch.equal(first, second), name
        assert whole.unique().numel() == (2 if name == "dropout" else 80), name
        for of_rank in of_ranks:
            assert any(n == name and torch.equal(w, whole) and x == number for n, w, x in of_rank), name


def test_parts_get_other_values_and_generators_stay_alike() -> None:
    """Each part had the first one's, and a last part that is shorter left its rank's generator behind."""
    _are_apart(run_ranks(2, _draws, (2,), ("shard",)))


def test_copies_of_a_part_get_the_same() -> None:
    _are_apart(run_ranks(4, _draws, (2, 2), ("replicate", "shard")))


def _whole() -> None:
    """What is split along no axis is drawn as by itself."""
    whole = DTensor.from_local(torch.zeros(4), mesh((2,), ("dp",)), run_check=False)
    for generator in (None, torch.Generator().manual_seed(3)):
        torch.manual_seed(dist.get_rank())
        drawn = whole.clone().normal_(generator=generator).to_local(), torch.rand(2)
        torch.manual_seed(dist.get_rank())
        again = generator and torch.Generator().manual_seed(3)
        torch.testing.assert_close(drawn, (torch.zeros(4).normal_(generator=again), torch.rand(2)), rtol=0, atol=0)


def test_what_is_whole_is_drawn_as_it_stands() -> None:
    run_ranks(2, _draws, (2,), ("shard",))
    run_ranks(2, _whole)
