"""A wrapped module that is called itself: averaged as the wrapper would, by all ranks alike."""

from __future__ import annotations

import copy
import gc
import pickle

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from dmp import DistributedModelParallel, RanksError, ShardingEnv
from sharders import FSDPWrapper
from tests.ranks import mesh, run_ranks
from tests.test_past_hooks import Generating


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


def calls_one_unit() -> None:
    env, wrapper = ShardingEnv.from_mesh(mesh((2,), ("shard",))), FSDPWrapper(units=["encoder.layers.*"])
    model = DistributedModelParallel(Generating(), env, data_parallel_wrapper=wrapper)
    with torch.no_grad(), CommDebugMode() as counts:
        model.get_submodule("encoder.layers.1")(torch.randn(3, 2, 4))
    assert counts.comm_counts[torch.ops.c10d._allgather_base_] == 1


def test_a_unit_is_gathered_without_what_the_root_gathers() -> None:
    run_ranks(2, calls_one_unit)
