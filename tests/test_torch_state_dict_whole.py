"""torch's functions for state dicts over a wrapped model give whole tensors where asked for, and take them back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_optimizer_state_dict,
    full_state_dict,
    row_wise,
    table_wise,
)
from tests.ranks import mesh, run_ranks
from tests.test_survival import mortal_ranks
from tests.wrapped_net import TABLES, Net, batch, loss_of

PLANS = [
    dict(zip(TABLES, (row_wise(), table_wise(0), data_parallel()), strict=True)),
    dict(zip(TABLES, (column_wise([1, 0]), table_wise(1), row_wise()), strict=True)),
]


def made(axis: str, plan: int, steps: int) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    model = DistributedModelParallel(Net(plan), ShardingEnv.from_mesh(mesh((2,), (axis,))), plan=PLANS[plan])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: DistributedModelParallel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(model.env.data_rank, step)).backward()
        optimizer.step(), optimizer.zero_grad()


def same(got: Any, wanted: Any) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        if isinstance(value, dict):
            same(got[name], value)
        else:
            torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}")


def whole(axis: str, flattened: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model, optimizer = made(axis, 0, 2)
    weights, states = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload, flatten_optimizer_state_dict=flattened)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        if offload and model.env.rank:
            assert not of_model and not of_optimizer
            continue
        same(of_model, weights)
        assert not any(type(value) is not torch.Tensor for value in of_model.values())
        if flattened:
            flat = {f"state.{n}.{key}": value for n, of in states["state"].items() for key, value in of.items()}
            same({key: value for key, value in of_optimizer.items() if key.startswith("state.")}, flat)
        else:
            same(of_optimizer["state"], states["state"])
    if flattened:  # torch's own cannot take it back
        return
    other, of_other = made(axis, 1, 1)
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_state_dict(model, optimizer, options=options))  # else torch's optimizers share it
    set_state_dict(other, of_other, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    go_on_alike(model, optimizer, other, of_other)


def go_on_alike(model: Any, optimizer: Any, other: Any, of_other: Any) -> None:
    same(full_optimizer_state_dict(other, of_other)["state"], full_optimizer_state_dict(model, optimizer)["state"])
    train(model, optimizer, range(5, 7)), train(other, of_other, range(5, 7))
    same(full_state_dict(other), full_state_dict(model))


@pytest.mark.parametrize(("axis", "flattened"), [("dp", False), ("shard", False), ("shard", True)])
@pytest.mark.sampled(2)
def test_whole_tensors_and_back_into_another_plan(axis: str, flattened: bool) -> None:
    """They left tables in chunks."""
    run_ranks(2, whole, axis, flattened)


def without_tables(axis: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
    states, models = [], []
    for seed in (3, 4):
        module = Net(seed)
        module.users.requires_grad_(False)
        model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), (axis,))), plan=PLANS[1])
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        train(model, optimizer, range(seed - 2))
        models.append((model, optimizer)), states.append(full_state_dict(model))
    of_model, of_optimizer = get_state_dict(*models[0], options=options)
    assert "users.weight" not in of_model
    del of_model["items.weight"]
    own, states_of = models[1][0].env.rank, {"optim_state_dict": of_optimizer, "options": options}
    for rank in range(2):
        lacking = {name: value for name, value in of_model.items() if own != rank or name != "more.weight"}
        with pytest.raises(CheckpointError, match=f"'more.weight' is given as a whole on rank {1 - rank}, and not on"):
            set_state_dict(*models[1], model_state_dict=lacking, **states_of)
    set_state_dict(*models[1], model_state_dict=of_model, **states_of)
    rest = {name: states[1][name] for name in ("users.weight", "items.weight")}
    same(full_state_dict(models[1][0]), states[0] | rest)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_tables_that_are_not_given_stay(axis: str) -> None:
    """torch filled in the parameters: parts, which were refused for their shape."""
    run_ranks(2, without_tables, axis)


def beside_others() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    made("dp", 0, 1)
    plain = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(plain.parameters())
    plain(torch.ones(1, 2)).sum().backward(), optimizer.step(), optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    state = get_state_dict(plain, optimizer, options=options)
    assert set(state[1]["state"]) == {"weight", "bias"}
    set_state_dict(plain, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)


def test_others_are_torchs() -> None:
    run_ranks(2, beside_others)


def from_rank_0(axis: str, plan: int, kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model, optimizer = made(axis, 0, 2)
    state = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    other, of_other = made(axis, plan, 1)
    given = ({}, {}) if model.env.rank else state
    if kind == "missing" and not model.env.rank:
        del state[1]["state"]["out.weight"]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(other, of_other, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    go_on_alike(model, optimizer, other, of_other)


@pytest.mark.parametrize(("axis", "plan"), [("dp", 0), ("dp", 1), ("shard", 1), ("tp", 1)])
@pytest.mark.sampled(4)
def test_what_rank_0_has_alone(axis: str, plan: int) -> None:
    """The others went on, as where an optimizer alone is loaded."""
    run_ranks(2, from_rank_0, axis, plan, "")


def test_what_rank_0_lacks() -> None:
    first, second = mortal_ranks(2, from_rank_0, "dp", 0, "missing")
    assert "RuntimeError: Missing optimizer state for parameter 'out.weight'" in first
    assert "rank 0 is in torch's set_state_dict, which raises RuntimeError: Missing optimizer state" in second


def fused_by_torch() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, _ = made("dp", 0, 0)
    get_optimizer_state_dict(model, model.fused_optimizer)


def test_the_optimizer_in_backward_is_refused() -> None:
    """torch gave numbers for names."""
    run_ranks(2, fused_by_torch, expect=ShardError)
