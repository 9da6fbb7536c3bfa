"""`verify`: the sharded model beside the plain one, on a real batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, DmpError, ShardingEnv, verify
from tests.ranks import mesh, run_ranks


class _Picky(nn.Module):
    """Fails on a batch of one rank, before anything of its sharded copy would."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            raise ValueError("an empty batch")
        return self.over(x)


def _fails_on_one_rank() -> str:
    torch.manual_seed(0)
    model = DistributedModelParallel(_Picky(), ShardingEnv.from_mesh(mesh((2,))))
    try:
        verify(model, _Picky(), torch.ones(3 * (1 - dist.get_rank()), 4))
    except DmpError as error:
        return str(error)
    return "nothing"


def test_a_plain_module_that_fails_on_one_rank_is_named_on_all() -> None:
    said = run_ranks(2, _fails_on_one_rank)
    assert said == ["verify: the plain module on the batch: rank 1: ValueError: an empty batch"] * 2
