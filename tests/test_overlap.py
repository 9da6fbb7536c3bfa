"""Dense gradients are averaged while tables send theirs back, where autograd comes to the dense ones first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, row_wise
from sharders import DDPWrapper
from sharders.embedding.data_path.path import Path
from tests.equality import attach, env_of
from tests.ranks import run_ranks


class TablesBelow(nn.Module):
    """Tables, and dense layers over what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum")
        self.over = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids)).sum()  # type: ignore[no-any-return]


def _order_of_a_backward() -> list[str]:
    env, module = env_of("dp2"), TablesBelow()
    attach(module.table, "sgd")
    model = DistributedModelParallel(
        module, env=env, plan={"table.weight": row_wise()}, data_parallel_wrapper=DDPWrapper()
    )
    told: list[str] = []

    def average(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
        told.append("dense gradients are on their way")
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.running.register_comm_hook(None, average)  # type: ignore[operator]
    given = Path.backward

    def backward(*args: Any) -> Any:
        told.append("tables begin")
        result = given(*args)
        told.append("tables are updated")
        return result

    model(torch.tensor([[1, 2]])).backward()  # DDP orders its buckets by the first
    told.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "backward", backward)
        model(torch.tensor([[1, 2]])).backward()
    return told


def test_dense_gradients_are_averaged_while_tables_update() -> None:
    expected = ["dense gradients are on their way", "tables begin", "tables are updated"]
    assert run_ranks(2, _order_of_a_backward) == [expected] * 2
