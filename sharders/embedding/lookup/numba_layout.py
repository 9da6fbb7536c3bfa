"""What compiled code is told of tables, bags and a call's ids: int64 and int32 in memory, and where that is."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.reads import Bags, Sources

BLOCKS = (64, 32, 16, 8, 4, 1)
"""Columns of a row that are worked on at once, by `by_blocks`. Each is read by its own loop over the ids: rows of 8
columns as two blocks of 4 took 1.7 of the time, rows of 32 as two of 16 1.25."""

FILLED = 16
"""Words that compiled code writes at once; so many behind what is written may be overwritten."""

ALL_BITS = 31  # a source of unpooled ids, or of sums, has no feature


class Summed(Protocol):
    """Tables of whose rows gradients are summed.

    Attributes:
        tables: see `update` in `numba_loops`.
        num_rows: of each.
        widths: likewise.
        as_stored: their numbers in the order in which they lie in the bank.
        in_bank: of each its number in the bank.
        widest: width.
    """

    tables: Tensor
    num_rows: Tensor
    widths: list[int]
    as_stored: list[int]
    in_bank: list[int]
    widest: int


class Tables:
    """The distinct row ranges of a lookup, and where all ranges are, as compiled code reads them."""

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        grouped = [(r, len([*same])) for r, same in groupby(ranges)]
        self.distinct = [r for r, _ in grouped]
        first_ranges = [*accumulate((n for _, n in grouped), initial=0)]
        self.of_range = [t for t, (_, n) in enumerate(grouped) for _ in range(n)]
        self.in_table = [i for _, n in grouped for i in range(n)]
        columns = [*accumulate((r.chunk.width for r in ranges), initial=0)]
        self.columns = int64(columns[:-1])
        self.no_columns = torch.zeros_like(self.columns)
        self.places = [place_of(r) for r in ranges]
        of_ranges = [[at, r.chunk.width, c] for at, r, c in zip(self.places, ranges, columns, strict=False)]
        self.ranges = int64(of_ranges).view(-1, 3)
        self.tables = int64(
            [
                [place_of(r), r.chunk.width, first, r.chunk.row_offset + r.first_row]
                for r, first in zip(self.distinct, first_ranges, strict=False)
            ]
        )
        self.first_ranges = int64(first_ranges)
        self.num_rows = int64([r.rows for r in self.distinct])
        self.widths = [r.chunk.width for r in self.distinct]
        self.as_stored = sorted(range(len(self.distinct)), key=lambda t: place_of(self.distinct[t]))
        in_bank = {chunk: t for t, chunks in enumerate(bank.chunks) for chunk in chunks}
        self.in_bank = [in_bank[r.chunk] for r in self.distinct]
        self.widest = max((r.chunk.width for r in ranges), default=0)
        self.line = 64 // bank.weights.element_size()
        self.mean_blocks = sum(_num_blocks(r.chunk.width) for r in ranges) / max(len(ranges), 1)
        self.fills_lines = all(r.chunk.width % self.line == 0 for r in ranges)
        self._of_sources: dict[int, Tables] = {}

    def __len__(self) -> int:
        return len(self.distinct)

    def of_sources(self, num: int) -> Tables:
        """The same, for columns that each range has as many of."""
        if num not in self._of_sources:
            made = self._of_sources[num] = copy.copy(self)
            made.tables = self.tables.clone()
            made.tables[:, 2] *= num
        return self._of_sources[num]

    def can_order(self, sources: Sources) -> bool:
        """Whether words of 32 bits tell where gradients are."""
        most = (max(self.in_table, default=0) + 1) * len(sources.samples)
        return most << shift(_first_of_last(sources) + sources.samples[-1]) <= 1 << ALL_BITS


class OfWidth:
    """The tables of one width as they are stored, for rows of the region of that width.

    Args:
        width: of some.
    """

    def __init__(self, tables: Tables, width: int) -> None:
        members = [t for t in tables.as_stored if tables.widths[t] == width]
        self.widths, self.widest, self.as_stored = [width] * len(members), width, [*range(len(members))]
        self.tables, self.num_rows = tables.tables[members], tables.num_rows[members]
        self.first_rows = self.tables[:, 0] // width
        self.tables[:, 2] = 0  # what a source says of columns is the same for all
        self.in_bank = [tables.in_bank[t] for t in members]


class Runs(NamedTuple):
    """Bags that compiled code goes through.

    Args:
        to_sum: for `sum_bags`.
        to_sort: for `expand_bags`.
        first: of each table, in `to_sort`.
    """

    to_sum: Tensor
    to_sort: Tensor
    first: Tensor


class Apart:
    """The tables of few rows, whose gradients are summed without an order; which they are `expand_bags` tells.

    Args:
        num_tables: of the lookup.

    Attributes:
        read: the ids and the bounds of their bags.
        runs: of these bags.
    """

    read: Bags
    runs: Runs

    def __init__(self, num_tables: int) -> None:
        self.num_tables = num_tables
        self._ends, self.row_ends = longs(bytes(16 * (num_tables + 1)))
        self.firsts = self.row_ends + 8 * (num_tables + 1)

    @property
    def num_rows(self) -> int:
        """Of all."""
        return self._ends[self.num_tables]

    @property
    def num_elements(self) -> int:
        """Likewise."""
        return self._ends[-1]

    def order(self, columns: Tensor) -> Order:
        """Of the rows' sums, which is to be written; each has one source, that says where it lies.

        Args:
            columns: 0 of each range.
        """
        order = Order(self.num_rows, self.num_tables, ALL_BITS, columns)
        order.read_ends(self._ends)
        order.make_room(self.num_rows + self.num_tables, with_places=False)
        return order


class Order:
    """A call's ids in the order of their rows, table by table; see `numba_sort`.

    Args:
        num_ids: of the call.
        num_tables: of the lookup.
        shift: see *source* there.
        columns: of each range in the gradient.
    """

    def __init__(self, num_ids: int, num_tables: int, shift: int, columns: Tensor) -> None:
        self.num_ids, self.shift, self.columns = num_ids, shift, columns
        self.num_bags = 0
        """Of each range, of pooled lookups; where only the last are told by samples, those before and the samples."""
        self.tables: Tables | None = None
        """Where each range has columns for every source."""
        self._ends, self.ends = longs(bytes(8 * (num_tables + 1)))
        """(num_tables + 1,) int64; its address."""
        self._begins, self.begins = longs(bytes(8 * num_tables))
        """(num_tables,) int64; its address."""
        self._counts = array("i", bytes(4 * num_tables))
        self.apart = Apart(num_tables)

    def make_room(self, num_rows: int, with_places: bool) -> None:
        """For all that is sorted: so many rows, which `lay_out` finds, and where each id was, if it is asked."""
        sizes = [num_rows, num_rows, self.num_ids, self.num_ids * with_places]
        self.memory = torch.empty(sum(sizes), dtype=torch.int32, device="cpu")
        rows, starts, ordered, places = accumulate([4 * n for n in sizes[:3]], initial=self.memory.data_ptr())
        of_tables = self.ends, self.begins, self._counts.buffer_info()[0]
        self.addresses = (*of_tables, rows, starts, ordered, places if with_places else 0)

    def read_ends(self, ends: array[int]) -> None:
        """Have these, in place of its own."""
        self._ends, self.ends = ends, ends.buffer_info()[0]

    @property
    def counts(self) -> list[int]:
        """Of each table its distinct rows."""
        return self._counts.tolist()


def order_of_sources(tables: Tables, sources: Sources, num_ids: int) -> tuple[Order, Runs]:
    """An order, and the bags that it is made of: a *source* counts the samples of one rank, as a feature of its own.

    The last rank's come behind the others', by which they are known where they are `Given`.
    """
    num, before = len(sources.samples), [*accumulate(sources.samples, initial=0)]
    last = _first_of_last(sources)
    firsts = [0] * (num - 1) + [last]
    bits = shift(last + sources.samples[-1])
    order = Order(
        num_ids,
        len(tables),
        bits,
        (
            tables.columns.view(-1, 1)
            + int64([start - first * sources.stride for start, first in zip(sources.starts, firsts, strict=True)])
        ).view(-1),
    )
    order.tables, order.num_bags = tables.of_sources(num), last + sources.samples[-1]
    ranges = len(tables.in_table)
    to_sort = torch.empty(ranges, num, 3, dtype=torch.int64, device="cpu")
    to_sort[:, :, 0] = torch.arange(ranges, device="cpu").view(-1, 1) * before[-1] + int64(before[:-1])
    to_sort[:, :, 1] = int64(sources.samples)
    to_sort[:, :, 2] = ((int64(tables.in_table).view(-1, 1) * num + torch.arange(num, device="cpu")) << bits) + int64(
        firsts
    )
    return order, Runs(to_sort, to_sort, tables.first_ranges * num)


def _first_of_last(sources: Sources) -> int:
    return max(sources.samples[:-1], default=0)


def scratch_for(num_ids: int) -> Tensor:
    """Memory to sort a table of so many ids in."""
    return torch.empty(5 * num_ids + 4096, dtype=torch.int32, device="cpu")


def places_in(parts: Sequence[Tensor]) -> Tensor:
    """Of the first element of each, counted from that of the first part."""
    first = parts[0]
    return int64([(part.data_ptr() - first.data_ptr()) // first.element_size() for part in parts])


def _num_blocks(width: int) -> int:
    of_sizes = 0
    for size in BLOCKS:
        blocks, width = divmod(width, size)
        of_sizes += blocks
    return of_sizes


def place_of(of: RowRange) -> int:
    """The first element of a range in its bank."""
    return of.chunk.element_offset + of.first_row * of.chunk.width


def int64(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def longs(values: Iterable[int] | bytes) -> tuple[array[int], int]:
    """The same of what one call asks for, in a fifth of the time: to be kept until it has returned, and its address."""
    made = array("q", values)
    return made, made.buffer_info()[0]


@lru_cache(maxsize=16)
def scalar(value: float) -> Tensor:
    """A float64."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def shift(num_bags: int) -> int:
    """See *source* in `numba_sort`."""
    return max(num_bags - 1, 1).bit_length()


def addresses(rows: Tensor) -> list[int]:
    """Of each row of a contiguous matrix."""
    return [rows.data_ptr() + i * rows.stride(0) * rows.element_size() for i in range(len(rows))]


def words(integers: Tensor) -> tuple[int, int]:
    """Address of int32 or int64, whose low halves are read, and the bytes of each."""
    return integers.data_ptr(), integers.element_size()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
