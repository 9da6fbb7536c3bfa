"""Optimizers that keep means over rows and columns of large tables, and go by each element of small ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.wrap.optimizers.optimizer_trial import wrong_cut


class Factored(Optimizer):
    """As AdafactorBigVision: means over rows and columns of what has enough of both, of the rest each element's."""

    def __init__(self, params: Any, least: int = 16) -> None:
        super().__init__(params, {"least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            square = p.grad.square()
            if min(p.shape) >= self.param_groups[0]["least"]:
                square = square.mean(0, keepdim=True) * square.mean(1, keepdim=True)
            p -= 0.1 * p.grad / (square.sqrt() + 1e-3)


def test_one_that_treats_large_tables_otherwise() -> None:
    """It was tried on a small one alone: its steps on parts were others, in silence."""
    optimizer, on = Factored([nn.Parameter(torch.ones(2, 2))]), torch.device("cpu")
    for cut in ("by rows", "by columns", "by rows and columns"):
        assert wrong_cut(optimizer, optimizer.param_groups[0], [cut], on, (10**6, 32)) is not None
    for size in ((10**6, 8), (6, 4)):
        assert wrong_cut(optimizer, optimizer.param_groups[0], ["by rows"], on, size) is None
