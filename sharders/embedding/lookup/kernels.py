"""Lookups in one bank, and the updates of its rows in the backward pass: the local part of the data path.

A lookup is compiled once from a bank and row ranges of it, and holds no communication. Two kernels give the same
numbers: FBGEMM's table-batched operators (float32 on the CPU) and torch's own (anything).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dmp import ShardError
from sharders.embedding.lookup import fbgemm_kernel
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.fbgemm_kernel import FbgemmLookup
from sharders.embedding.lookup.torch_kernel import Segments, TorchLookup, update_dense

__all__ = ["Lookup", "RowRange", "Segments", "compile_lookup", "kernel_report", "update_dense"]

_log = logging.getLogger("dmp")


class Lookup(Protocol):
    """Lookups in S row ranges of a bank, one for each slot of the input dist, compiled once.

    Pooled: `ids` (N,) int32 or int64, range by range and counted from the range's first row; `offsets` (S * B + 1,) of
    the bags, `weights` (N,) or None. Columns are the ranges' widths in their order, C in all; without ranges B is 0.
    Unpooled: `ids` (N,) in any order of segments, each (index of a range, number of ids); all ranges of a call have one
    width D.
    Results have the bank's dtype. Ids are not checked here. An update combines, for each row, the gradients of all
    its ids in the call before it applies the optimizer; `Bank.step` counts the update and is called before.
    """

    bank: Bank
    ranges: tuple[RowRange, ...]
    num_columns: int
    """C"""

    def pooled(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """(B, C) contiguous: sums over bags; zeros for empty bags."""

    def update_pooled(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> None:
        """Update the bank in place, given the gradient (B, C) of `pooled`."""

    def gradient_pooled(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """(numel,): the gradient of the bank's weights."""

    def gradient_weights(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """(N,): the gradient of `weights`, with the weights of the bank as they are: call it before the update."""

    def touched_pooled(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """(total_rows,) bool: the bank rows that the ids name."""

    def rows(self, ids: Tensor, segments: Segments) -> Tensor:
        """(N, D): one row per id; (0, 0) without segments."""

    def update_rows(self, grad: Tensor, ids: Tensor, segments: Segments) -> None:
        """Update the bank in place, given the gradient (N, D) of `rows`."""

    def gradient_rows(self, grad: Tensor, ids: Tensor, segments: Segments) -> Tensor:
        """(numel,): the gradient of the bank's weights."""

    def touched_rows(self, ids: Tensor, segments: Segments) -> Tensor:
        """(total_rows,) bool: the bank rows that the ids name."""


def compile_lookup(bank: Bank, ranges: Sequence[RowRange], *, kernel: str | None = None) -> Lookup:
    """The lookup of `ranges` of `bank`.

    Args:
        bank: whose storage is read at every call.
        ranges: equal ones are adjacent; those of a chunk are disjoint or equal.
        kernel: "fbgemm" or "torch"; by default FBGEMM's where it loads, gives right numbers and takes the bank.

    Raises:
        ShardError: `kernel` is not one of these, or is "fbgemm" where that cannot be used.
    """
    if kernel not in (None, "fbgemm", "torch"):
        raise ShardError(f"expected the kernel 'fbgemm' or 'torch', or None; got {kernel!r}")
    if kernel == "torch" or not fbgemm_kernel.supports(bank):
        if kernel != "torch":
            takes = f"takes float32 tables on the CPU; got {bank.weights.dtype} on {bank.weights.device.type}"
            if kernel == "fbgemm":
                raise ShardError(f"the fbgemm kernel {takes}. Use kernel='torch'")
            _say_once(f"its kernel {takes}")
        return TorchLookup(bank, ranges)
    problem = _fbgemm_problem()
    if problem and kernel == "fbgemm":
        raise ShardError(f"the fbgemm kernel cannot be used: {problem}. Use kernel='torch', or install fbgemm-gpu-cpu")
    if problem:
        _say_once(problem)
        return TorchLookup(bank, ranges)
    return FbgemmLookup(bank, ranges)


def kernel_report() -> dict[str, str]:
    """Per kernel "ok", or why it cannot be used; tries FBGEMM at the first call."""
    return {"torch": "ok", "fbgemm": _fbgemm_problem() or "ok"}


@cache
def _say_once(problem: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("tables are looked up by torch's own operations, for FBGEMM's cannot be used: %s", problem)


@cache
def _fbgemm_problem() -> str:
    return fbgemm_kernel.probe()
