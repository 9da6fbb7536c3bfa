"""Under `torch.autocast`: the numbers of the unsharded module on each rank's samples, averaged, to the bit.

On the global batch in one call they are others, by bfloat16's roundings: a weight's gradient is rounded once for each
call, and torch's Adagrad makes much of a small one. (Bags have two ids: what is divided by three is rounded.)
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, column_wise, data_parallel, full_state_dict, row_wise
from tests.ranks import mesh, run_ranks

LAYOUTS = {"row_wise": row_wise(), "column_wise": column_wise([0, 1]), "data_parallel": data_parallel()}


class Recommender(nn.Module):
    """Tables of bags and of rows before dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags, self.rows = nn.EmbeddingBag(50, 8, mode="mean"), nn.Embedding(30, 8)
        self.bottom, self.top = nn.Linear(4, 16), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> Any:
        return self.top(torch.cat([self.bags(bags), self.rows(rows), self.bottom(x).relu()], 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(50, (8, 2), generator=of), torch.randint(30, (8,), generator=of)
    return *ids, torch.randn(8, 4, generator=of), torch.rand(8, 1, generator=of)


def run(model: nn.Module, given: tuple[torch.Tensor, ...], share: float, inside: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: torch.Tensor = model(*given[:3])
        loss = F.binary_cross_entropy_with_logits(result.float(), given[3]) * share
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return result


def steps(axis: str, layout: str, inside: bool) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    plain = Recommender()
    plan = {"bags.weight": LAYOUTS[layout], "rows.weight": LAYOUTS[layout]}
    model = DistributedModelParallel(copy.deepcopy(plain), env, plan=plan)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        mine = run(model, batch(env.rank, step), 1.0, inside)
        theirs = [run(plain, batch(rank, step), 0.5, inside) for rank in range(2)]
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs[env.rank])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = full_state_dict(model)
        parted = {k: float((whole[k] - v).abs().max()) for k, v in plain.state_dict().items()}
        assert not [(step, k, parted[k]) for k in parted if parted[k]], (step, parted)


@pytest.mark.parametrize(
    ("axis", "layout", "inside"),
    [("dp", "row_wise", True), ("dp", "column_wise", False), ("shard", "data_parallel", True)],
)
def test_numbers_are_the_unsharded_modules(axis: str, layout: str, inside: bool) -> None:
    run_ranks(2, steps, axis, layout, inside)
