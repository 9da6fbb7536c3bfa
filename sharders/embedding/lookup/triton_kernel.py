"""Lookups and updates by functions that triton compiles, on a GPU.

A lookup is one launch for all ranges whose widths round up to the same power of two. An update brings ids into the
order of their rows by torch's sort; then one launch sums each row's gradients and writes the row once. Neither waits
for the device, as torch's operators do for the number of distinct rows. Optimizers not compiled here are torch's.

Bits: the same in every run; sums are in another order than torch's.

No GPU has measured it, so it is used where it is named: `kernel="triton"`. On the CPU it runs where triton interprets
(`TRITON_INTERPRET=1`), for tests. This file is imported without triton too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate
from math import gcd, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sharders.embedding.lookup import row_updates
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented
from sharders.embedding.lookup.row_optimizer import Rows
from sharders.embedding.lookup.torch_kernel import TorchLookup

_KINDS: dict[Callable[[Rows], None], str] = {
    row_updates.sgd: "SGD",
    row_updates.adagrad: "ADAGRAD",
    row_updates.rowwise_adagrad: "ROWWISE_ADAGRAD",
    row_updates.adam: "ADAM",
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_WIDTH = 4096  # a row lies in one program's registers
_MAX = 2**31
_AT_ONCE, _PLACES, _NUMBERED = 4, 4, 128


class _Class(NamedTuple):
    """Row ranges whose widths round up to one power of two.

    Args:
        block: that power.
        members: (ranges,) int32, which.
    """

    block: int
    members: Tensor


class Sorted(NamedTuple):
    """Ids in the order of their rows, equal ones in their own.

    Args:
        keys: (N,) rows of the bank, ascending.
        order: (N,) int64, which id is at each place.
        bags: (N,) of each id where its gradient is: its bag, over ranges, or the gradient's row.
        of_ids: (N,) of each id the range; None where the bag tells.
    """

    keys: Tensor
    order: Tensor
    bags: Tensor
    of_ids: Tensor | None


class TritonLookup(TorchLookup):
    """Lookups of `ranges` of `bank`; see `sharders.embedding.lookup.kernels.Lookup`."""

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        super().__init__(bank, ranges)
        device = bank.weights.device
        widths = [r.chunk.width for r in self.ranges]
        columns = accumulate(widths, initial=0)
        told = [
            [r.chunk.row_offset + r.first_row, r.chunk.element_offset + r.first_row * r.chunk.width, r.chunk.width, c]
            for r, c in zip(self.ranges, columns, strict=False)
        ]
        self._told = torch.tensor(told, dtype=torch.int64, device=device).view(-1, 4).t().contiguous()
        self._aligned = gcd(16, *widths, self.num_columns)
        self._key_dtype = torch.int32 if bank.total_rows < _MAX else torch.int64
        self._classes = []
        for block in sorted({_block(width) for width in widths}):
            members = [i for i, width in enumerate(widths) if _block(width) == block]
            self._classes.append(_Class(block, torch.tensor(members, dtype=torch.int32, device=device)))

    def pooled(self, read: Bags) -> Tensor:
        num_bags = self._num_bags(read.offsets)
        output_BC = self.bank.weights.new_empty(num_bags, self.num_columns)
        at_once = 1 if 2 * read.ids.numel() <= 3 * num_bags * len(self.ranges) else _AT_ONCE
        weights = read.ids if read.weights is None else read.weights
        for block, members in self._classes if num_bags else ():
            self._launch("sum_bags", (num_bags, len(members)), block * at_once)(
                *(self.bank.weights, read.ids, read.offsets, weights, output_BC, members, *self._told[1:]),
                *(num_bags, self.num_columns),
                WEIGHTED=read.weights is not None,
                BLOCK=block,
                K=at_once,
                ALIGNED=self._aligned,
            )
        return output_BC

    def order_pooled(self, read: Bags) -> Sorted | None:
        return self._sorted(read) if self.bank.spec is None or self._kind() is not None else None

    def _sorted(self, read: Bags | Segmented) -> Sorted:
        if isinstance(read, Segmented):
            return self._sorted_rows(read)
        num_bags, num_all = self._num_bags(read.offsets), read.offsets.numel() - 1
        keys = read.ids.new_empty(read.ids.numel(), dtype=self._key_dtype)
        bags = torch.empty_like(keys, dtype=torch.int32 if num_all < _MAX else torch.int64)
        if read.ids.numel():
            launch = self._launch("number_ids", (-(-num_all // _NUMBERED),), 0)
            launch(read.ids, read.offsets, self._told[0], keys, bags, num_bags, num_all, BLOCK=_NUMBERED)
        return Sorted(*keys.sort(stable=True), bags, None)

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Sorted | None = None) -> None:
        if (kind := self._kind()) is None:
            super().update_pooled(grad, read)
        else:
            self._train(kind, self.bank.weights, grad, read, order or self._sorted(read))

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Sorted | None = None) -> Tensor:
        flat = torch.zeros_like(self.bank.weights)
        self._train("GRADIENT", flat, grad, read, order or self._sorted(read))
        return flat

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        result_N = self.bank.weights.new_zeros(read.ids.numel(), dtype=self.bank.dtype_of_sums)
        num_bags, grad = self._num_bags(read.offsets), _in_rows(grad)
        for block, members in self._classes if read.ids.numel() else ():
            self._launch("weight_gradients", (num_bags, len(members)), block)(
                *(self.bank.weights, read.ids, read.offsets, grad, result_N, members, *self._told[1:]),
                *(num_bags, grad.stride(0)),
                BLOCK=block,
            )
        return result_N

    def order_rows(self, read: Segmented) -> Sorted | None:
        return self._sorted(read) if self.bank.spec is None or self._kind() is not None else None

    def _sorted_rows(self, read: Segmented) -> Sorted:
        of_ids = self._of_ids(read)
        keys = (self._told[0].index_select(0, of_ids) + read.ids).to(self._key_dtype)
        numbers = torch.arange(keys.numel() if read.bags is None else read.bags.numel() - 1, device=keys.device)
        if read.bags is not None:
            numbers = torch.repeat_interleave(numbers, read.bags.diff(), output_size=keys.numel())
        return Sorted(*keys.sort(stable=True), numbers, of_ids)

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Sorted | None = None) -> None:
        if (kind := self._kind()) is None:
            super().update_rows(grad, read)
        elif read.ids.numel():
            self._train(kind, self.bank.weights, grad, read, order or self._sorted(read))

    def gradient_rows(self, grad: Tensor, read: Segmented, *, order: Sorted | None = None) -> Tensor:
        flat = torch.zeros_like(self.bank.weights)
        if read.ids.numel():
            self._train("GRADIENT", flat, grad, read, order or self._sorted(read))
        return flat

    def region_rows(self, read: Segmented) -> Tensor:
        of_ids = self._of_ids(read)
        of_regions = self._told[1] // self._told[2]  # a chunk begins at a multiple of its width
        return of_regions.index_select(0, of_ids).add_(read.ids)

    def _of_ids(self, read: Segmented) -> Tensor:
        """(N,) int64, the range of each id."""
        told = torch.tensor([*read.segments], dtype=torch.int64, device="cpu").view(-1, 2).t().contiguous()
        if read.ids.is_cuda:
            told = told.pin_memory()  # else the copy waits for all that the device has to do
        of, counts = told.to(read.ids.device, non_blocking=True)
        return torch.repeat_interleave(of, counts, output_size=read.ids.numel())

    def _kind(self) -> str | None:
        """Which compiled update makes the bank's; None where none does, as its options are now."""
        assert self.bank.spec is not None, "a bank without optimizer is not updated in the backward pass"
        kind, options = _KINDS.get(self.bank.spec.optimizer.update), self.bank.options
        if kind == "ROWWISE_ADAGRAD":
            decays = options["weight_decay"] and row_updates.decay_mode(options["weight_decay_mode"]) != "none"
            return None if decays or options["max_norm"] > 0 else kind
        if kind == "ADAM" and len(set(self.bank.steps.tolist())) > 1:
            return None  # each table has corrections of its own
        return kind

    def _train(self, kind: str, table: Tensor, grad: Tensor, read: Bags | Segmented, order: Sorted) -> None:
        """Write to the rows of `table`, laid out as the bank's weights: its update, or sums of gradients."""
        if not read.ids.numel():
            return
        grad = _in_rows(self.bank.clipped(grad))
        of_ids = order.bags if order.of_ids is None else order.of_ids
        numbers, state = self._numbers(kind), list(self.bank.state.values()) if kind != "GRADIENT" else []
        state = [*state, *[table] * (2 - len(state))]
        weights = order.order if read.weights is None else read.weights
        num_ids, num_bags = read.ids.numel(), 1 if isinstance(read, Segmented) else self._num_bags(read.offsets)
        for block, _members in self._classes:
            self._launch("update_rows", (-(-num_ids // _PLACES),), block * _AT_ONCE)(
                *(order.keys, order.order, order.bags, of_ids, weights),
                *(grad, table, *state, num_ids, *self._told, num_bags, grad.stride(0)),
                *numbers,
                KIND=getattr(_functions(), kind),
                WEIGHTED=read.weights is not None,
                NUMBERED=order.of_ids is not None,
                BLOCK=block,
                K=_AT_ONCE,
                PLACES=_PLACES,
                ALIGNED=gcd(self._aligned, grad.stride(0)),
            )

    def _numbers(self, kind: str) -> list[float]:
        """lr, eps, decay, beta2, what is left of both betas, and scale, each as two."""
        options = {**self.bank.options} if kind != "GRADIENT" else {}
        beta1, beta2 = (float(b) for b in options.get("betas", (0.0, 0.0)))
        eps, scale = float(options.get("eps", 0.0)), 1.0
        if kind == "ADAM":
            step = float(self.bank.steps[0])
            root = sqrt(1 - beta2**step)
            scale = root / (1 - beta1**step)
            eps *= root if options.get("bias_corrected_eps", True) else 1.0
        decay = float(options.get("weight_decay", 0.0))
        numbers = float(options.get("lr", 0.0)), eps, decay, beta2, 1 - beta1, 1 - beta2, scale
        return [part for number in numbers for part in _halves(number)]

    def _launch(self, name: str, grid: tuple[int, ...], elements: int) -> Any:
        """A function, to be called with its arguments; of so many elements a program holds."""
        import triton.language as tl

        function = getattr(_functions(), name)
        sums = {} if name == "number_ids" else {"SUM": tl.float64 if self._is_double else tl.float32}
        warps = max(1, min(8, elements // 512))

        def launch(*args: Any, **constants: Any) -> None:
            with _on(self.bank.weights.device):
                function[grid](*args, **constants, **sums, num_warps=warps)

        return launch

    @property
    def _is_double(self) -> bool:
        return self.bank.dtype_of_sums == torch.float64


def supports(
    device: torch.device, dtype: torch.dtype, optimizer: OptimizerSpec | None, ranges: Sequence[RowRange]
) -> str | None:
    """Why it cannot be used for such tables; None where it can. Updates that it lacks are no reason."""
    if dtype not in _DTYPES or device.type not in ("cuda", "cpu"):
        names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        return f"it takes {names} tables on a GPU; got {dtype} on {device.type}"
    if (most := max((r.chunk.width for r in ranges), default=0)) > _MAX_WIDTH:
        return f"it takes rows of at most {_MAX_WIDTH} columns; got {most}"
    reason = problem(device.type, dtype, optimizer.kind if optimizer is not None else None)
    return f"{reason} (pip install triton where it is missing)" if reason else None


@cache
def problem(device: str, dtype: torch.dtype, kind: str | None) -> str:
    """Why triton cannot be used here, in one line; empty where it can: it loads, and small calls are right."""
    try:
        import triton

        if device == "cpu" and isinstance(_functions().sum_bags, triton.JITFunction):
            return "it is for GPUs; on the CPU it runs with TRITON_INTERPRET=1 alone, slowly"
        if device == "cpu" and dtype == torch.bfloat16:
            return "triton's interpreter rounds bfloat16 towards zero, as no GPU does"
        with torch.device(device):
            return _compare(device, dtype, kind)
    except Exception as error:  # a compiler that does not fit fails in many ways, all of them meant here
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _compare(device: str, dtype: torch.dtype, kind: str | None) -> str:
    ids = torch.tensor([2, 0, 2, 1, 0, 0, 0, 0, 2, 1, 1], dtype=torch.int32)
    read = Bags(ids, torch.tensor([0, 1, 3, 3, 8, 9, 11], dtype=torch.int32), torch.linspace(0.5, 1.5, 11))
    rows = Segmented(ids[:8], [(0, 5), (1, 3)])
    results = []
    for lookup_class in (TritonLookup, TorchLookup):
        spec = OptimizerSpec.make(kind, lr=0.5) if kind else None
        bank = Bank([[(3, 4)], [(2, 4)], [(4, 20)]], dtype, device, spec)
        bank.weights.copy_(torch.arange(100.0) / 50)
        bank.step()
        first, second, third = (chunks[0] for chunks in bank.chunks)
        lookup = lookup_class(bank, [RowRange(first, 0, 3), RowRange(second, 0, 2), RowRange(third, 1, 3)])
        found = [lookup.pooled(read).flatten(), lookup.rows(rows).flatten()]
        grad = torch.linspace(-1.0, 1.0, 2 * 28, dtype=bank.dtype_of_sums).view(2, 28)
        row_grad = torch.linspace(-1.0, 1.0, 8 * 4, dtype=bank.dtype_of_sums).view(8, 4)
        found += [lookup.gradient_pooled(grad, read), lookup.gradient_weights(grad, read)]
        if spec:
            lookup.update_pooled(grad, read)
            lookup.update_rows(row_grad, rows)
        results.append(torch.cat([each.double().cpu() for each in (*found, bank.weights)]))
    near, (ours, torchs) = (1e-5 if dtype.itemsize > 2 else 0.02), results
    right = torch.allclose(ours, torchs, rtol=near, atol=near)
    return "" if right else f"what triton compiles gives wrong numbers for {kind or 'lookups'} of {dtype}"


@cache
def _functions() -> Any:
    from sharders.embedding.lookup import triton_functions

    return triton_functions


def _block(width: int) -> int:
    """The next power of two, of at least one."""
    return 1 << max(width - 1, 0).bit_length()


def _halves(x: float) -> tuple[float, float]:
    """A number as the sum of two of float32."""
    first = float(np.float32(x))
    return first, x - first


def _in_rows(grad: Tensor) -> Tensor:
    """With each row in one piece."""
    return grad if grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
