"""Lookups and updates by functions that numba compiles: float32, float64, bfloat16 and float16 on the CPU.

An update sorts the ids by row (`numba_sort`), then sums the gradient of every distinct row in registers and writes the
row once (`numba_training`, `numba_loops`). The sort needs the ids alone, so whoever has them may ask for it early.
Ids of tables with few rows, in long bags, are not sorted: their gradients are summed as they lie (`numba_dense`).

Bits: the same in every run, on any number of threads, and with any alignment. Sums, and SGD, are torch's to the bit on
CPUs with FMA; what divides or takes roots is within some units of the last place. Tables of 16 bits are summed and
updated in float32, and rounded once.

This file is imported without numba too; what it compiles is loaded by the first lookup.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from sharders.embedding.lookup import numba_training as training
from sharders.embedding.lookup import threads
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.numba_layout import (
    ALL_BITS,
    FILLED,
    OfWidth,
    Order,
    Runs,
    Summed,
    Tables,
    address,
    addresses,
    int64,
    longs,
    order_of_sources,
    place_of,
    places_in,
    scalar,
    scratch_for,
    shift,
    words,
)
from sharders.embedding.lookup.numba_training import ELEMENTS, Gradients, elements_of, entry_of
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.pages import to_write
from sharders.embedding.lookup.reads import Bags, Given, Segmented, Segments, Sources
from sharders.embedding.lookup.torch_kernel import Into, RowGradients, TorchLookup

_MAX = 2**31  # rows of a table, and ids of a call: they are int32 inside
_STREAMED_BYTES = 1 << 18
"""Of results, from which they are written past the caches: other layers have used these since the last step, so that
lines would be fetched to be overwritten. Steps of 1 to 4 MB of results took 0.79 to 0.99 of the time, that of reading
the results with them; those of 0.25 MB the same."""
_NS_COPIED, _NS_ASKED = 0.65, 2.8
_MOST_KEPT = 64  # numbers of bags; spans of samples, of which there is one for each rank
_APART_BYTES = 1 << 19
"""Of a table whose gradients are summed without an order of its ids, at most: sums stay in the second cache."""
_GRADIENTS = "gradients"


class NumbaLookup(TorchLookup):
    """Lookups of `ranges` of `bank`; see `sharders.embedding.lookup.kernels.Lookup`."""

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        super().__init__(bank, ranges)
        self._tables = Tables(bank, self.ranges)
        self._of_width = {width: OfWidth(self._tables, width) for width in set(self._tables.widths)}
        self._name, self._most_apart = ELEMENTS[bank.weights.dtype], _APART_BYTES // bank.dtype_of_sums.itemsize
        self._pooled_runs: dict[int, Runs] = {}
        self._placed: dict[tuple[int, range, tuple[int, ...]], tuple[Tensor, bool]] = {}
        self._segments: dict[tuple[int, ...], tuple[Tensor, Tensor, bool]] = {}

    def pooled(self, read: Bags) -> Tensor:
        num_bags = self._num_bags(read.offsets)
        output_BC = to_write(self.bank.weights.new_empty(num_bags, self.num_columns))
        self._sum_bags(read, self._runs(num_bags).to_sum, output_BC, self._tables.fills_lines)
        return output_BC

    def pooled_to(self, read: Bags, samples: range, out: Tensor, columns: tuple[int, ...]) -> None:
        """See `PlacingLookup`."""
        to_sum, fills_lines = self._placed_runs(self._num_bags(read.offsets), samples, columns)
        self._sum_bags(read, to_sum, out, fills_lines)

    def order_pooled(self, read: Bags, sources: Sources | None = None) -> Order:
        if sources is None:
            return self._order_bags(read, self._tables.columns, self._most_apart)
        order, runs = order_of_sources(self._tables, sources, read.ids.numel())
        return self._sort_bags(order, read, runs, False, self._most_apart)

    def can_order(self, sources: Sources) -> bool:
        """See `PlacingLookup`."""
        return self._tables.can_order(sources)

    def update_pooled(
        self, grad: Tensor, read: Bags | Segmented, *, order: Order | None = None, given: Given | None = None
    ) -> None:
        if read.ids.numel():
            training.train(self.bank, self._tables_of(order), self._gradients(grad, read, order, given))

    def saved_by_given(self, num_samples: int, num_ids: int) -> float:
        """See `PlacingLookup`: no element is copied, but of each id and block it is asked where the gradient lies."""
        copied, asked = num_samples * self.num_columns, num_ids * self._tables.mean_blocks
        return copied * _NS_COPIED - asked * _NS_ASKED

    def gradient_pooled(
        self, grad: Tensor, read: Bags | Segmented, *, order: Order | None = None, given: Given | None = None
    ) -> Tensor:
        flat = torch.zeros_like(self.bank.weights)
        if read.ids.numel():
            gradients = self._gradients(grad, read, order, given)
            training.write_gradient(self.bank, self._tables_of(order), gradients, flat)
        return flat

    def pooled_row_gradients(self, grad: Tensor, read: Bags | Segmented, *, into: Into | None = None) -> RowGradients:
        if not read.ids.numel():
            return []
        order = self._order(read, 0)
        return training.row_gradients(self.bank, self._tables, self._gradients(grad, read, order), into)

    def row_gradients_in(
        self, grad: Tensor, read: Bags, columns: tuple[int, ...], factor: float, into: Into | None = None
    ) -> RowGradients:
        """See `PlacingLookup`: sums are multiplied, which are fewer than gradients."""
        if not read.ids.numel():
            return []
        gradients = self._gradients(grad, read, self._order_bags(read, int64(columns), 0))
        found = training.row_gradients(self.bank, self._tables, gradients, into)
        for _, _, sums_nD in found:
            sums_nD.mul_(factor)
        return found

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        return self._weight_gradients(grad, read, self._runs(self._num_bags(read.offsets)))

    def rows(self, read: Segmented, out: Tensor | None = None) -> Tensor:
        (ids, segments, bags, weights), table = read, self.bank.weights
        region = self.region_of(segments)
        if region is None:
            return table.new_zeros(0, 0)
        output_ND = self._memory(ids.numel() if bags is None else bags.numel() - 1, region.width, out)
        if bags is not None:
            to_sum = self._runs_of(segments, bags, output_ND.stride(0)).to_sum
            self._sum_bags(Bags(ids, bags, weights), to_sum, output_ND, self._tables.fills_lines)
            return output_ND
        places = self._tables.places
        _kept, runs = longs([word for i, n in segments for word in (n, places[i])])
        fixed = (table.data_ptr(), *words(ids), runs, len(segments), region.width)
        to, num_ids = self._target(output_ND, self._tables.fills_lines), ids.numel()
        parts, copy = threads.num_parts(num_ids), self._entry("copy_rows")
        threads.run(lambda i: copy(*fixed, num_ids * i // parts, num_ids * (i + 1) // parts, *to), parts)
        return output_ND

    def order_rows(self, read: Segmented, last: Tensor | None = None) -> Order:
        return self._order_rows(read, self._most_apart, last)

    def _order(self, read: Bags | Segmented, most_apart: int) -> Order:
        """As `order_pooled` and `order_rows`.

        Args:
            most_apart: elements of a table whose gradients are summed without an order.
        """
        if isinstance(read, Bags):
            return self._order_bags(read, self._tables.columns, most_apart)
        return self._order_rows(read, most_apart)

    def _order_rows(self, read: Segmented, most_apart: int, last: Tensor | None = None) -> Order:
        (ids, segments, bags, weights), tables = read, self._tables
        order, of_last = Order(ids.numel(), len(tables), ALL_BITS, tables.no_columns), (0, 0, 0, 0)
        if last is not None:
            num_last, num_samples = last.shape
            num_others = sum(count for _, count in segments[: len(segments) - num_last])
            order.num_bags = num_others + num_samples
            order.shift = shift(order.num_bags)
            of_ranges = (tables.in_table[i] for i, _ in segments[len(segments) - num_last :])
            _bases, bases = longs([(of << order.shift) + num_others for of in of_ranges])
            of_last = num_last, last.data_ptr(), num_samples, bases
        if bags is not None:
            runs = self._runs_of(segments, bags, 0)
            return self._sort_bags(order, Bags(ids, bags, weights), runs, True, most_apart)
        ranges, counts = zip(*segments, strict=True) if segments else ((), ())
        by_table, ends, are_in_order = self._by_table(ranges)
        lies_in_order = are_in_order and ids.dtype == torch.int32 and last is None
        keys = torch.empty(2, 0 if lies_in_order else ids.numel() + 1, dtype=torch.int32, device="cpu")
        to = (0, 0) if lies_in_order else tuple(addresses(keys))
        (_kept, told), (_memory, firsts) = longs(counts), longs(bytes(8 * len(counts)))
        of_tables = by_table.data_ptr(), ends.data_ptr(), len(tables), firsts
        most = self._entry("expand_runs")(*words(ids), told, len(counts), *of_tables, *to, order.ends, *of_last)
        return self._sort(order, (ids.data_ptr(), 0, 0) if lies_in_order else (*to, 0), most, tables)

    # Only the order knows how ids are read.
    update_rows, gradient_rows, row_gradients = update_pooled, gradient_pooled, pooled_row_gradients

    def gradient_row_weights(self, grad: Tensor, read: Segmented) -> Tensor:
        assert read.bags is not None, "weights go with bags"
        runs = self._runs_of(read.segments, read.bags, self._rows_of(grad).stride(0))
        return self._weight_gradients(grad, Bags(read.ids, read.bags), runs)

    def _memory(self, rows: int, columns: int, out: Tensor | None) -> Tensor:
        """What results are written to: `out`, or new."""
        table = self.bank.weights
        fits = out is not None and out.dtype == table.dtype and (out.stride(1) == 1 or columns == 1)
        return out if out is not None and fits else to_write(table.new_empty(rows, columns))

    def _target(self, out: Tensor, fills_lines: bool) -> tuple[int, int, int]:
        """Where results go, how far their rows are apart, and whether they are written past the caches."""
        apart = out.stride(0) * out.element_size()
        streams = out.shape[0] * apart >= _STREAMED_BYTES and fills_lines
        return out.data_ptr(), out.stride(0), int(streams and out.data_ptr() % 64 == apart % 64 == 0)

    def _runs(self, num_bags: int) -> Runs:
        """Bags of pooled lookups; kept, as batches mostly have as many: of others, of this rank, and of all."""
        kept = self._pooled_runs
        if num_bags not in kept:
            if len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            tables = self._tables
            most = max(tables.in_table, default=0) + 1
            if most << shift(num_bags) > 1 << ALL_BITS:
                raise ValueError(
                    "expected at most 2**31 bags of one table, those of each feature counted to the next power of two; "
                    f"got {most} features with {num_bags} bags each: use smaller batches, or kernel='torch'"
                )
            of = torch.arange(len(self.ranges), device="cpu").unsqueeze(1)
            bags = torch.full_like(of, num_bags)
            base = int64(tables.in_table).view(-1, 1) << shift(num_bags)
            to_sum = torch.cat([of * num_bags, bags, tables.ranges], 1)
            kept[num_bags] = Runs(to_sum, torch.cat([of * num_bags, bags, base], 1), tables.first_ranges)
        return kept[num_bags]

    def _placed_runs(self, num_bags: int, samples: range, columns: tuple[int, ...]) -> tuple[Tensor, bool]:
        """Bags of some samples, whose sums begin at these columns; and whether these fill lines of the cache; kept."""
        key = num_bags, samples, columns
        if key not in self._placed:
            if len(self._placed) >= _MOST_KEPT:
                del self._placed[next(iter(self._placed))]
            to_sum = self._runs(num_bags).to_sum.clone()
            to_sum[:, 0] += samples.start
            to_sum[:, 1] = len(samples)
            to_sum[:, 4] = int64(columns)
            line = self._tables.line
            self._placed[key] = to_sum, self._tables.fills_lines and all(column % line == 0 for column in columns)
        return self._placed[key]

    def _by_table(self, ranges: tuple[int, ...]) -> tuple[Tensor, Tensor, bool]:
        """Of segments of these row ranges, kept: table by table which they are, where each table's begin there, and the
        end, and whether they are in that order themselves."""
        if ranges not in self._segments:
            if len(self._segments) >= _MOST_KEPT:
                del self._segments[next(iter(self._segments))]
            used = [self._tables.of_range[i] for i in ranges]
            by_table = sorted(range(len(used)), key=used.__getitem__)
            ends = [bisect_left(by_table, t, key=used.__getitem__) for t in range(len(self._tables) + 1)]
            self._segments[ranges] = int64(by_table), int64(ends), used == sorted(used)
        return self._segments[ranges]

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

    def _sum_bags(self, read: Bags, to_sum: Tensor, out: Tensor, fills_lines: bool) -> None:
        (ids, bounds, _), table, weights = read, self.bank.weights, _plain(read.weights, self.bank.weights.dtype)
        fixed = (table.data_ptr(), *words(ids), *words(bounds), to_sum.data_ptr(), to_sum.shape[0])
        to = (address(weights), *self._target(out, fills_lines), scalar(1.0).data_ptr())
        parts, sum_bags = threads.num_parts(ids.numel()), self._entry("sum_bags")
        threads.run(lambda i: sum_bags(*fixed, i, parts, *to), parts)

    def _weight_gradients(self, grad: Tensor, read: Bags, runs: Runs) -> Tensor:
        (ids, bounds, _), table, grad = read, self.bank.weights, self._rows_of(grad)
        result_N = table.new_empty(ids.numel(), dtype=self.bank.dtype_of_sums)
        fixed = (table.data_ptr(), *words(ids), *words(bounds), runs.to_sum.data_ptr(), len(runs.to_sum))
        to = (grad.data_ptr(), grad.stride(0), result_N.data_ptr())
        parts, learn = (
            threads.num_parts(ids.numel()),
            entry_of("weight_gradients", elements_of(table.dtype, grad.dtype)),
        )
        threads.run(lambda i: learn(*fixed, i, parts, *to), parts)
        return result_N

    def _order_bags(self, read: Bags, columns: Tensor, most_apart: int) -> Order:
        num_bags = self._num_bags(read.offsets)
        order = Order(read.ids.numel(), len(self._tables), shift(num_bags), columns)
        order.num_bags = num_bags
        return self._sort_bags(order, read, self._runs(num_bags), False, most_apart)

    def _sort_bags(self, order: Order, read: Bags, runs: Runs, moves: bool, most_apart: int) -> Order:
        """The order of bags' ids; `moves` where the tables' ids may not be one after the other."""
        (ids, bounds, weights), tables = read, self._tables
        with_origins = moves and weights is not None
        rows = 1 if ids.dtype == torch.int32 and not moves else 2 + with_origins
        memory = torch.empty(rows, ids.numel() + FILLED, dtype=torch.int32, device="cpu")
        sources, keys, origins = (*addresses(memory), 0, 0)[:3]
        of_runs = (runs.to_sort.data_ptr(), runs.first.data_ptr(), len(tables))
        given = (*words(ids), *words(bounds), *of_runs, keys, sources, origins, order.ends)
        order.apart.read, order.apart.runs = read, runs
        of_tables = tables.tables.data_ptr(), tables.num_rows.data_ptr(), most_apart
        most = self._entry("expand_bags")(*given, *of_tables, order.apart.row_ends, order.apart.firsts)
        return self._sort(order, (keys or ids.data_ptr(), sources, origins), most, tables, weights is not None)

    def _tables_of(self, order: Order | None) -> Tables:
        return (order and order.tables) or self._tables

    def _gradients(
        self, grad: Tensor, read: Bags | Segmented, order: Order | None, given: Given | None = None
    ) -> Gradients:
        if order is None:
            order = self._order(read, self._most_apart)
        weights = _plain(read.weights, self.bank.dtype_of_sums)
        if given is not None:
            assert grad.dtype == given.matrix.dtype and grad.dtype in (self.bank.weights.dtype, self.bank.dtype_of_sums)
            return Gradients([grad], grad.stride(0), order, weights, given)
        if order.tables is None:
            grad = self._rows_of(self.bank.clipped(grad))
        return Gradients([grad], grad.stride(0), order, weights)

    def _entry(self, name: str) -> Callable[..., int]:
        return entry_of(name, self._name)

    def _rows_of(self, grad: Tensor) -> Tensor:
        """A gradient in the table's dtype or that of sums, whose rows lie each in one piece."""
        if grad.dtype != self.bank.weights.dtype:
            grad = grad.to(self.bank.dtype_of_sums)
        return grad if grad.stride(1) == 1 or not grad.numel() else grad.contiguous()

    def _sort(self, order: Order, keys: tuple[int, ...], most: int, tables: Summed, with_places: bool = False) -> Order:
        sort_tables, num_rows, num_tables = self._entry("sort_tables"), tables.num_rows.data_ptr(), len(tables.in_bank)
        room = self._entry("lay_out")(order.ends, num_rows, num_tables, order.begins)
        order.make_room(room, with_places)
        parts = min(threads.num_parts(order.num_ids), num_tables)

        def sort(i: int) -> None:
            span, scratch = (num_tables * i // parts, num_tables * (i + 1) // parts), scratch_for(most)
            sort_tables(*keys, num_rows, *span, *order.addresses, scratch.data_ptr(), order.apart.row_ends)

        threads.run(sort, parts)
        return order

    def update_touched(self, sums: Sequence[RowGradients]) -> None:
        for tables, gradients in self._touched_gradients(sums):
            training.train(self.bank, tables, gradients)

    def gradient_touched(self, sums: Sequence[RowGradients]) -> Tensor:
        flat = torch.zeros_like(self.bank.weights)
        for tables, gradients in self._touched_gradients(sums):
            training.write_gradient(self.bank, tables, gradients, flat)
        return flat

    def _touched_gradients(self, sums: Sequence[RowGradients]) -> Iterator[tuple[OfWidth, Gradients]]:
        by_width: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for of_part in sums:
            for region, rows_n, sums_nD in of_part:
                if rows_n.numel():
                    by_width.setdefault(region.width, []).append((rows_n, self._rows_of(sums_nD)))
        for width, of_width in by_width.items():
            rows, parts = zip(*of_width, strict=True)
            if len({part.dtype for part in parts}) > 1:
                parts = tuple(part.to(self.bank.dtype_of_sums) for part in parts)
            counts, tables = [len(rows_n) for rows_n in rows], self._of_width[width]
            bits = shift(max(counts))
            starts = [i << bits for i in range(len(rows))]
            if len(rows) << bits > _MAX:
                bits, starts, parts = ALL_BITS, [*accumulate(counts[:-1], initial=0)], (torch.cat(parts),)
            yield tables, Gradients(parts, width, self._order_touched(rows, starts, tables, bits, places_in(parts)))

    def _order_touched(
        self, rows: Sequence[Tensor], starts: Sequence[int], tables: OfWidth, bits: int, columns: Tensor
    ) -> Order:
        """The order of ascending rows, part after part, by the source of the first of each part."""
        order = Order(sum(map(len, rows)), len(tables.tables), bits, columns)
        keys = torch.empty(2, order.num_ids, dtype=torch.int32, device="cpu")
        of_parts = int64([[r.data_ptr(), len(r), start] for r, start in zip(rows, starts, strict=True)])
        of_tables = tables.first_rows.data_ptr(), tables.num_rows.data_ptr(), tables.tables.shape[0]
        given = of_parts.data_ptr(), len(rows), *of_tables, *addresses(keys), order.ends
        return self._sort(order, (*addresses(keys), 0), self._entry("expand_parts")(*given), tables)


def _plain(weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weights is None else weights.to(dtype).contiguous()


def supports(
    device: torch.device, dtype: torch.dtype, optimizer: OptimizerSpec | None, ranges: Sequence[RowRange]
) -> str | None:
    """Why it cannot be used for such tables; None where it can."""
    if dtype not in ELEMENTS or device.type != "cpu":
        return f"it takes {', '.join(ELEMENTS.values())} tables on the CPU; got {dtype} on {device.type}"
    if (most := max((r.rows for r in ranges), default=0)) >= _MAX:
        return f"it takes tables of fewer than 2**31 rows on a rank; got {most}"
    is_compiled = optimizer is not None and optimizer.optimizer.update in training.KINDS
    reason = problem(dtype, optimizer.kind if optimizer is not None and is_compiled else _GRADIENTS)
    return f"{reason} (pip install numba where it is missing)" if reason else None


def may_run(kernel: str | None, device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether compiled code may be used beside the lookups.

    Args:
        kernel: name of the lookup kernel that the user asked for: another than numba's uses nothing of numba.
        dtype: of what it reads and writes.
    """
    return kernel in (None, "numba") and device.type == "cpu" and dtype in ELEMENTS and not problem(dtype)


@cache
def problem(dtype: torch.dtype = torch.float32, kind: str | None = None) -> str:
    """Why numba cannot be used here, in one line; empty where it can: it loads, and a small call is right.

    Args:
        dtype: of the tables.
        kind: an optimizer whose update is compiled; `_GRADIENTS` for others, which are given gradients; None where
            nothing is updated, for which no update need be compiled.
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
        spec = OptimizerSpec.make(kind, lr=0.5) if kind and kind != _GRADIENTS else None
        bank = Bank([[(3, 4)], [(2, 4)]], dtype, "cpu", spec)
        bank.weights.copy_(torch.arange(20.0))
        bank.step()
        lookup = lookup_class(bank, [RowRange(bank.chunks[0][0], 0, 3), RowRange(bank.chunks[1][0], 0, 2)])
        before = lookup.pooled(read).flatten()
        if spec:
            lookup.update_pooled(grad, read)
        changed = lookup.gradient_pooled(grad, read) if kind == _GRADIENTS else bank.weights
        results.append(torch.cat([before, changed]))
    ours, torchs = (result.double() for result in results)
    right = torch.allclose(ours, torchs, rtol=1e-5 if dtype.itemsize > 2 else 0.02, atol=1e-5)
    return "" if right else f"what numba compiles gives wrong numbers for {kind or 'lookups'} of {dtype}"
