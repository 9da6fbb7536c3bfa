"""Lookups and updates by functions that numba compiles: float32, float64, bfloat16 and float16 on the CPU.

An update sorts the ids by row (`numba_sort`), then sums the gradient of every distinct row in registers and writes the
row once (`numba_loops`). The sort needs the ids alone, so whoever has them early may ask for it early. SGD, Adagrad,
row-wise Adagrad and Adam are compiled with the sums; for others the sums are given to `row_updates`.

Bits: the same in every run, on any number of threads, and with any alignment. Sums, and SGD, are torch's to the bit on
CPUs with FMA; what divides or takes roots is within some units of the last place. Tables of 16 bits are summed and
updated in float32, and rounded once.

This file is imported without numba too; what it compiles is loaded by the first lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf, sqrt

import torch
from torch import Tensor

from sharders.embedding.lookup import row_updates, threads
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.numba_layout import (
    Order,
    Runs,
    Tables,
    address,
    addresses,
    int64,
    place_of,
    shift,
    words,
)
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented, Segments
from sharders.embedding.lookup.row_optimizer import Rows
from sharders.embedding.lookup.torch_kernel import TorchLookup, update

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_MAX = 2**31  # rows of a table, and ids of a call: they are int32 inside
_STREAMED_BYTES = 4 << 20  # results of this size do not stay in the caches anyway
_ENOUGH_IDS = 4096  # for a thread
_ALL_BITS = 31  # a source of unpooled ids has no feature

_COPY = "copy"
_KINDS: dict[Callable[[Rows], None], str] = {
    row_updates.sgd: "sgd",
    row_updates.adagrad: "adagrad",
    row_updates.rowwise_adagrad: "rowwise_adagrad",
    row_updates.adam: "adam",
}
"""Updates that are compiled, by what they are called there; see `numba_updates`."""
_STATES = {
    "sgd": [],
    "adagrad": [("sum", False)],
    "rowwise_adagrad": [("sum", True)],
    "adam": [("exp_avg", False), ("exp_avg_sq", False)],
}
"""The state that they are given: names, and whether it is row-wise; of the weights' dtype."""


class NumbaLookup(TorchLookup):
    """Lookups of `ranges` of `bank`; see `sharders.embedding.lookup.kernels.Lookup`."""

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        super().__init__(bank, ranges)
        self._tables = Tables(bank, self.ranges)
        self._name = _DTYPES[bank.weights.dtype]
        self._pooled_runs: tuple[int, Runs] | None = None

    def pooled(self, read: Bags, out: Tensor | None = None) -> Tensor:
        num_bags = self._num_bags(read.offsets)
        output_BC = self._memory(num_bags, self.num_columns, out)
        self._sum_bags(read, self._runs(num_bags), output_BC)
        return output_BC

    def order_pooled(self, read: Bags) -> Order:
        num_bags, tables = self._num_bags(read.offsets), self._tables
        order = Order(read.ids.numel(), len(tables), read.weights is not None, shift(num_bags), tables.columns)
        return self._sort_bags(order, read, self._runs(num_bags), False)

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Order | None = None) -> None:
        if read.ids.numel():
            self._train(grad, order or self.order_pooled(read), read.weights)

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Order | None = None) -> Tensor:
        order = (order or self.order_pooled(read)) if read.ids.numel() else None
        return self._gradient(grad, order, read.weights)

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        return self._weight_gradients(grad, read, self._runs(self._num_bags(read.offsets)))

    def rows(self, read: Segmented, out: Tensor | None = None) -> Tensor:
        (ids, segments, bags, weights), table = read, self.bank.weights
        region = self.region_of(segments)
        if region is None:
            return table.new_zeros(0, 0)
        output_ND = self._memory(ids.numel() if bags is None else bags.numel() - 1, region.width, out)
        if bags is not None:
            self._sum_bags(Bags(ids, bags, weights), self._runs_of(segments, bags, output_ND.stride(0)), output_ND)
            return output_ND
        runs = int64([[n, place_of(self.ranges[i])] for i, n in segments])
        fixed = (table.data_ptr(), *words(ids), runs.data_ptr(), len(segments), region.width)
        to, num_ids = self._target(output_ND), ids.numel()
        parts, copy = threads.num_parts(num_ids, _ENOUGH_IDS), self._entry("copy_rows")
        threads.run(lambda i: copy(*fixed, num_ids * i // parts, num_ids * (i + 1) // parts, *to), parts)
        return output_ND

    def order_rows(self, read: Segmented) -> Order:
        (ids, segments, bags, weights), tables = read, self._tables
        order = Order(ids.numel(), len(tables), weights is not None, _ALL_BITS, tables.no_columns)
        if bags is not None:
            return self._sort_bags(order, Bags(ids, bags), self._runs_of(segments, bags, 0), True)
        runs: list[list[tuple[int, int]]] = [[] for _ in range(len(tables))]
        for (i, n), start in zip(segments, accumulate((n for _, n in segments), initial=0), strict=False):
            runs[tables.of_range[i]].append((start, n))
        sizes = [sum(n for _, n in of_table) for of_table in runs]
        order.ends.copy_(int64([*accumulate(sizes, initial=0)]))
        flat = int64([run for of_table in runs for run in of_table])
        keys = torch.empty(2, ids.numel(), dtype=torch.int32, device="cpu")
        self._entry("expand_runs")(*words(ids), flat.data_ptr(), len(segments), *addresses(keys))
        return self._sort(order, (*addresses(keys), 0), max(sizes, default=0))

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Order | None = None) -> None:
        if read.ids.numel():
            self._train(grad, order or self.order_rows(read), read.weights)

    def gradient_rows(self, grad: Tensor, read: Segmented, *, order: Order | None = None) -> Tensor:
        order = (order or self.order_rows(read)) if read.ids.numel() else None
        return self._gradient(grad, order, read.weights)

    def gradient_row_weights(self, grad: Tensor, read: Segmented) -> Tensor:
        assert read.bags is not None, "weights go with bags"
        runs = self._runs_of(read.segments, read.bags, self._rows_of(grad).stride(0))
        return self._weight_gradients(grad, Bags(read.ids, read.bags), runs)

    def _memory(self, rows: int, columns: int, out: Tensor | None) -> Tensor:
        """What results are written to: `out`, or new."""
        table = self.bank.weights
        fits = out is not None and out.dtype == table.dtype and (out.stride(1) == 1 or columns == 1)
        return out if out is not None and fits else table.new_empty(rows, columns)

    def _target(self, out: Tensor) -> tuple[int, int, int]:
        """Where results go, how far their rows are apart, and whether they are written past the caches."""
        apart = out.stride(0) * out.element_size()
        streams = out.shape[0] * apart >= _STREAMED_BYTES and self._tables.fills_lines
        return out.data_ptr(), out.stride(0), int(streams and out.data_ptr() % 64 == apart % 64 == 0)

    def _runs(self, num_bags: int) -> Runs:
        """Bags of pooled lookups; kept, as a batch mostly has as many as the last."""
        if self._pooled_runs is None or self._pooled_runs[0] != num_bags:
            tables = self._tables
            of = torch.arange(len(self.ranges), device="cpu").unsqueeze(1)
            bags = torch.full_like(of, num_bags)
            base = int64(tables.in_table).view(-1, 1) << shift(num_bags)
            to_sum = torch.cat([of * num_bags, bags, tables.ranges], 1)
            runs = Runs(to_sum, torch.cat([of * num_bags, bags, base], 1), tables.first_ranges)
            self._pooled_runs = num_bags, runs
        return self._pooled_runs[1]

    def _runs_of(self, segments: Segments, bags: Tensor, stride: int) -> Runs:
        """Bags of unpooled lookups, whose sums are `stride` elements apart."""
        tables = self._tables
        ends = torch.tensor([*accumulate((n for _, n in segments), initial=0)], dtype=bags.dtype, device="cpu")
        first_bags = torch.searchsorted(bags, ends).numpy().tolist()  # of the CPU, as all here: no wait
        to_sum: list[list[int]] = []
        by_table: list[list[list[int]]] = [[] for _ in range(len(tables))]
        for (i, _), first, stop in zip(segments, first_bags, first_bags[1:], strict=False):
            of = self.ranges[i]
            to_sum.append([first, stop - first, place_of(of), of.chunk.width, first * stride])
            by_table[tables.of_range[i]].append([first, stop - first, first])
        first_runs = int64([*accumulate(map(len, by_table), initial=0)])
        return Runs(int64(to_sum), int64([run for of_table in by_table for run in of_table]), first_runs)

    def _sum_bags(self, read: Bags, runs: Runs, out: Tensor) -> None:
        (ids, bounds, _), table, weights = read, self.bank.weights, self._like_table(read.weights)
        fixed = (table.data_ptr(), *words(ids), *words(bounds), runs.to_sum.data_ptr(), len(runs.to_sum))
        to = (address(weights), *self._target(out))
        parts, sum_bags = threads.num_parts(ids.numel(), _ENOUGH_IDS), self._entry("sum_bags")
        threads.run(lambda i: sum_bags(*fixed, i, parts, *to), parts)

    def _weight_gradients(self, grad: Tensor, read: Bags, runs: Runs) -> Tensor:
        (ids, bounds, _), table, grad = read, self.bank.weights, self._rows_of(grad)
        result_N = table.new_empty(ids.numel())
        fixed = (table.data_ptr(), *words(ids), *words(bounds), runs.to_sum.data_ptr(), len(runs.to_sum))
        to = (grad.data_ptr(), grad.stride(0), result_N.data_ptr())
        parts, learn = threads.num_parts(ids.numel(), _ENOUGH_IDS), self._entry("weight_gradients")
        threads.run(lambda i: learn(*fixed, i, parts, *to), parts)
        return result_N

    def _sort_bags(self, order: Order, read: Bags, runs: Runs, moves: bool) -> Order:
        """The order of bags' ids; `moves` where the tables' ids are not one after the other already."""
        (ids, bounds, _), num_tables = read, len(self._tables)
        keys = torch.empty(3, ids.numel(), dtype=torch.int32, device="cpu")
        *memory, origins = addresses(keys)
        origins = origins if moves and order.addresses[-1] else 0
        of_runs = (runs.to_sort.data_ptr(), runs.first.data_ptr(), num_tables)
        given = (*words(ids), *words(bounds), *of_runs, *memory, origins, order.addresses[0])
        most = self._entry("expand_bags")(*given)
        return self._sort(order, (*memory, origins), most)

    def _entry(self, name: str) -> Callable[..., int]:
        return entry_of(name, self._name)

    def _like_table(self, weights: Tensor | None) -> Tensor | None:
        return None if weights is None else weights.to(self.bank.weights.dtype).contiguous()

    def _rows_of(self, grad: Tensor) -> Tensor:
        """A gradient in the table's dtype, whose rows lie each in one piece."""
        grad = grad.to(self.bank.weights.dtype)
        return grad if grad.stride(1) == 1 or not grad.numel() else grad.contiguous()

    def _sort(self, order: Order, keys: tuple[int, ...], most: int) -> Order:
        sort_tables, tables = self._entry("sort_tables"), self._tables
        ends, counts, rows, starts, ordered, places = order.addresses
        num_tables, to = len(tables), (rows, starts, ordered, places, counts)
        parts = min(threads.num_parts(order.num_ids, _ENOUGH_IDS), num_tables)

        def sort(i: int) -> None:
            scratch = torch.empty(4 * most + 4096, dtype=torch.int64, device="cpu")
            span = num_tables * i // parts, num_tables * (i + 1) // parts
            sort_tables(*keys, ends, tables.num_rows.data_ptr(), *span, *to, scratch.data_ptr())

        threads.run(sort, parts)
        return order

    def _gradient(self, grad: Tensor, order: Order | None, weights: Tensor | None) -> Tensor:
        """(numel,) of the bank's weights; zeros without ids."""
        flat = torch.zeros_like(self.bank.weights)
        if order is not None:
            self._sum(self.bank.clipped(grad), order, weights, _COPY, (flat,))
        return flat

    def _train(self, grad: Tensor, order: Order, weights: Tensor | None) -> None:
        """Sum the gradients of each row, and update it by the bank's optimizer."""
        bank, spec = self.bank, self.bank.spec
        assert spec is not None, "a bank without optimizer is not updated in the backward pass"
        grad = bank.clipped(grad)
        kind = _compiled_kind(bank)
        if kind is None:
            self._train_generally(grad, order, weights)
            return
        arrays = (bank.weights, *(bank.state[name] for name in spec.optimizer.state))
        self._sum(grad, order, weights, kind, arrays, _rates(bank, self._tables.in_bank))

    def _train_generally(self, grad: Tensor, order: Order, weights: Tensor | None) -> None:
        """The same by the optimizer's own function, which is given the sums."""
        counts, tables = order.counts.tolist(), self._tables
        by_width: dict[int, list[int]] = {}
        for t, r in enumerate(tables.distinct):
            by_width.setdefault(r.chunk.width, []).append(t)
        packed, num_rows, num_elements, spans = [(0, 0)] * len(tables), 0, 0, []
        for width, members in by_width.items():
            start = num_rows, num_elements
            for t in members:
                packed[t] = num_rows, num_elements
                num_rows, num_elements = num_rows + counts[t], num_elements + counts[t] * width
            spans.append((width, *start, num_rows, num_elements))
        rows = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        sums = self.bank.weights.new_empty(num_elements)
        self._sum(grad, order, weights, _COPY, (sums,), packed=(int64(packed), rows))
        for width, row, element, last_row, last_element in spans:
            if last_row > row:
                grads_nD = sums[element:last_element].view(-1, width)
                update(self.bank, self.bank.regions[width], rows[row:last_row], grads_nD)

    def _sum(
        self,
        grad: Tensor,
        order: Order,
        weights: Tensor | None,
        kind: str,
        arrays: Sequence[Tensor],
        rates: Tensor | None = None,
        packed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Sum the gradients of each row, and do with it what `kind` says."""
        update_rows, tables = self._entry(f"update_{kind}"), self._tables
        grad, weights = self._rows_of(grad), self._like_table(weights)
        if rates is None:
            rates = torch.zeros(len(tables), 5, dtype=torch.float64, device="cpu")
        fixed = (
            *(grad.data_ptr(), grad.stride(0), order.shift, order.columns.data_ptr()),
            *(tables.tables.data_ptr(), len(tables), *order.addresses, address(weights)),
        )
        to = (
            *([*map(address, arrays), 0, 0][:3]),
            *(rates.data_ptr(), *(map(address, packed) if packed else (0, 0))),
        )
        num_ids, parts = order.num_ids, threads.num_parts(order.num_ids, _ENOUGH_IDS)

        def part(i: int) -> None:
            sums = torch.empty(tables.widest, dtype=torch.float64, device="cpu")
            update_rows(*fixed, num_ids * i // parts, num_ids * (i + 1) // parts, sums.data_ptr(), *to)

        threads.run(part, parts)


def _rates(bank: Bank, in_bank: Sequence[int]) -> Tensor:
    """(tables, 5) float64: what a `Kind` calls rates; of the bank's options as they are now, and its tables' steps."""
    options = bank.options
    lr, eps = float(options["lr"]), float(options.get("eps", 0.0))
    if "betas" not in options:
        return torch.tensor([lr, eps, 0.0, 0.0, 0.0], dtype=torch.float64, device="cpu").repeat(len(in_bank), 1)
    beta1, beta2 = (float(b) for b in options["betas"])
    steps, by_step = bank.steps.tolist(), {}
    for step in set(steps):
        root_correction = sqrt(1 - beta2**step)
        own_eps = eps * (root_correction if options.get("bias_corrected_eps", True) else 1.0)
        rate = lr * root_correction / (1 - beta1**step) if step else inf
        by_step[step] = [rate, own_eps, beta1, beta2, lr * float(options.get("weight_decay", 0.0))]
    return torch.tensor([by_step[steps[t]] for t in in_bank], dtype=torch.float64, device="cpu")


def _compiled_kind(bank: Bank) -> str | None:
    """The compiled update of the bank's optimizer; None where there is none for its state and the options now set."""
    assert bank.spec is not None
    optimizer = bank.spec.optimizer
    kind = _KINDS.get(optimizer.update)
    if kind == "rowwise_adagrad" and any(map(bank.options.get, ("weight_decay", "max_norm"))):
        return None
    found = [(name, tensor.is_row_wise) for name, tensor in optimizer.state.items()]
    one_dtype = all(tensor.dtype == bank.weights.dtype for tensor in bank.state.values())
    return kind if kind is not None and one_dtype and found == _STATES[kind] else None


@cache
def entry_of(name: str, element: str = "") -> Callable[..., int]:
    """A compiled function; see `numba_functions`."""
    from sharders.embedding.lookup.numba_functions import entry

    return entry(name, element)


def supports(
    device: torch.device, dtype: torch.dtype, optimizer: OptimizerSpec | None, ranges: Sequence[RowRange]
) -> str | None:
    """Why it cannot be used for such tables; None where it can."""
    if dtype not in _DTYPES or device.type != "cpu":
        return f"it takes {', '.join(_DTYPES.values())} tables on the CPU; got {dtype} on {device.type}"
    if (most := max((r.rows for r in ranges), default=0)) >= _MAX:
        return f"it takes tables of fewer than 2**31 rows on a rank; got {most}"
    kind = optimizer.kind if optimizer is not None and optimizer.optimizer.update in _KINDS else None
    reason = problem(dtype, kind)
    return f"{reason} (pip install numba where it is missing)" if reason else None


@cache
def problem(dtype: torch.dtype = torch.float32, kind: str | None = None) -> str:
    """Why numba cannot be used here, in one line; empty where it can: it loads, and a small update is right.

    Args:
        dtype: of the tables.
        kind: an optimizer whose update is compiled; None for others, which are given gradients.
    """
    try:
        with torch.device("cpu"):
            return _compare(dtype, kind)
    except Exception as error:  # a library that does not fit fails in many ways, all of them meant here
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _compare(dtype: torch.dtype, kind: str | None) -> str:
    ids, offsets = torch.tensor([2, 0, 2, 1], dtype=torch.int32), torch.tensor([0, 1, 3, 3, 4], dtype=torch.int32)
    grad, read = torch.arange(16.0, dtype=dtype).view(2, 8), Bags(ids, offsets)
    results = []
    for lookup_class in (NumbaLookup, TorchLookup):
        spec = OptimizerSpec.make(kind, lr=0.5) if kind else None
        bank = Bank([[(3, 4)], [(2, 4)]], dtype, "cpu", spec)
        bank.weights.copy_(torch.arange(20.0))
        bank.step()
        lookup = lookup_class(bank, [RowRange(bank.chunks[0][0], 0, 3), RowRange(bank.chunks[1][0], 0, 2)])
        before = lookup.pooled(read).flatten()
        if kind:
            lookup.update_pooled(grad, read)
        results.append(torch.cat([before, bank.weights if kind else lookup.gradient_pooled(grad, read)]))
    ours, torchs = (result.double() for result in results)
    right = torch.allclose(ours, torchs, rtol=1e-5 if dtype.itemsize > 2 else 0.02, atol=1e-5)
    return "" if right else f"what numba compiles gives wrong numbers for {kind or 'gradients'} of {dtype}"
