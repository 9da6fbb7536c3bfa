"""Models that hold what Python does not copy: they are wrapped, verified and unsharded as others are."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist

from dmp import DistributedModelParallel, ShardingEnv, to_unsharded, verify
from dmp.deep_copy import deep_copy
from dmp.ranks.saying import say_once
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import Llama


class Holding(Llama):
    """As an attention among ranks, a writer of logs or a cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.held = dist.group.WORLD, {"lock": [threading.Lock()], "sizes": [1]}


class Memory:
    """A user's own, with a lock inside."""

    def __init__(self) -> None:
        self.lock, self.seen = threading.Lock(), 0


def of_a_model(axis: str) -> None:
    model = DistributedModelParallel(Holding(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    verify(model, Holding(), torch.arange(8).reshape(2, 4))
    model.module.held = {**model.module.held, "sizes": [2]}  # since the wrap: copies had what it was then
    plain = to_unsharded(model)
    assert plain.held["sizes"] == [2] and plain.held["sizes"] is not model.module.held["sizes"]
    assert plain.group is dist.group.WORLD
    assert plain.held["lock"] == model.module.held["lock"]
    assert copy.deepcopy(model).module.group is dist.group.WORLD


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_a_model_that_holds_a_group_and_a_lock(axis: str) -> None:
    """The wrap ended in `cannot pickle`."""
    run_ranks(2, of_a_model, axis)


def test_what_is_copied_is_copied() -> None:
    module = torch.nn.Linear(1, 1)
    module.held = {"lock": threading.Lock(), "sizes": [1], "self": module}  # type: ignore[assignment]
    made = deep_copy(module)
    assert made.held["lock"] is module.held["lock"]  # type: ignore[index]
    assert made.held["sizes"] == [1] and made.held["sizes"] is not module.held["sizes"]  # type: ignore[index]
    assert made.held["self"] is made and made.weight is not module.weight


def test_what_both_write_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A user's own object with a lock inside: the copy went on with the model's memory in silence."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].held = [Memory(), threading.Lock()]  # type: ignore[assignment]
    model = DistributedModelParallel(module, ShardingEnv.single())
    for make in (copy.deepcopy, to_unsharded):
        say_once.cache_clear()
        make(model)
        assert ["shares '0.held' (Memory) with the model" in text for text in caplog.messages] == [True]
        caplog.clear()
