"""torch.func around a wrapped model: what ranks exchange in a forward is plain memory inside of its levels, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vmap

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict, row_wise
from tests.ranks import mesh, run_ranks

# torch's own, of its first `jvp` in a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")


class Net(nn.Module):
    """Numbers and ids in; the buffer is one that copies are compared by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x * self.scale) + self.table(ids)))  # type: ignore[no-any-return]


Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tangents(model: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As models of flows take them along a path."""
    out, tangent = jvp(lambda at: model(at, ids.clone()), (x,), (torch.ones_like(x),))
    return out.square().mean() + tangent.square().mean()


def jacobians(model: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return vmap(jacrev(lambda at: model(at, ids[0])))(x).square().mean() + model(x, ids).square().mean()


def hessians(model: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As for equations of physics."""
    return vmap(hessian(lambda at: model(at, ids[0])))(x).square().mean() + model(x, ids).square().mean()


def as_one_process() -> None:
    torch.manual_seed(0)
    module = Net().double()
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(copy.deepcopy(module), env, plan={"table.weight": row_wise()})
    other = DistributedModelParallel(nn.Linear(4, 2), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    with other.no_sync():  # whose gradients wait meanwhile
        other(torch.ones(1, 4)).sum().backward()
    optimizers = [torch.optim.SGD(each.parameters(), 1.0) for each in (module, model)]
    x, ids = torch.randn(4, 4, dtype=torch.float64), torch.tensor([1, 6, 1, 3])
    own = slice(2 * env.rank, 2 * env.rank + 2)
    for loss in (tangents, jacobians, hessians):
        loss(model, x[own], ids[own]).backward()
        for each in (slice(0, 2), slice(2, 4)):
            (loss(module, x[each], ids[each]) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(full_state_dict(model), dict(module.state_dict()), msg=loss.__name__)
    with pytest.raises(ShardError, match=r"ids are what torch\.func\.vmap goes over"):
        vmap(model)(x, ids)
    bag = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum")), env, plan={"0.weight": row_wise()})
    with pytest.raises(ShardError, match="per_sample_weights are a tensor of torch"):
        grad(lambda weights: bag.module[0](ids[None], per_sample_weights=weights).sum())(torch.ones(1, 4))  # type: ignore[index]


def test_what_it_makes_of_a_model_is_one_process_s() -> None:
    run_ranks(2, as_one_process)
