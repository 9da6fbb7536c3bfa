"""Gradients of `nn.Embedding(sparse=True)`: averaged as the rows that batches touch, on whichever rank.

The gradients of two tables whose results are added are one tensor of values in torch: DDP, which divides each in place,
divides it twice, and nobody is told. So each gets values of its own here before it is averaged. A row that is touched
stays one, though its gradient is zero: `torch.optim.SparseAdam` moves it by what it remembers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class OwnRowsDDP(DistributedDataParallel):
    """torch's, whose sparse gradients have values of their own."""

    def _build_params_for_reducer(self) -> Any:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        found = [p for p, is_sparse in zip(parameters, are_sparse, strict=True) if is_sparse]
        for p in found:
            p.register_hook(_own_values)
        self._sparse = frozenset(map(id, found))
        return parameters, are_sparse


def _own_values(gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient.clone() if gradient.is_sparse else None


def no_rows(p: torch.Tensor) -> torch.Tensor:
    """A gradient that touches nothing."""
    where, values = p.new_empty(1, 0, dtype=torch.int64), p.detach().new_empty(0, *p.shape[1:])
    return torch.sparse_coo_tensor(where, values, p.shape, check_invariants=True, is_coalesced=True)


def average_rows(trained: Collection[nn.Parameter], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Average the gradients of these parameters, one after another.

    Returns:
        Those that have a gradient now and had none.
    """
    given: list[torch.Tensor] = []
    for p in trained:
        own = no_rows(p) if p.grad is None else p.grad
        rows = (own if own.is_sparse else own.to_sparse(1)).coalesce()
        dist.all_reduce(rows, group=group)
        mean = rows / group.size()
        if p.grad is not None:
            p.grad.copy_(mean if p.grad.is_sparse else mean.to_dense())
        elif mean.indices().numel():
            p.grad = mean
            given.append(p)
    return given
