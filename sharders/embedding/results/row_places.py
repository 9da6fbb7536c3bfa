"""Where the rows that come back for a batch's ids belong, see [Note: distinct rows] of input_dist.py.

Rows come rank by rank, this rank's own last, in one flat tensor: of each width they are rows of a matrix. What is put
together of them is each result row's row there, worked out before they come: results are then read in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sharders.embedding.exchange.placement import Placement, Slot
from sharders.embedding.ids.call import Places, Sent, Span
from sharders.embedding.lookup.distinct import Numbered, spread
from sharders.embedding.lookup.numba_kernel import may_run
from sharders.embedding.results.row_moves import Sums, can_move, gathered

READ_APART = 1 << 21
"""Elements of gradients: to put so many together takes longer than to read them one by one."""

FEW, _LONG = 3, 2048
"""Pieces of rows, and rows of one: so few are copied one by one, and longer ones."""


@dataclass(frozen=True)
class RowPlaces:
    """Of neighbouring slots with one dim, column and width: `count` rows, which go to `where` of the dim's result.

    Args:
        span: of all these slots.
        places: which ids the rows stand for; None where they are these ids'.
    """

    dim: int
    column: int
    width: int
    count: int
    span: Span
    places: Places | None = None

    @cached_property
    def where(self) -> slice | torch.Tensor:
        """Rows of the dim's result: all of a row's, row by row."""
        span = self.span
        if self.places is None:
            return slice(span.result.start, span.result.stop)
        where = self.places.of_ids[span.ids.start : span.ids.stop]
        return where + span.shift if span.shift else where

    @cached_property
    def times(self) -> torch.Tensor | None:
        """How many of these places each row goes to; None where one each."""
        if self.places is None or self.places.times is None:
            return None
        return self.places.times[self.span.rows.start : self.span.rows.stop]

    def numbered(self, first: int) -> Numbered:
        """The rows with these numbers, as compiled code writes them to their places."""
        if self.places is None:
            return Numbered(first, self.count, 0, 0, self.span.result.start)
        of_ids, times = self.places.of_ids, self.places.times
        its_times = 0 if times is None else times.data_ptr() + 4 * self.span.rows.start
        return Numbered(first, self.count, of_ids.data_ptr() + 4 * self.span.ids.start, its_times, self.span.shift)

    @cached_property
    def _bounds(self) -> torch.Tensor:
        assert self.times is not None
        return F.pad(self.times.cumsum(0, dtype=torch.int32), (1, 0))

    def take(self, grad: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Write what each row gets of the gradient of the dim's result, (rows, dim), to `out` (count, width)."""
        if isinstance(self.where, slice):
            torch.mul(grad[self.where, self.column : self.column + self.width], scale, out=out)
            return
        columns = slice(self.column, self.column + self.width)
        if self.times is not None:
            sums = F.embedding_bag(self.where, grad, self._bounds, mode="sum", include_last_offset=True)
            torch.mul(sums[:, columns], scale, out=out)
        else:
            torch.index_select(grad[:, columns], 0, self.where, out=out)
            if scale != 1.0:
                out.mul_(scale)


def _joined(
    slots: Sequence[Slot], spans: Sequence[Span], places: Sequence[Places | None], dims: Sequence[int]
) -> list[RowPlaces]:
    """Those of one owner's slots, in the order in which their rows come back; neighbours that go on taken together."""
    kinds: list[tuple[int, int, int]] = []
    runs: list[list[Span]] = []  # the first span of each and the last
    for slot, span in zip(slots, spans, strict=True):
        kind = (dims[slot.feature], slot.column, slot.width)
        if runs and kinds[-1] == kind and _goes_on(runs[-1][1], span, places[span.is_split]):
            runs[-1][1] = span
        else:
            kinds.append(kind)
            runs.append([span, span])
    joined = []
    for kind, (first, last) in zip(kinds, runs, strict=True):
        of, shift = places[first.is_split], last.shift - first.shift  # none where there are places
        ids = range(first.ids.start, last.ids.stop + shift)
        span = Span(first.is_split, range(first.rows.start, last.rows.stop), ids, first.shift)
        joined.append(row_places(*kind, span, of))
    return joined


def _goes_on(last: Span, span: Span, places: Places | None) -> bool:
    if last.is_split != span.is_split:
        return False
    if places is None:
        return last.result.stop == span.result.start
    return last.rows.stop == span.rows.start and last.ids.stop == span.ids.start and last.shift == span.shift


def row_places(dim: int, column: int, width: int, span: Span, places: Places | None) -> RowPlaces:
    """Of rows that were sent for a span of ids."""
    return RowPlaces(dim, column, width, len(span.ids if places is None else span.rows), span, places)


class _Columns(NamedTuple):
    """Columns of a dim's result that come as rows of one width.

    Args:
        parts: of what comes, first element and number of elements; None where the whole is one matrix.
        rows: of each result row its row in the matrix.
        only: the result rows that have these columns; None where all have, but for those of data-parallel tables. Where
            rows are cut at other columns than their neighbours, some only have.
    """

    column: int
    width: int
    parts: list[tuple[int, int]] | None
    rows: torch.Tensor
    only: torch.Tensor | None


class RowsBack:
    """The rows that come back for one call.

    Args:
        placement: all slots of all ranks.
        sent: what they were asked for by.
        destinations: for each table rank its index in `sent`.
        me: this rank.
        counts: ids of each feature.
        device: of the rows.
        kernel: see `can_move`.
    """

    def __init__(
        self,
        placement: Placement,
        sent: Sent,
        destinations: Sequence[int],
        me: int,
        counts: Sequence[int],
        device: torch.device,
        kernel: str | None,
    ) -> None:
        self._sent, self.device, self._kernel = sent, device, kernel
        self._of_owners = [(placement.slots[owner], sent.spans[index]) for owner, index in enumerate(destinations)]
        self.dims = [placement.tables[f.table].dim for f in placement.features]
        """Of each feature."""
        self.num_rows: dict[int, int] = {}
        """dim -> rows of its result, feature by feature."""
        for dim, count in zip(self.dims, counts, strict=True):
            self.num_rows[dim] = self.num_rows.get(dim, 0) + count
        self.by_rank = [_joined(*of_owner, sent.places, self.dims) for of_owner in self._of_owners]
        """Places of each table rank's, in the order they come."""
        self.sizes = [sum(p.count * p.width for p in of_rank) for of_rank in self.by_rank]
        """Elements of each rank's."""
        self._order = [*(i for i in range(len(self.by_rank)) if i != me), me]

    @property
    def are_joined(self) -> bool:
        """Whether rows come once for several ids."""
        return any(places is not None and places.times is not None for places in self._sent.places)

    def pack(self, grads: Sequence[torch.Tensor], scale: float) -> Callable[[int, torch.Tensor], None]:
        """What writes, for a rank, the gradients of the rows that it sent to flat memory, in the order they came.

        Args:
            grads: of each feature's rows, (ids, dim).
            scale: multiplies them.
        """
        if self._can_sum(grads):
            sums = {order: self._sums(grads, order) for order in self._orders}
            return lambda rank, out: self._sum(rank, sums, scale, out)
        read = self._read(grads)

        def pack(rank: int, out: torch.Tensor) -> None:
            at = 0
            for of, grad in read[rank]:
                stop = at + of.count * of.width
                of.take(grad, scale, out[at:stop].view(of.count, of.width))
                at = stop

        return pack

    @cached_property
    def _orders(self) -> list[bool]:
        """Of `Sent.places` those that some slot's rows are in."""
        return sorted({span.is_split for _, spans in self._of_owners for span in spans})

    def _can_sum(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether all rows came with all columns, and compiled code may read the gradients."""
        slots = (slot for of_rank, _ in self._of_owners for slot in of_rank)
        return all(slot.width == self.dims[slot.feature] for slot in slots) and can_move(self._kernel, grads)

    def _sums(self, grads: Sequence[torch.Tensor], order: bool) -> Sums:
        """Of the rows of one order: where each stands for one id, sums of one gradient."""
        places = self._sent.places[order]
        if places is not None and places.bounds is not None:
            return Sums(grads, places.of_ids, places.bounds)
        stop = max(span.ids.stop for _, spans in self._of_owners for span in spans if span.is_split == order)
        one_by_one = torch.arange(stop + 1, dtype=torch.int32, device="cpu")
        return Sums(grads, one_by_one if places is None else places.of_ids, one_by_one)

    def _sum(self, rank: int, of_orders: Mapping[bool, Sums], scale: float, out: torch.Tensor) -> None:
        """One call for all neighbouring slots of a rank whose rows are of one width, and in one order."""
        at, row_starts = 0, self._sent.row_starts
        of_slots = zip(*self._of_owners[rank], strict=True)
        for (is_split, width), run in groupby(of_slots, key=lambda of: (of[1].is_split, of[0].width)):
            sums, runs, first, num_ids = of_orders[is_split], [], at, 0
            for slot, span in run:
                if span.rows:
                    shift = span.shift - row_starts[slot.feature]
                    runs.append(sums.run(slot.feature, width, shift, span.rows, at - first))
                at += len(span.rows) * width
                num_ids += len(span.ids)
            sums.write(runs, num_ids, scale, out[first:at].view(-1, width))

    def _read(self, grads: Sequence[torch.Tensor]) -> list[list[tuple[RowPlaces, torch.Tensor]]]:
        """For each rank, in the order in which its rows came, their places and the gradient to read there.

        Args:
            grads: of each feature's rows. Large ones are read where they are, others are put together by their dims.
        """
        if sum(grad.numel() for grad in grads) >= READ_APART:
            return [
                [(self._of_feature(slot, span), grads[slot.feature]) for slot, span in zip(slots, spans, strict=True)]
                for slots, spans in self._of_owners
            ]
        by_dim: dict[int, list[torch.Tensor]] = {}
        for dim, grad in zip(self.dims, grads, strict=True):
            by_dim.setdefault(dim, []).append(grad)
        whole = {dim: of_dim[0] if len(of_dim) == 1 else torch.cat(of_dim) for dim, of_dim in by_dim.items()}
        return [[(of, whole[of.dim]) for of in of_rank] for of_rank in self.by_rank]

    def _of_feature(self, slot: Slot, span: Span) -> RowPlaces:
        """The places of a slot's rows among its feature's."""
        own = span._replace(shift=span.shift - self._sent.row_starts[slot.feature])
        places = self._sent.places[span.is_split]
        return row_places(self.dims[slot.feature], slot.column, slot.width, own, places)

    def pieces(self) -> Iterator[tuple[RowPlaces, int]]:
        """Places and the first element of their rows, as they come."""
        at = 0
        for rank in self._order:
            for of in self.by_rank[rank]:
                yield of, at
                at += of.count * of.width

    @cached_property
    def columns(self) -> dict[int, list[_Columns]]:
        """Of each dim whose rows do not all go on as they come, or come in many short pieces."""
        compiles = may_run(self._kernel, self.device)
        by_dim: dict[int, dict[tuple[int, int], list[tuple[RowPlaces, int]]]] = {}
        for of, first in self.pieces():
            by_dim.setdefault(of.dim, {}).setdefault((of.column, of.width), []).append((of, first))
        return {
            dim: [
                _columns(*kind, pieces, self.num_rows[dim], len(kinds) == 1, self.device, compiles)
                for kind, pieces in kinds.items()
            ]
            for dim, kinds in by_dim.items()
            if any(of.places is not None for pieces in kinds.values() for of, _ in pieces)
            or (compiles and len(kinds) == 1 and all(map(_are_many, kinds.values())))
        }

    def result(self, dim: int, flat: torch.Tensor) -> torch.Tensor:
        """Of a dim, from all that has come and this rank's own."""
        out: torch.Tensor | None = None
        for of in self.columns[dim]:
            if of.parts is None:
                matrix = flat[: flat.numel() // of.width * of.width].view(-1, of.width)
            else:
                matrix = torch.cat([flat[first : first + n] for first, n in of.parts]).view(-1, of.width)
            if not len(of.rows) or not len(matrix):  # no ids, but for data-parallel tables', which are written after
                continue
            if of.only is None and of.width == dim:
                return gathered(matrix, of.rows, self._kernel)
            out = flat.new_empty(self.num_rows[dim], dim) if out is None else out
            columns = out[:, of.column : of.column + of.width]
            if of.only is None:
                columns.copy_(matrix.index_select(0, of.rows))
            else:
                columns.index_copy_(0, of.only, matrix.index_select(0, of.rows[of.only]))
        return flat.new_zeros(self.num_rows[dim], dim) if out is None else out


def _are_many(pieces: Sequence[tuple[RowPlaces, int]]) -> bool:
    """Whether one compiled call for all rows takes less than a copy for each piece: of 26 it takes 0.25 to 0.6."""
    are_rows = all(first % of.width == 0 for of, first in pieces)  # of one matrix
    return are_rows and len(pieces) > FEW and sum(of.count for of, _ in pieces) < _LONG * len(pieces)


def _columns(
    column: int,
    width: int,
    pieces: Sequence[tuple[RowPlaces, int]],
    num_rows: int,
    are_all: bool,
    device: torch.device,
    compiles: bool,
) -> _Columns:
    parts = None
    firsts = [first // width for _, first in pieces]
    if any(first % width for _, first in pieces):
        parts = [(first, of.count * width) for of, first in pieces]
        firsts = [sum(of.count for of, _ in pieces[:i]) for i in range(len(pieces))]
    rows = torch.zeros(num_rows, dtype=torch.int32, device=device)  # data-parallel tables' are written after
    if compiles:
        spread([of.numbered(first) for (of, _), first in zip(pieces, firsts, strict=True)], rows)
    else:
        for (of, _), first in zip(pieces, firsts, strict=True):
            rows[of.where] = torch.arange(first, first + of.count, dtype=rows.dtype, device=device)
    if are_all or sum(len(of.span.ids) for of, _ in pieces) == num_rows:
        return _Columns(column, width, parts, rows, None)
    places = [
        torch.arange(of.where.start, of.where.stop, device=device) if isinstance(of.where, slice) else of.where
        for of, _ in pieces
    ]
    return _Columns(column, width, parts, rows, torch.cat(places).to(torch.int64))
