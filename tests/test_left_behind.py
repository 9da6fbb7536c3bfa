"""What a process that goes on for days keeps of steps, plans and models that are over: nothing."""

from __future__ import annotations

import copy
import functools
import gc
import types
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dmp import (
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    data_parallel,
    live_models,
    ranks,
    row_wise,
    table_wise,
)
from dmp.ranks import call_log, turns
from dmp.wrap.earlier import written_earlier
from dmp.wrap.making import arguments
from dmp.wrap.optimizers import step_turns
from tests.ranks import mesh, run_ranks
from tests.state_jobs import TABLES, build, dense_optimizer, my_batch

PLANS = [dict.fromkeys(TABLES, place) for place in (row_wise(), column_wise([0, 1]), data_parallel(), table_wise(0))]


def alive() -> dict[str, int]:
    """How many there are of what a model is made of, hooks too; a channel may still add to its blocks of memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # properties of what torch deprecates
        objects = gc.get_objects()
        kinds = (torch.nn.Module, torch.Tensor, types.FunctionType, functools.partial)
        return {kind.__name__: sum(issubclass(type(each), kind) for each in objects) for kind in kinds}


def trained(model: DistributedModelParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(my_batch(step, model.env)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def awaited() -> set[tuple[str, int]]:
    """Calls whose backward pass may yet come: a result that an earlier test keeps is among them."""
    return {(key, number) for key, sequence in call_log.sequences.items() for number in sequence.awaited}


def wraps(kind: str) -> list[dict[str, int]]:
    """Counts after models and their copies, in one plan after the other, none of which anybody has kept."""
    gc.collect()
    kept = (live_models.models, live_models.copies_of, arguments._taken, step_turns._known, written_earlier._watches)
    before = [len(each) for each in kept]  # torch keeps what a hook on its own weight knows, as of an earlier test
    awaited_before = awaited()
    found = []
    for turn in range(4):
        for layout in ("row_wise", "column_wise", "table_wise"):
            model = build(layout, kind, (2,), None)
            optimizer = dense_optimizer(model, kind)
            trained(model, optimizer, turn)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                twin(my_batch(turn, model.env))
            del model, optimizer, twin
        found.append(alive())
    assert all(len(each) <= was for each, was in zip(kept, before, strict=True)), ([*map(len, kept)], before)
    assert not awaited() - awaited_before
    return found


class Scaled(torch.nn.Module):
    """A weight that is split, one that lies whole on each rank, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def dense_ones(axis: str) -> list[bool]:
    """Which of a model and its copy are there when nobody keeps them."""
    model = DistributedModelParallel(Scaled(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in (model, twin):
        each(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    told = [weakref.ref(each.module) for each in (model, twin)]
    del model, twin, each, optimizer
    for _ in range(3):
        gc.collect()  # what one finds may hold more
    return [each() is not None for each in told]


def reshards() -> list[dict[str, int]]:
    """Counts after rounds through all plans."""
    model = build("row_wise", "adagrad", (2,), None)
    optimizer = dense_optimizer(model, "adagrad")
    found = []
    for turn in range(4):
        for plan in PLANS:
            model.reshard(plan, optimizer)
            trained(model, optimizer, turn)
        found.append(alive())
    return found


def test_models_that_nobody_keeps() -> None:
    for kind in ("adagrad", "none"):
        for _, second, *_, last in run_ranks(2, wraps, kind):
            assert last == second, kind


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_dense_models_that_nobody_keeps(axis: str) -> None:
    assert run_ranks(2, dense_ones, axis) == [[False, False]] * 2


def test_plans_that_are_over() -> None:
    for _, second, *_, last in run_ranks(2, reshards):
        assert last == second


def many_turns() -> tuple[int, int]:
    """Turns that are known after those of many models, and exchanges of turns that come again."""
    group = mesh((2,), ("shard",)).get_group()
    known = call_log.sequence_of(group).follows
    with mock.patch.object(turns, "_KEPT", len(known) + 4):
        for model in range(20):
            with ranks.take_turn(f"the pass of model {model}", group, ends_pass=True):
                pass
        num_known = len(known) - turns._KEPT
    for _ in range(3):
        before = ranks.calls_so_far(group)
        for name in ("a turn that comes again", "and another"):
            with ranks.take_turn(name, group):
                pass
    dist.barrier()
    return num_known, ranks.calls_so_far(group) - before


def test_turns_of_models_that_are_over_are_forgotten() -> None:
    for num_known, calls in run_ranks(2, many_turns):
        assert num_known <= 0 and calls == 2
