"""Parameters that are unfrozen between forwards of the model, and trained by calls of its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from tests.oracle import in_backward
from tests.ranks import mesh, run_ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def _samples(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def _trained(axis: str, what: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    model, whole = DistributedModelParallel(Two(), env=env), Two()

    def loss(call: nn.Module, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = call(x).square().mean() if what == "both" else torch.zeros(())
        for p in module.parameters():
            p.requires_grad_(True)
        for_whole = module if what == "root" else module.get_submodule("body")
        return y + for_whole(x).square().mean()

    model(_samples(env.rank))
    for _ in range(2):
        for module in (model.module, whole):
            module.requires_grad_(False) if what == "all" else module.get_submodule("body").requires_grad_(False)
        model(_samples(env.rank))
        loss(model, model.module, _samples(env.rank)).backward()
        for rank in range(2):
            whole.get_submodule("body").requires_grad_(False)  # as it was in the wrapped model's forward
            (loss(whole, whole, _samples(rank)) / 2).backward()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            got = torch.zeros_like(q) if p.grad is None else getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
            expected = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(got, expected, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("what", ["part", "root", "both", "all"])
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_what_was_frozen_in_the_last_forward_is_averaged(axis: str, what: str) -> None:
    """`model.module.body(x)` of a body that the last forward had frozen gave copies each rank's own gradients."""
    run_ranks(2, _trained, axis, what)


def _updated(what: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    module, whole = Two(), Two()
    for each in (module, whole):
        in_backward(torch.optim.SGD, each.body.parameters(), lr=0.1)
    model = DistributedModelParallel(module, env=env)
    for each in (module, whole):
        each.body.requires_grad_(False)
        each.head.requires_grad_(what == "some")
    model(_samples(env.rank))
    for each in (module, whole):
        each.body.requires_grad_(True)
    module.body(_samples(env.rank)).square().mean().backward()
    (sum(whole.body(_samples(rank)).square().mean() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(dict(module.body.named_parameters()), dict(whole.body.named_parameters()))


@pytest.mark.parametrize("what", ["some", "all"])
def test_optimizers_in_the_backward_pass_wait_for_the_average(what: str) -> None:
    run_ranks(2, _updated, what)
