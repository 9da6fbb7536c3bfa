"""Optimizers that are wrong on pieces of parameters are refused before they change anything."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import optimizer as torch_optimizer

from dmp import ShardError
from dmp.wrap.optimizer_guard import UNFIT, guard_optimizers, is_sharded
from tests.ranks import mesh, run_ranks


class Shampoo(torch.optim.SGD):
    """One of another package, known by its name."""


class OurMuon(torch.optim.Muon):
    """A subclass."""


FIT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD")
REFUSED = (torch.optim.Muon, OurMuon, torch.optim.Adafactor, torch.optim.LBFGS, Shampoo)


def step(kind: Any, p: nn.Parameter) -> None:
    """One step with a closure that sets the gradient, as LBFGS wants it."""
    optimizer = kind([p], lr=0.1)

    def closure() -> torch.Tensor:
        p.grad = torch.ones_like(p)
        return torch.ones(())

    optimizer.step(closure)


def marked() -> nn.Parameter:
    p = nn.Parameter(torch.ones(4, 6))
    p._dmp_sharded = True  # type: ignore[attr-defined]
    return p


def placed(world: int, *placements: Any) -> nn.Parameter:
    axes = mesh((world,), ("shard",))
    return nn.Parameter(distribute_tensor(torch.ones(4, 6), axes, placements, src_data_rank=None))


def local_of(p: torch.Tensor) -> torch.Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def refuses_pieces() -> None:
    guard_optimizers()
    for kind in REFUSED:
        for p, before in ((marked(), torch.ones(4, 6)), (placed(2, Shard(0)), torch.ones(2, 6))):
            with pytest.raises(
                ShardError, match=rf"{kind.__name__} cannot train parameter 0 .*\(4, 6\).*such as AdamW"
            ):
                step(kind, p)
            assert torch.equal(local_of(p), before)
    for name in FIT:
        for p in (marked(), placed(2, Shard(1))):
            step(getattr(torch.optim, name), p)
            assert local_of(p).ne(1).all(), name


def test_pieces_are_refused() -> None:
    run_ranks(2, refuses_pieces)


def allows_whole_parameters(world: int) -> None:
    guard_optimizers()
    assert not is_sharded(placed(world, Replicate()))
    for kind in REFUSED:
        p = nn.Parameter(torch.ones(4, 6))
        step(kind, p)
        assert not torch.equal(p.detach(), torch.ones(4, 6)), kind
    whole = [placed(world, Replicate())] + [placed(1, Shard(0))] * (world == 1)
    for p in whole:
        assert not is_sharded(p)
        step(torch.optim.Muon, p)
        assert local_of(p).ne(1).all()


@pytest.mark.parametrize("world", [1, 2])
def test_whole_parameters_are_allowed(world: int) -> None:
    """Plain ones, copies, and pieces of which there is one."""
    run_ranks(world, allows_whole_parameters, world)


def guards_once() -> int:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    guard_optimizers()
    guard_optimizers()
    after = len(torch_optimizer._global_optimizer_pre_hooks)
    guard_optimizers()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == after
    return after - before


def test_guarding_twice_is_guarding_once() -> None:
    assert run_ranks(1, guards_once)[0] <= 1


def test_reasons_are_said() -> None:
    with warnings.catch_warnings():
        guard_optimizers()
    for kind in REFUSED:
        reason = next(UNFIT[c.__name__] for c in kind.__mro__ if c.__name__ in UNFIT)
        with pytest.raises(ShardError, match=reason):
            step(kind, marked())
