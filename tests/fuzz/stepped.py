"""A wrapped model that takes steps, and the plain one that has taken the same: the oracle of the habits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, ShardingEnv, table_wise
from tests.fuzz.outcome import Wrong
from tests.wrapped_net import TABLES, Net, batch, loss_of, mixed

LR = 0.1


def plan_of(env: ShardingEnv) -> dict[str, dmp.Layout]:
    return mixed() if env.table_size > 1 else dict.fromkeys(TABLES, table_wise(0))


def wrapped(env: ShardingEnv, module: nn.Module | None = None, **options: Any) -> DistributedModelParallel:
    return DistributedModelParallel(Net() if module is None else module, env=env, plan=plan_of(env), **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Without momentum, so that the oracle is short."""
    return torch.optim.SGD(parameters, lr=LR)


def trained(env: ShardingEnv, steps: int, clip: float | None = None, first: int = 0) -> nn.Module:
    """The unsharded model after steps on the global batch."""
    whole = Net()
    optimizer = sgd(whole.parameters())
    for step in range(first, first + steps):
        for r in range(env.data_size):
            (loss_of(whole, batch(r, step)) / env.data_size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return whole


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, env: ShardingEnv, step: int = 0) -> None:
    """One of the wrapped model."""
    loss_of(model, batch(env.data_rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(model: DistributedModelParallel, whole: nn.Module, tolerance: float = 1e-5) -> None:
    """Wrong where the sharded weights are not these."""
    state = dmp.full_state_dict(model)
    for name, p in whole.state_dict().items():
        if not torch.allclose(state[name].to(p), p, atol=tolerance):
            raise Wrong(f"{name} differs by {(state[name].to(p) - p).abs().max():.3g}")


def check(model: DistributedModelParallel) -> None:
    """A fresh model takes a step."""
    step_of(model, sgd(model.parameters()), model.env)
    same(model, trained(model.env, 1))
