"""A small recommendation model, wrapped, for tests of the wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dmp
from dmp import (
    DistributedModelParallel,
    ShardingEnv,
    data_parallel,
    rectangles,
    row_wise,
    table_wise,
)
from dmp.chunked import as_chunks
from tests.equality import attach, random_rectangles

TABLES = ("users.weight", "items.weight", "more.weight")
LR = 0.1


class Net(nn.Module):
    """Three tables into two dense layers with a buffer."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users, self.items, self.more = nn.Embedding(11, 8), nn.EmbeddingBag(7, 8), nn.EmbeddingBag(30, 4)
        self.over, self.out = nn.Linear(20, 6), nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.users(ids % 11).sum(1), self.items(ids % 7), self.more(ids % 30)], 1)
        return self.out(self.over(both).relu()).squeeze(1) * self.scale


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """(4, 3) ids."""
    return torch.randint(0, 1000, (4, 3), generator=torch.Generator().manual_seed(50 * step + rank))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - ids.sum(1) / 1000).pow(2).mean()


def mixed() -> dict[str, dmp.Layout]:
    return {"users.weight": row_wise(), "items.weight": table_wise(0), "more.weight": data_parallel()}


def plan_for(env: ShardingEnv, seed: int | None = None) -> dict[str, dmp.Layout]:
    """A mixed plan, or random rectangles by seed."""
    if seed is None:
        return mixed()
    shapes = {n: tuple(p.shape) for n, p in Net().named_parameters() if n in TABLES}
    return {n: rectangles(random_rectangles(s, env.table_size, seed + i)) for i, (n, s) in enumerate(shapes.items())}


def wrap(env: ShardingEnv | None = None, plan: Any = None, optimizer: str | None = None) -> DistributedModelParallel:
    """`Net`, its tables with an in-backward optimizer or none."""
    module = Net()
    for name in TABLES:
        attach(module.get_submodule(name.removesuffix(".weight")), optimizer)
    return DistributedModelParallel(module, env=env, plan=plan if plan is not None else mixed())


def same_values(model: DistributedModelParallel, module: nn.Module) -> None:
    """What this rank holds equals the whole module's values."""
    state, whole = model.state_dict(), module.state_dict()
    assert set(state) == set(whole)
    for name, value in state.items():
        held = as_chunks(value)
        for piece, at in zip(held.chunks, held.offsets, strict=True):
            part = whole[name][tuple(map(slice, at, map(sum, zip(at, piece.shape))))]  # noqa: B905
            torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


class Doubled(nn.Embedding):
    """A table's module with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)
