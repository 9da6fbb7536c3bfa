"""Stages of a pipeline, each on what is left of the mesh, wrapped or split by other means: one process's numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dmp import (
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.ranks import mesh, run_ranks

MICRO = 2


def parts() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))]


def by_stages(axis: str) -> None:
    both = mesh((2, 2), ("pp", axis))
    at, env = both.get_local_rank("pp"), ShardingEnv.from_mesh(both[axis])
    plain, loss = nn.Sequential(*parts()), nn.functional.mse_loss
    model = DistributedModelParallel(parts()[at], env)
    stage = PipelineStage(model, at, 2, torch.device("cpu"), group=both.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        xs, ys = torch.randn(2, 4, 4), torch.randn(2, 4, 2)
        given = xs[env.data_rank : env.data_rank + 1] if at == 0 else ()
        schedule.step(*given, target=ys[env.data_rank] if at else None)
        loss(plain(xs), ys).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_state_dict(model), dict(plain[at].state_dict()))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_stages_of_a_schedule(axis: str) -> None:
    run_ranks(4, by_stages, axis)


def of_stages_that_nobody_wrapped(folder: str) -> None:
    """Each has parameters, and buffers, of the same names."""
    both = mesh((2, 2), ("pp", "dp"))
    at = both.get_local_rank("pp")
    plain, split, other = (nn.BatchNorm1d(4) for _ in range(3))
    nn.init.constant_(plain.weight, at + 1.0)
    split.load_state_dict(plain.state_dict())
    for module in (split, other):
        fully_shard(module, mesh=both["dp"])
    for module in (plain, split):
        (module(torch.arange(8.0).view(2, 4)) * (at + torch.eye(4)[:2])).sum().backward()
        clip_grad_norm_(module, 0.1)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, split, other)]
    optimizers[0].step(), optimizers[1].step()
    save_checkpoint(f"{folder}/{at}", split, optimizers[1])
    load_checkpoint(f"{folder}/{at}", other, optimizers[2])
    for module, optimizer in zip((split, other), optimizers[1:], strict=True):
        torch.testing.assert_close(full_state_dict(module), dict(plain.state_dict()))
        state = full_optimizer_state_dict(module, optimizer)["state"]
        torch.testing.assert_close(state, full_optimizer_state_dict(plain, optimizers[0])["state"])


def test_stages_that_nobody_wrapped_keep_apart(tmp_path: Path) -> None:
    """All got the first stage's values, and were clipped by a mean of both norms, in silence."""
    run_ranks(4, of_stages_that_nobody_wrapped, str(tmp_path))


def of_copies() -> None:
    """Where only the tensor axis splits, what is written is written once."""
    both = mesh((2, 2), ("dp", "tp"))
    module = parallelize_module(parts()[1], both["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    whole = full_state_dict(module, rank0_only=True)
    assert bool(whole) is (both.get_rank() == 0)
    torch.testing.assert_close(whole, dict(parts()[1].state_dict()) if whole else {})


def test_copies_of_what_is_split_are_of_one_model() -> None:
    run_ranks(4, of_copies)


def in_two(axis: str) -> None:
    """As torch's schedules without a bubble do it."""
    both = mesh((1, 2), ("pp", axis))
    model = DistributedModelParallel(parts()[1], ShardingEnv.from_mesh(both[axis]))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=both.get_group("pp"))
    x = torch.ones(3, 8, requires_grad=True)
    given = {"stage_output": (model(x).sum(),), "output_grads": None, "input_values": [x]}
    with pytest.raises(RuntimeError) as raised:
        stage.backward_maybe_with_nosync("input", given)
    assert isinstance(raised.value.__cause__, ShardError)
    assert "ScheduleZBVZeroBubble" in str(raised.value.__cause__)
    x = torch.ones(3, 8, requires_grad=True)
    plain = copy.deepcopy(parts()[1])
    plain(y := torch.ones(3, 8, requires_grad=True)).sum().backward()
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x)[0], y.grad)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_gradients_of_weights_apart_from_those_of_inputs_are_refused(axis: str) -> None:
    """They were each rank's own, or none at all, in silence."""
    run_ranks(2, in_two, axis)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_stage_that_torch_has_traced_is_copied() -> None:
    """It holds graphs that look for weights in each other."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    from dmp.wrap.values.skeleton import skeleton_of

    first, second = parts()
    whole = nn.Sequential(nn.Sequential(first, nn.Sequential(nn.Linear(8, 8), nn.Tanh())), second)
    module = pipeline(whole, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING}).get_stage_module(0)
    assert [*skeleton_of(module, []).state_dict()] == [*module.state_dict()]
