"""Looking at a model that FSDP2 has left gathered is local and without effect: one rank may, at any point of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, ShardingEnv, to_unsharded
from sharders import FSDPWrapper
from tests.ranks import mesh, run_ranks


class Units(nn.Module):
    """Two blocks that are units of FSDP2, between weights that the root keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.top = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bottom(x)
        for layer in self.layers:
            x = layer(x).relu()
        out: torch.Tensor = self.top(x)
        return out


def wrapped(kept: bool | None) -> DistributedModelParallel:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    wrapper = FSDPWrapper(reshard_after_forward=kept)
    return DistributedModelParallel(Units(), env, sharders=[], data_parallel_wrapper=wrapper)


def look(model: DistributedModelParallel) -> None:
    """In every way that only looks; each shows this rank's pieces under the unsharded names."""
    parent, names = nn.Sequential(model), dict(Units().named_parameters())
    for seen in (model.named_parameters(), parent[0].named_parameters(), model.state_dict().items()):
        found = dict(seen)
        assert list(found) == list(names) and all(isinstance(p, DTensor) for p in found.values())
    for tensors in (model.parameters(), parent.parameters(), parent.state_dict().values()):
        assert all(isinstance(p, DTensor) for p in tensors)
    assert next(model.named_modules())[1] is model  # and nobody asks for the next
    assert len(list(model.modules())) == 1 + len(list(model.module.modules()))
    assert not list(model.named_buffers()) and str(model) and repr(model.plan) and model.training


def looks_between(kept: bool | None, gradients: bool) -> None:
    """Rank 0 alone looks after a forward, and between a forward and its backward."""
    model, plain, x = wrapped(kept), Units(), torch.randn(3, 4)
    with torch.set_grad_enabled(gradients):
        model(x)
    if model.env.rank == 0:
        look(model)
    loss = model(x).square().sum()
    if model.env.rank == 0:
        look(model)
    loss.backward()
    plain(x).square().sum().backward()
    if model.env.rank == 0:
        look(model)
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize(("kept", "gradients"), [(None, True), (None, False), (False, True), (False, False)])
def test_one_rank_may_look_at_any_point(kept: bool | None, gradients: bool) -> None:
    run_ranks(2, looks_between, kept, gradients, timeout=20)


def shows_what_was_written(kept: bool | None) -> list[bool]:
    """Whether a forward sees what was written through a look since another; and one in the middle of a look."""
    model, x = wrapped(kept), torch.randn(3, 4)
    seen: list[bool] = []

    def forward() -> Any:
        return model(x).detach().clone()

    before = forward()
    with torch.no_grad():
        for p in nn.Sequential(model).parameters():
            p.mul_(2)
            between = forward()  # while the generator waits
    seen.append(bool((between != before).all()))
    model.state_dict()
    after, values = forward(), dict(model.state_dict())
    seen.append(torch.equal(after, between))
    model.zero_grad()
    for name, p in model.named_parameters():
        p.data.copy_(values[name] / 2)
    if kept is None:  # what was asked to stay does not see writes that torch does not count
        seen.append(torch.equal(forward(), before))
    return seen


@pytest.mark.parametrize("kept", [None, False])
def test_what_is_written_while_weights_are_gathered_is_seen(kept: bool | None) -> None:
    for seen in run_ranks(2, shows_what_was_written, kept, timeout=20):
        assert seen == [True] * len(seen)


def freezes_what_is_gathered(by_model: bool) -> None:
    """Between a forward and its backward pass; copies, and the plain module, have it frozen."""
    model, x = wrapped(None), torch.randn(3, 4)
    kept = model(x)
    first, *_, last = (name for name, _ in model.named_parameters())
    for name in (first, last):
        frozen = dict(model.named_parameters())[name] if by_model else model.module.get_parameter(name)
        frozen.requires_grad_(False)
    for made in (copy.deepcopy(model), to_unsharded(model), model):
        assert {name for name, p in made.named_parameters() if not p.requires_grad} == {first, last}
    del kept


@pytest.mark.parametrize("by_model", [True, False])
def test_what_is_frozen_while_weights_are_gathered_is_frozen_in_copies(by_model: bool) -> None:
    """A copy trained on what was frozen by the gathered weight, a plain module what was frozen by the chunk."""
    run_ranks(2, freezes_what_is_gathered, by_model, timeout=20)
