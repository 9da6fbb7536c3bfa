"""`verify`: the sharded model beside the plain one, on a real batch."""

from __future__ import annotations

import pytest
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


class _Frozen(nn.Module):
    """Dropout that is in eval mode while the model trains, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="sum")
        self.drop, self.norm, self.over = nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.norm(self.drop(self.bag(ids))))
        return out


@pytest.mark.parametrize("trains", [False, True])
def test_each_module_is_compared_in_its_own_mode(trains: bool) -> None:
    torch.manual_seed(0)
    module = _Frozen().train(trains)
    module.norm.train(not trains)
    model = DistributedModelParallel(module, ShardingEnv.single())
    report = verify(model, _Frozen(), torch.randint(0, 8, (6, 3)))
    assert report.outputs and model.module.norm.training is not trains
    model.module.drop.train(True)  # the wrapper's flag says nothing of the modules
    model.module.norm.train(True)
    model.training = False
    verify(model, _Frozen(), torch.randint(0, 8, (6, 3)))
