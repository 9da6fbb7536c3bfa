"""Parameters that are added to a wrapped model and trained past it, as by PEFT on `model.module`: an error, not copies
that part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.beside = base.requires_grad_(False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.beside(x)
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def adapt(module: nn.Sequential) -> nn.Module:
    torch.manual_seed(1)
    module[1] = Adapted(module[1])  # type: ignore[arg-type]
    return module


def past(axis: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    model = DistributedModelParallel(net(), env)
    inner = adapt(model.module)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1)
    inner(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ShardError, match=r"'1.beside.weight' was added after wrapping, and trained past.*peft"):
        optimizer.step()


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_what_is_trained_past_the_wrapped_model_is_refused(axis: str) -> None:
    run_ranks(2, past, axis)


def made_for_a_piece() -> None:
    """As PEFT does, who makes its matrices by the shape that it finds."""
    model = DistributedModelParallel(net(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    rows = model.get_parameter("module.1.weight").to_local().shape[0]  # type: ignore[attr-defined]
    inner = adapt(model.module)  # type: ignore[arg-type]
    inner[1].beside = nn.Linear(4, rows, bias=False)  # type: ignore[index, union-attr]
    inner(torch.tensor([[1, 2, 3]]))


def test_what_was_made_for_a_piece_is_named() -> None:
    for error in run_ranks(2, made_for_a_piece, expect=ShardError):
        assert "'1.beside.weight' was added after wrapping" in str(error)
        assert "The size of tensor a" in str(error)
        assert "get_peft_model" in str(error)


def by_the_model() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model, whole = DistributedModelParallel(net(), env), adapt(net())
    adapt(model.module)  # type: ignore[arg-type]
    trains(model, whole, env, lambda g: torch.randint(0, 10, (2, 3), generator=g))


def test_what_the_wrapped_model_runs_is_trained() -> None:
    run_ranks(2, by_the_model)
