"""Ranks along a tensor axis that call a model with different samples, or draw other numbers in it: told, where they
trained on neither.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, InputError, ShardingEnv, to_unsharded
from tests.ranks import mesh, run_ranks


class Tagger(nn.Module):
    """Whose forward takes whatever; D hidden size, T positions."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(
        self, ids: torch.Tensor, bias: Any = None, cache: tuple[torch.Tensor, ...] = (), batch: Any = None
    ) -> torch.Tensor:
        x_BTD = self.emb(ids) + sum(cache)
        return x_BTD + self.mlp(x_BTD) + (0 if bias is None else bias) + (0 if batch is None else batch["more"])

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, num: int) -> torch.Tensor:
        for _ in range(num):
            logits = self(ids)[:, -1] @ self.emb.weight.T
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        return ids


PLAN = {"mlp.0": "colwise", "mlp.2": "rowwise"}


def wrapped(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[DistributedModelParallel, ShardingEnv]:
    from sharders import TensorParallelSharder

    env = ShardingEnv.from_mesh(mesh(shape, names))
    return DistributedModelParallel(Tagger(), env, sharders=[TensorParallelSharder(PLAN)]), env


def ids(seed: int) -> torch.Tensor:
    return torch.randint(20, (2, 3), generator=torch.Generator().manual_seed(seed))


CALLS: dict[str, Callable[[DistributedModelParallel, int], Any]] = {
    "ids": lambda model, rank: model(ids(rank)).sum().backward(),
    "ids in evaluation": lambda model, rank: model.eval()(ids=ids(rank)),
    "ids after some steps": lambda model, rank: [model(ids(step if step < 5 else rank)) for step in range(20)],
    "tokens after more": lambda model, rank: (
        [model(ids(step)) for step in range(12)],
        torch.manual_seed(rank),
        model.module.generate(ids(0), 6),  # type: ignore[operator]
    ),
    "a backbone past the forward": lambda model, rank: model.module.mlp(torch.full((1, 8), float(rank))),  # type: ignore[operator]
    "lengths of a batch": lambda model, rank: model(ids(0)[:, : rank + 1]),
    "a figure beside the ids": lambda model, rank: model(ids(0), bias=torch.tensor([0.5 + rank])),
    "one in a batch": lambda model, rank: model(ids(0), batch={"more": torch.tensor([0.5 + rank])}),
    "tokens that are sampled": lambda model, rank: (torch.manual_seed(rank), model.module.generate(ids(0), 6)),  # type: ignore[operator]
}


def calls(name: str) -> None:
    model, env = wrapped((2,), ("tp",))
    CALLS[name](model, env.rank)


@pytest.mark.parametrize("name", CALLS)
def test_different_samples(name: str) -> None:
    for error in run_ranks(2, calls, name, expect=InputError):
        assert "ranks 0 and 1 along mesh axis 'tp' call the model with different batches" in str(error)


def takes_what_each_may_have(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Samples of their own along the data axis, caches and activations of their own along the other."""
    model, env = wrapped(shape, names)
    for step in range(10):
        own = torch.full((8,), float(env.rank))
        model(ids(100 * env.data_rank + step), bias=own.requires_grad_(), cache=(own.detach(),)).sum().backward()
    torch.manual_seed(0)
    if "shard" not in names:  # where each rank has the weight that it reads
        model.module.generate(ids(env.data_rank), 4)  # type: ignore[operator]
    to_unsharded(model)(ids(env.rank))  # alone
    if env.data_size == 1:
        with pytest.raises(InputError, match="different batches"):
            copy.deepcopy(model)(ids(env.rank))


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("tp",)), *(pytest.param((2, 2), (other, "tp"), marks=pytest.mark.slow) for other in ("dp", "shard"))],
)
def test_what_may_differ(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    run_ranks(2 ** len(shape), takes_what_each_may_have, shape, names)


class Dropping(Tagger):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.drop = way, nn.Dropout(0.5)

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        out = super().forward(*args, **options)
        if not self.training or self.way == "none":
            return out
        return (
            self.drop(out)
            if self.way == "torch"
            else out * (random.random() if self.way == "python" else np.random.rand())
        )


def dropping(way: str, plan: dict[str, str] | None = None) -> tuple[DistributedModelParallel, ShardingEnv]:
    from sharders import TensorParallelSharder

    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    return DistributedModelParallel(Dropping(way), env, sharders=[TensorParallelSharder(plan or PLAN)]), env


def draws_alike(way: str) -> None:
    """However the ranks were seeded before; what they draw past the forward, or in evaluation, is their own."""
    rank = torch.distributed.get_rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    model, _ = dropping(way)
    for step in range(3):
        told = [torch.empty(2, 3, 8) for _ in range(2)]
        torch.distributed.all_gather(told, model(ids(step)).detach())
        assert torch.equal(*told)
    model.eval()
    for step in range(3):
        torch.rand(1 + rank)
        model(ids(step))


def draws_apart(way: str, is_late: bool) -> None:
    model, env = dropping(way)
    for step in range(70 if is_late else 8):
        if step == (9 if is_late else 1) and env.rank:
            torch.rand(3), random.random(), np.random.rand()
        model(ids(step))


@pytest.mark.parametrize("way", ["torch", "python", "numpy"])
def test_numbers_that_are_drawn_in_forwards(way: str) -> None:
    """One rank that has drawn something by itself drops other parts of what is one activation."""
    run_ranks(2, draws_alike, way)
    whose = "torch's" if way == "torch" else "Python's or NumPy's"
    for error in run_ranks(2, draws_apart, way, way == "torch", expect=InputError):
        assert f"has drawn other numbers on rank 1 along mesh axis 'tp' than on rank 0, of {whose} generator" in str(
            error
        )
    run_ranks(2, draws_apart, "none", False)


def left_whole() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model = DistributedModelParallel(nn.Sequential(nn.Conv1d(2, 3, 2)), env)
    model(torch.full((1, 2, 4), float(env.rank)))


def test_of_a_model_that_stays_whole() -> None:
    """Nobody averages the gradients of what each has whole."""
    for error in run_ranks(2, left_whole, expect=InputError):
        assert "call the model with different batches" in str(error)


def other_losses(is_late: bool) -> None:
    """Of labels that each rank has by itself, to the same samples."""
    model, env = wrapped((2,), ("tp",))
    for step in range(17):
        label = env.rank if not is_late or step > 9 else 0
        (model(ids(step)) - label).square().sum().backward()


@pytest.mark.parametrize("is_late", [False, True])
def test_other_losses(is_late: bool) -> None:
    for error in run_ranks(2, other_losses, is_late, expect=InputError):
        assert "its gradient on rank 1 along it is not that on rank 0: ranks along it have the same samples" in str(
            error
        )
