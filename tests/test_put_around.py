"""What a program puts around a sharded module after wrapping, as adapters are: the table stays cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, row_wise
from tests.ranks import mesh, run_ranks


class Adapted(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.more = base_layer, nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.base_layer(ids)
        return rows + rows @ self.more


def adapted(is_frozen: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(copy.deepcopy(plain), env, plan={"0.weight": row_wise()})
    for each in (plain, model.module):
        each.requires_grad_(not is_frozen)
        each[0] = Adapted(each[0])  # type: ignore[index, operator]
    ids = torch.arange(8)
    for _ in range(2):
        model(ids.view(2, 4)[env.rank]).square().mean().backward()
    for _ in range(2):
        plain(ids).square().mean().backward()
    torch.testing.assert_close(model.module[0].more.grad, plain[0].more.grad)  # type: ignore[index, union-attr]
    torch.testing.assert_close(model(ids), plain(ids))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_put_around_a_table_is_averaged_and_the_table_stays_cut(is_frozen: bool) -> None:
    """In silence a frozen table became the rows of rank 0 on all ranks, and gradients beside it nobody averaged."""
    run_ranks(2, adapted, is_frozen)
