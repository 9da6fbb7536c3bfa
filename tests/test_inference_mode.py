"""Evaluations under `torch.inference_mode`: what they make first, training writes to later."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dmp
from dmp import DistributedModelParallel, ShardingEnv, column_wise, row_wise, table_wise
from tests.ranks import run_ranks
from tests.wrapped_net import LR, Net, batch, loss_of, same_values


def _step(model: torch.nn.Module, ranks: range, of: int, step: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for rank in ranks:
        (loss_of(model, batch(rank, step)) / of).backward()
    optimizer.step()
    optimizer.zero_grad()


def _both(axis: str) -> tuple[DistributedModelParallel, Net]:
    """Wrapped on the ranks of the test, and plain."""
    env = ShardingEnv.from_mesh(DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=(axis,)))
    plan = {"users.weight": row_wise(), "items.weight": table_wise(0), "more.weight": table_wise(1)}
    return DistributedModelParallel(Net(), env=env, plan=plan), Net()


def _evaluated_alike(model: torch.nn.Module, whole: torch.nn.Module, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), whole(ids), atol=1e-5, rtol=1e-5)


def _first(axis: str, items: str) -> None:
    group = dist.new_group()  # whose memory the evaluation is the first to use
    env = ShardingEnv.from_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,)))
    layouts = {"rows": row_wise(), "columns": column_wise([1, 0]), "whole": table_wise(0)}
    plan = {"users.weight": layouts["rows"], "items.weight": layouts[items], "more.weight": table_wise(1)}
    model, whole = DistributedModelParallel(Net(), env=env, plan=plan), Net()
    mine = range(env.data_rank, env.data_rank + 1)
    for step in range(2):
        _evaluated_alike(model, whole, batch(env.data_rank, 9 + step))
        _step(model, mine, 1, step)
        _step(whole, range(env.data_size), env.data_size, step)
        same_values(model, whole)


@pytest.mark.parametrize("items", ["rows", "columns", "whole"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_an_evaluation_comes_first(axis: str, items: str) -> None:
    """As in trainers that try the validation out: a backward pass that writes into another rank's memory ended."""
    run_ranks(2, _first, axis, items)


def _after_freezing(axis: str, is_copy: bool) -> None:
    model, whole = _both(axis)
    env = model.env
    model = copy.deepcopy(model) if is_copy else model
    mine = range(env.data_rank, env.data_rank + 1)
    for step, is_trained in enumerate((True, False, True)):
        for m in (model, whole):
            m.get_parameter("over.bias").requires_grad_(is_trained)
        _evaluated_alike(model, whole, batch(env.data_rank, 9))
        _step(model, mine, 1, step)
        _step(whole, range(env.data_size), env.data_size, step)
        same_values(model, whole)


@pytest.mark.parametrize(("axis", "is_copy"), [("dp", False), ("shard", True), ("tp", False)])
def test_a_weight_is_frozen_before_an_evaluation(axis: str, is_copy: bool) -> None:
    """What averages is made anew in the evaluation's forward, where nothing has a gradient."""
    run_ranks(2, _after_freezing, axis, is_copy)


def _state_in_an_evaluation(axis: str, folder: str) -> None:
    """Each call that an evaluation may make of the best model so far; training goes on as if it had not been made."""
    model, whole = _both(axis)
    env = model.env
    mine = range(env.data_rank, env.data_rank + 1)
    _step(model, mine, 1, 0)
    _step(whole, range(env.data_size), env.data_size, 0)
    with torch.inference_mode():
        state = dmp.full_state_dict(model)
        dmp.save_checkpoint(folder, model)
        dmp.load_checkpoint(folder, model)
        model.load_state_dict(state)
        model.load_state_dict(model.state_dict())
        plain, copied = dmp.to_unsharded(model), copy.deepcopy(model)
        dmp.verify(model, whole, (batch(env.data_rank),))
    assert not any(value.is_inference() or value.requires_grad for value in state.values())
    torch.testing.assert_close(plain.state_dict(), whole.state_dict(), atol=1e-5, rtol=1e-5)
    _step(whole, range(env.data_size), env.data_size, 1)
    for trained in (model, copied):
        _step(trained, mine, 1, 1)
        same_values(trained, whole)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_state_is_taken_and_given_in_an_evaluation(axis: str, tmp_path: Path) -> None:
    """Of split weights, a save under inference mode ended in torch's words; a copy from there did not train."""
    run_ranks(2, _state_in_an_evaluation, axis, str(tmp_path / "best"))
