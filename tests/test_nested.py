"""Tensors in what models take and return, whatever holds them, and blocks that return such things."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, tensors_of
from tests.ranks import mesh, run_ranks


class Slots:
    """Without a `__dict__`."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_places() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    value = {"slots": Slots(one), "queue": deque([two]), "object": SimpleNamespace(x=three), "set": {one}}
    assert [(where, t) for where, t in tensors_of(value)] == [
        ("['slots']['x']", one),
        ("['queue'][0]", two),
        ("['object']['x']", three),
    ]
    assert [t for _, t in tensors_of([{one}, lambda: two], as_held=True)] == [one, two]


def test_keyed_ones_of_no_samples() -> None:
    """TorchRec's own `to_dict` is an IndexError there, and a rank's last batch may be empty."""
    from torchrec import KeyedJaggedTensor

    none, some = torch.zeros(0, dtype=torch.int64), torch.tensor([3])
    empty, full = (KeyedJaggedTensor(["a"], ids, lengths=lengths) for ids, lengths in ((none, none), (some, some // 3)))
    assert [(place, t.tolist()) for place, t in tensors_of([empty])] == [("[0]['a']", [])]
    assert [(place, t.tolist()) for place, t in tensors_of(full)] == [("['a'].values()", [3]), ("['a'].lengths()", [1])]


def test_what_holds_itself_ends() -> None:
    ring = SimpleNamespace(x=torch.ones(1))
    ring.next = SimpleNamespace(last=ring, others=[ring, {"x": ring.x}])

    def again() -> Any:
        return again, ring.x

    assert len(list(tensors_of([ring, ring]))) == 4
    assert len(list(tensors_of(again, as_held=True))) == 2
    assert list(tensors_of([torch, nn.Linear(1, 1), int, 3, "text", None])) == []


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "slots": (Slots, lambda held: held.x),
    "queue": (lambda x: deque([x]), lambda held: held[0]),
    "set": (lambda x: {x}, lambda held: next(iter(held))),
    "function": (lambda x: lambda: x, lambda held: held()),
    "generator": (lambda x: (each for each in [x]), next),
}


class Block(nn.Module):
    def __init__(self, holder: str) -> None:
        super().__init__()
        self.up, self.down, self.holder = nn.Linear(4, 8), nn.Linear(8, 4), holder

    def forward(self, x: torch.Tensor) -> Any:
        return HOLDERS[self.holder][0](self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self, holder: str) -> None:
        super().__init__()
        self.layers, self.holder = nn.ModuleList(Block(holder) for _ in range(2)), holder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + HOLDERS[self.holder][1](layer(x))
        return x


def _trains() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    for holder in HOLDERS:
        oracle = Model(holder).double()
        model = DistributedModelParallel(copy.deepcopy(oracle), env)
        x = torch.randn(4, 4, dtype=torch.float64)
        oracle(x).square().mean().backward()
        loss = model(x.chunk(2)[env.rank]).square().mean()
        if holder == "generator":
            with pytest.raises(ShardError, match="one that returns a generator"):
                loss.backward()
            continue
        loss.backward()
        for (name, mine), want in zip(model.named_parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), want.grad, msg=f"{holder} {name}")  # type: ignore[union-attr]


def test_blocks_that_return_them_train_where_weights_are_split() -> None:
    """Of slots, queues, sets and functions the backward pass ended in torch's words, of a storage of size 0."""
    run_ranks(2, _trains)
