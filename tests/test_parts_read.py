"""A table's weight that the model's own code reads past its forward, without gradients: this rank's part, never taken
for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, Layout, ShardError, ShardingEnv, column_wise, row_wise
from tests.ranks import mesh, run_ranks


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(12, 8)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(1)

    def score(self, users: torch.Tensor, how: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        return how(self.users(users), self.items.weight)

    def keep_small(self) -> None:
        self.items.weight.data.clamp_(-0.5, 0.5)
        self.users.weight.copy_(F.normalize(self.users.weight, dim=1))

    def all_items(self) -> torch.Tensor:
        assert self.items.weight.requires_grad and self.items.weight.device.type == "cpu"
        out: torch.Tensor = self.items(torch.arange(12))
        return out


HOW: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a product": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "of normalized rows": lambda x, w: torch.matmul(x, F.normalize(w, dim=-1).T),
    "another product": lambda x, w: torch.einsum("bd,nd->bn", x, w),
    "a row": lambda x, w: w[3],
    "rows": lambda x, w: F.embedding(torch.tensor([1, 2]), w),
    "a norm": lambda x, w: w.norm(),
    "a mean of rows": lambda x, w: w.mean(0),
    "a mean": lambda x, w: w.square().mean(),
}


def reads(layout: Layout, how: str) -> None:
    model = DistributedModelParallel(
        Scorer(), ShardingEnv.from_mesh(mesh((2,), ("dp",))), plan={"users.weight": row_wise(), "items.weight": layout}
    )
    with torch.no_grad():
        model.module.score(torch.tensor([0, 1, 2]), HOW[how])  # type: ignore[operator]


@pytest.mark.parametrize("layout", [row_wise(), column_wise([0, 1])], ids=["rows", "columns"])
@pytest.mark.parametrize("how", HOW)
def test_is_not_taken_for_the_whole(layout: Layout, how: str) -> None:
    for error in run_ranks(2, reads, layout, how, expect=ShardError):
        assert "reads table 'items.weight'" in str(error) and "past the model's forward" in str(error)


def does_what_is_right() -> None:
    torch.manual_seed(0)
    plain = Scorer()
    torch.manual_seed(0)
    model = DistributedModelParallel(Scorer(), plan={"users.weight": row_wise(), "items.weight": row_wise()})
    with torch.no_grad():
        for each in (model.module, plain):
            each.keep_small()  # type: ignore[operator]
        torch.testing.assert_close(model.module.all_items(), plain.all_items())  # type: ignore[operator]
        ids = torch.arange(12)
        torch.testing.assert_close(model(ids, ids), plain(ids, ids))
        part = model.module.items.weight  # who is not the model reads its part
        assert type(part) is nn.Parameter and part.norm().isfinite()


def test_elements_and_rows_are_right() -> None:
    run_ranks(2, does_what_is_right)
