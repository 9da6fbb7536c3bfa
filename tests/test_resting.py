"""Tables that are frozen, some of a module or all, and trained again: numbers are one process's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dmp import (
    DistributedModelParallel,
    InputError,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_optimizer_state_dict,
    full_state_dict,
    row_wise,
    table_wise,
)
from tests.oracle import LR, attach
from tests.ranks import mesh, run_ranks

FEATURES = ["a", "b", "c", "d"]
PLAN = {
    f"embedding_bags.{name}.weight": layout
    for name, layout in zip(FEATURES, (row_wise(), column_wise([0, 1]), data_parallel(), table_wise(1)), strict=True)
}
FROZEN: list[list[str]] = [[], ["b"], ["a", "b", "c"], ["c", "d"], FEATURES, ["a"], []]
"""Tables that rest in each step."""


def made(optimizer: str | None) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=7, embedding_dim=8, feature_names=[name]) for name in FEATURES
    ]
    module = EmbeddingBagCollection(tables=configs)
    attach(module, optimizer)
    return module


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    ids = torch.randint(0, 7, (24,), generator=torch.Generator().manual_seed(10 * step + rank))
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, torch.full((12,), 2))


def freeze(module: nn.Module, names: list[str]) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_(name.split(".")[-2] not in names)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    scale = torch.ones((), requires_grad=True)  # so that there is a graph where all tables rest
    return (module(batch(rank, step)).values() * scale).square().sum()


def on_ranks(names: tuple[str, ...], optimizer: str | None) -> tuple[Any, Any]:
    env = ShardingEnv.from_mesh(mesh((2,) * len(names), names))
    module = made(optimizer)
    freeze(module, ["a", "b", "c"] if optimizer is None else [])  # and trained from the first step
    model = DistributedModelParallel(module, env, plan=PLAN)
    ordinary = torch.optim.Adam(model.parameters(), lr=LR) if optimizer is None else None
    held = list(model.parameters())
    for step, frozen in enumerate(FROZEN):
        if step == 3:
            model = copy.deepcopy(model) if ordinary is None else model
        freeze(model, frozen)
        loss_of(model, env.data_rank, step).backward()
        if ordinary is not None:
            ordinary.step(), ordinary.zero_grad()
    assert ordinary is None or all(a is b for a, b in zip(held, model.parameters(), strict=True))
    return full_state_dict(model), full_optimizer_state_dict(model, ordinary)["state"]


def in_one_process(data_size: int, optimizer: str | None) -> tuple[Any, Any]:
    """In-backward optimizers step at each rank's part; so those of all are in one batch here."""
    module = made(None)
    sums = (
        torch.optim.Adam(module.parameters(), lr=LR)
        if optimizer is None
        else torch.optim.Adagrad(module.parameters(), lr=LR)
    )
    for step, frozen in enumerate(FROZEN):
        freeze(module, frozen)
        for rank in range(data_size):
            (loss_of(module, rank, step) / data_size).backward()
        sums.step(), sums.zero_grad()
    names = {id(p): name for name, p in module.named_parameters()}
    return module.state_dict(), {names[id(p)]: state for p, state in sums.state.items()}


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
@pytest.mark.parametrize("names", [("dp",), pytest.param(("replicate", "shard"), marks=pytest.mark.slow)])
def test_tables_rest_and_are_trained_again(names: tuple[str, ...], optimizer: str | None) -> None:
    """Some of a module's were refused."""
    weights, states = in_one_process(2 ** len(names), optimizer)
    for got, of_state in run_ranks(2 ** len(names), on_ranks, names, optimizer):
        torch.testing.assert_close(got, dict(weights), atol=1e-5, rtol=1e-5)
        for name, state in states.items():
            for key in state.keys() - {"step"}:
                torch.testing.assert_close(of_state[name][key], state[key], atol=1e-4, rtol=1e-4, msg=f"{name} {key}")
            assert float(of_state[name]["step"]) == float(state["step"]), name


def resharded() -> None:
    """One that rests keeps resting, and what would be lost is refused when it is trained again."""
    model = DistributedModelParallel(made("sgd"), plan=PLAN)
    freeze(model, ["b"])
    loss_of(model, model.env.rank, 0).backward()
    before = full_state_dict(model)
    model.reshard({"embedding_bags.a.weight": table_wise(0), "embedding_bags.b.weight": row_wise()})
    loss_of(model, model.env.rank, 1).backward()
    after = full_state_dict(model)
    moved = [name.split(".")[1] for name in before if not torch.equal(before[name], after[name])]
    assert moved == ["a", "c", "d"]
    copied = copy.deepcopy(model)
    freeze(copied, [])
    table = copied.get_parameter("embedding_bags.b.weight")
    with pytest.raises(ShardError, match=r"came to the parameter 'embedding_bags.b.weight'"):
        table.add(1).square().sum().backward()


def test_one_that_rests_is_resharded() -> None:
    """Its hooks could not be taken over."""
    run_ranks(2, resharded)


def on_one_rank_alone() -> None:
    model = DistributedModelParallel(made("sgd"), plan=PLAN)
    if model.env.rank:
        freeze(model, ["b"])
    loss_of(model, model.env.rank, 0)


def test_tables_that_rest_on_one_rank_alone_are_told() -> None:
    for error in run_ranks(2, on_one_rank_alone, expect=InputError):
        assert "differ" in str(error) or "other" in str(error), error


def before_wrapping() -> None:
    module = made("sgd")
    freeze(module, ["b"])
    model = DistributedModelParallel(module, plan=PLAN)
    loss_of(model, model.env.rank, 0).backward()
    freeze(model, ["a"])
    loss_of(model, model.env.rank, 0).backward()


def test_one_that_was_frozen_before_wrapping_has_no_state_of_an_optimizer_in_backward() -> None:
    for error in run_ranks(2, before_wrapping, expect=InputError):
        assert "feature 'b' was frozen when it was wrapped" in str(error)
