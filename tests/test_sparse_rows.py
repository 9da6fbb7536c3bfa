"""`nn.Embedding(sparse=True)`, which stays whole: its gradients are one process's, and SparseAdam's values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict
from sharders import DDPWrapper
from tests.equality import env_of
from tests.ranks import mesh, run_ranks

ROWS = 12
REACHED: dict[str, Any] = {
    "all": lambda step: [True, True],
    "one rank alone": lambda step: [True, False],
    "in turns": lambda step: [step % 2 == 0, step % 2 == 1],
    "now and then": lambda step: [step % 2 == 1] * 2,
}


class Sums(nn.Module):
    """Two tables whose results are added: torch gives both gradients one tensor of values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = (nn.Embedding(ROWS, 4, sparse=True) for _ in range(2))
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.a(ids) + self.b(ids) if both else self.a(ids)
        result: torch.Tensor = self.out(x)
        return result

    def loss(self, ids: torch.Tensor, both: bool) -> torch.Tensor:
        return self.forward(ids, both).clamp(max=0.2).square().mean()  # some rows get a gradient of zero


def trains(has_forward: bool, reached: str, dense: bool, option: str | None = None) -> None:
    whole, env, options = Sums(), env_of("dp2"), {} if option is None else {option: True}
    if not dense:
        whole.out.requires_grad_(False)
    model: Any = DistributedModelParallel(copy.deepcopy(whole), env=env, data_parallel_wrapper=DDPWrapper(**options))
    optimizers = [torch.optim.SparseAdam([m.a.weight, m.b.weight], lr=0.1) for m in (whole, model.module)]
    others = [torch.optim.SGD(m.out.parameters(), lr=0.1) for m in (whole, model.module)]
    for step in range(4):
        ids = torch.randint(ROWS, (2, 4), generator=torch.Generator().manual_seed(step))
        both, rank = REACHED[reached](step), env.data_rank
        torch.stack([whole.loss(ids[r], both[r]) for r in range(2)]).mean().backward()
        out = model(ids[rank], both[rank]).clamp(max=0.2).square().mean() if has_forward else None
        (model.module.loss(ids[rank], both[rank]) if out is None else out).backward()
        for (name, p), q in zip(whole.named_parameters(), model.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.is_sparse == q.grad.is_sparse
                torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense(), msg=name)
        for optimizer in [*optimizers, *others]:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full_state_dict(model)[name], value, msg=name)


@pytest.mark.parametrize("has_forward", [True, False])
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.sampled(2)
def test_trains_as_in_one_process(has_forward: bool, reached: str) -> None:
    run_ranks(2, trains, has_forward, reached, True)


def test_trains_where_nothing_else_does() -> None:
    run_ranks(2, trains, False, "in turns", False)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_trains_by_torchs_own_treatment_of_what_is_not_reached(option: str) -> None:
    """What two tables share was divided twice, in silence."""
    run_ranks(2, trains, True, "all", True, option)


class Own(nn.Module):
    """Looks rows up by itself, as embeddings of quotients and remainders do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding_bag(ids, self.weight, sparse=True)


def _own(axis: str) -> None:
    model = DistributedModelParallel(Own(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    model(torch.ones(2, 3, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_sparse_gradient_of_what_is_no_table(axis: str) -> None:
    """Torch spoke of the storage of a SparseTensorImpl, or of fsdp::chunk_cat."""
    for error in run_ranks(2, _own, axis, expect=ShardError):
        assert "no table has a sparse gradient" in str(error) and "Pass sparse=False there" in str(error)
