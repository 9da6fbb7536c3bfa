"""A wrapped module that is called itself: averaged as the wrapper would, by all ranks alike."""

from __future__ import annotations

import copy
import gc
import pickle

import torch
from torch import nn

from dmp import DistributedModelParallel, RanksError, ShardingEnv
from tests.ranks import mesh, run_ranks


def wrapped_and_let_go() -> tuple[list[float], bool]:
    """The module goes on alone, and one rank alone collects garbage."""
    module = nn.Linear(2, 1)
    DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    rank = torch.distributed.get_rank()
    if rank == 0:
        gc.collect()
    copy.deepcopy(module)
    pickle.dumps(module)
    module(torch.full((1, 2), 1.0 + rank)).sum().backward()
    assert module.weight.grad is not None
    gradient: list[float] = module.weight.grad[0].tolist()
    model = DistributedModelParallel(nn.Linear(2, 1), ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    model(torch.ones(1, 2))
    return gradient, any(name.startswith("held") for name in vars(model.module))


def test_a_module_whose_wrapper_is_let_go_is_averaged() -> None:
    assert run_ranks(2, wrapped_and_let_go) == [([1.5, 1.5], False)] * 2


def past_its_forward_on_one_rank() -> None:
    model = DistributedModelParallel(nn.Linear(2, 1), ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    called = model if torch.distributed.get_rank() else model.module
    called(torch.ones(1, 2)).sum().backward()


def test_a_pass_that_is_past_the_forward_on_one_rank_alone_is_told() -> None:
    for error in run_ranks(2, past_its_forward_on_one_rank, expect=RanksError):
        assert "past its forward" in str(error)
