"""torch.compile around a model with tables: what it compiles stops at them, forward and backward."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

import dmp
from dmp.ranks import around_backward
from sharders.embedding.weights.loss_terms import _look_at_terms
from tests.oracle import LR, attach

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.rows, self.over = nn.EmbeddingBag(40, 8, mode="sum"), nn.Embedding(30, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.bags(ids) * self.rows(ids[:, 0])).sum()


def _backward(compiles: bool) -> AbstractContextManager[None]:
    return compiled_autograd._enable(torch.compile(backend="eager")) if compiles else nullcontext()


@pytest.mark.parametrize("backward_too", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", ["numba", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_numbers_stay(kernel: str, backward_too: bool) -> None:
    if kernel == "numba":
        pytest.importorskip("numba")
    torch.manual_seed(0)
    whole = Net()
    module = copy.deepcopy(whole)
    attach(nn.ModuleList([module.bags, module.rows]), "sgd")
    from sharders import EmbeddingBagSharder, EmbeddingSharder

    sharders = [EmbeddingBagSharder(kernel=kernel), EmbeddingSharder(kernel=kernel)]
    model = dmp.DistributedModelParallel(module, env=dmp.ShardingEnv.single(), sharders=sharders)
    run = torch.compile(model, backend="eager")
    dense, both = torch.optim.SGD(model.module.over.parameters(), lr=LR), torch.optim.SGD(whole.parameters(), lr=LR)
    for size in (5, 6, 5):
        ids = torch.randint(0, 30, (size, 3))
        loss, expected = run(ids), whole(ids)
        torch.testing.assert_close(loss, expected)
        with _backward(backward_too):
            loss.backward()
        expected.backward()
        for optimizer in (dense, both):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name])


def test_hooks_in_a_compiled_step_are_not_traced() -> None:
    """Those on the gradients of tables that are cut keep marks on them: a whole step ended in fake tensors."""
    around_backward(_look_at_terms)
    weight, are_traced = nn.Parameter(torch.ones(3)), []

    def look(gradient: torch.Tensor) -> None:
        are_traced.append(torch.compiler.is_compiling())

    weight.register_hook(look)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return loss

    assert torch.compile(step, backend="eager")(torch.ones(3)) == 3
    assert are_traced == [False]
