"""Lookups in one bank, and the updates of its rows in the backward pass: the local part of the data path.

A lookup is compiled once from a bank and row ranges of it, and holds no communication. Four kernels give the same
numbers: what numba compiles (on the CPU), FBGEMM's table-batched operators (float32 on the CPU), what triton compiles
(on a GPU, where it is named) and torch's own (anything). `register_kernel` adds more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from dmp import ShardError, ranks
from sharders.embedding.lookup import fbgemm_kernel, numba_kernel, triton_kernel
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.fbgemm_kernel import FbgemmLookup
from sharders.embedding.lookup.numba_kernel import NumbaLookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Given, Segmented, Sources
from sharders.embedding.lookup.torch_kernel import Into, RowGradients, TorchLookup
from sharders.embedding.lookup.triton_kernel import TritonLookup


class Lookup(Protocol):
    """Lookups in S row ranges of a bank, one for each slot of the input dist, compiled once.

    Pooled: columns are the ranges' widths in their order, C in all; without ranges B is 0.
    Unpooled: all ranges of a call have one width D.
    Results have the bank's dtype. `out` is memory that rows may be written to, of their shape and dtype: what is
    returned lies there, or elsewhere where the kernel cannot. Ids are not checked here: `input_checks` has.
    Gradients are given in any dtype. An update combines, for each row, those of all its ids in the call, in the bank's
    `dtype_of_sums`, before it applies the optimizer; `Bank.step` counts it and is called before. Rows of a pooled
    gradient may be apart.
    The ids' `order` can be worked out as soon as they are known, while something else is waited for, and given to the
    calls that take one, of the same ids; else they work it out themselves. A kernel without use for it gives None.
    """

    bank: Bank
    ranges: tuple[RowRange, ...]
    num_columns: int
    """C"""

    def pooled(self, read: Bags) -> Tensor:
        """(B, C) contiguous: sums over bags; zeros for empty bags."""

    def order_pooled(self, read: Bags) -> Any:
        """The ids' order, for the two below."""

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> None:
        """Update the bank in place, given the gradient (B, C) of `pooled`."""

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> Tensor:
        """(numel,): the gradient of the bank's weights."""

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        """(N,), of the dtype of sums: the gradient of `weights`; call it before the update of the bank's weights."""

    def rows(self, read: Segmented, out: Tensor | None = None) -> Tensor:
        """(N, D): one row per id, or (n, D): one sum per bag; (0, 0) without segments."""

    def order_rows(self, read: Segmented) -> Any:
        """The ids' order, for the two below."""

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Any = None) -> None:
        """Update the bank in place, given the gradient of `rows`."""

    def gradient_rows(self, grad: Tensor, read: Segmented, *, order: Any = None) -> Tensor:
        """(numel,): the gradient of the bank's weights."""

    def gradient_row_weights(self, grad: Tensor, read: Segmented) -> Tensor:
        """(N,): the gradient of `weights`; see `gradient_weights`."""

    def pooled_row_gradients(self, grad: Tensor, read: Bags, *, into: Into | None = None) -> RowGradients:
        """What `update_pooled` would apply the optimizer to; it lies in `into`, or elsewhere."""

    def row_gradients(self, grad: Tensor, read: Segmented) -> RowGradients:
        """What `update_rows` would."""

    def update_touched(self, sums: Sequence[RowGradients]) -> None:
        """Update the bank in place by the sums of several batches: what `row_gradients` gave each, of any dtype."""

    def gradient_touched(self, sums: Sequence[RowGradients]) -> Tensor:
        """(numel,): the gradient of the bank's weights, likewise."""


class PlacingLookup(Lookup, Protocol):
    """One that can write sums where they belong, and read gradients where a model has left them; others give and take
    them in a piece, from where and to where they are copied.

    What is `given` is read in place of the last rows of `grad`, as many, which may hold anything. It is not clipped.
    """

    def pooled_to(self, read: Bags, samples: range, out: Tensor, columns: tuple[int, ...]) -> None:
        """Sums over the bags of some of the B samples.

        Args:
            out: (len(samples), any) of the bank's dtype, each row in one piece.
            columns: first one of each range in it.
        """

    def row_gradients_in(
        self, grad: Tensor, read: Bags, columns: tuple[int, ...], factor: float, into: Into | None = None
    ) -> RowGradients:
        """`pooled_row_gradients` of columns of a gradient, multiplied; none is clipped.

        Args:
            grad: (B, any) of the bank's dtype.
            columns: as above.
        """

    def can_order(self, sources: Sources) -> bool:
        """Whether it reads gradients that lie so."""

    def order_pooled(self, read: Bags, sources: Sources | None = None) -> Any:
        """See `Lookup`.

        Args:
            sources: where gradients lie, in what the calls below are given with this order; not clipped.
        """

    def saved_by_given(self, num_samples: int, num_ids: int) -> float:
        """Nanoseconds, about, that an update by `given` of so many samples and all ids takes less than by a copy."""

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Any = None, given: Given | None = None) -> None:
        """See `Lookup`."""

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Any = None, given: Given | None = None) -> Tensor:
        """See `Lookup`."""

    def order_rows(self, read: Segmented, last: Tensor | None = None) -> Any:
        """See `Lookup`.

        Args:
            last: (segments, samples) int32, of the last segments the bags, each of one id or none: their gradients are
                `given`.
        """

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Any = None, given: Given | None = None) -> None:
        """See `Lookup`."""

    def gradient_rows(self, grad: Tensor, read: Segmented, *, order: Any = None, given: Given | None = None) -> Tensor:
        """See `Lookup`."""


MOST_APART = 16
"""Ranks whose results are looked up, and whose gradients are read, each by itself where they do not lie together: of
more the calls would cost what the copy does."""


def can_place(lookup: Lookup, dtype: torch.dtype) -> TypeGuard[PlacingLookup]:
    """Whether it is one that writes sums where they belong, and reads gradients where they are, of this dtype."""
    return hasattr(lookup, "pooled_to") and lookup.bank.weights.dtype == dtype


@dataclass(frozen=True)
class Kernel:
    """A way to look rows up and to update them.

    Args:
        name: by which a user asks for it: `EmbeddingBagCollectionSharder(kernel="torch")`.
        supports: given device, dtype, in-backward optimizer and row ranges, why it cannot be used; None where it can.
        make: the lookup of row ranges of a bank that it supports.
    """

    name: str
    supports: Callable[[torch.device, torch.dtype, OptimizerSpec | None, Sequence[RowRange]], str | None]
    make: Callable[[Bank, Sequence[RowRange]], Lookup]


KERNELS: dict[str, Kernel] = {}
"""Every kernel that is known, by name."""
_FASTEST_FIRST = ("numba", "fbgemm", "torch")  # for who names none


def register_kernel(kernel: Kernel) -> Kernel:
    """Make a kernel known to this process; to be called on every rank. It is used where it is named."""
    KERNELS[kernel.name] = kernel
    return kernel


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    optimizer: OptimizerSpec | None,
    ranges: Sequence[RowRange],
    named: str | None = None,
) -> Kernel:
    """The kernel for such tables: the one that is named, else numba's, FBGEMM's or torch's: the first that can be used.

    Raises:
        ShardError: `named` is not known, or cannot be used for these tables.
    """
    if named is not None and named not in KERNELS:
        raise ShardError(f"expected a kernel out of {sorted(KERNELS)}, or None; got {named!r}")
    reasons: list[str] = []
    for kernel in map(KERNELS.__getitem__, _FASTEST_FIRST if named is None else (named,)):
        reason = kernel.supports(device, dtype, optimizer, ranges)
        if reason is None:
            told = f"tables are looked up by the {kernel.name} kernel" + f": {'; '.join(reasons)}" * bool(reasons)
            ranks.say_once(told, logging.WARNING if reasons else logging.INFO, by_first=True)
            return kernel
        if named is not None:
            raise ShardError(f"the {named} kernel cannot be used: {reason}. Use kernel='torch', which takes any table")
        reasons.append(f"the {kernel.name} kernel cannot be used: {reason}")
    raise AssertionError("torch's kernel takes any table")


def kernel_of(lookup: Lookup) -> str:
    """The name of the kernel that made a lookup."""
    names = (kernel.name for kernel in KERNELS.values() if kernel.make is type(lookup))
    return next(names, type(lookup).__name__)


def compile_lookup(bank: Bank, ranges: Sequence[RowRange], kernel: str | None = None) -> Lookup:
    """The lookup of `ranges` of `bank`.

    Args:
        bank: whose storage is read at every call; of the device and dtype that it has now.
        ranges: equal ones are adjacent; those of a chunk are disjoint or equal.
        kernel: a name, see `choose_kernel`.

    Raises:
        ShardError: from `choose_kernel`.
    """
    return choose_kernel(bank.weights.device, bank.weights.dtype, bank.spec, ranges, kernel).make(bank, ranges)


register_kernel(Kernel("numba", numba_kernel.supports, NumbaLookup))
register_kernel(Kernel("fbgemm", fbgemm_kernel.supports, FbgemmLookup))
register_kernel(Kernel("triton", triton_kernel.supports, TritonLookup))
register_kernel(Kernel("torch", lambda *_: None, TorchLookup))
