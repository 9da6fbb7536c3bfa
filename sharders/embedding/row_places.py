"""Where the rows that come back for a batch's ids belong, see [Note: distinct rows] of input_dist.py.

Rows come rank by rank, this rank's own last, in one flat tensor: of each width they are rows of a matrix. What is put
together of them is each result row's row there, worked out before they come: results are then read in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sharders.embedding.call import Places, Sent, Span
from sharders.embedding.lookup.distinct import spread
from sharders.embedding.placement import Placement, Slot
from sharders.embedding.row_moves import Sums, can_move, gathered

READ_APART = 1 << 21
"""Elements of gradients: to put so many together takes longer than to read them one by one."""


@dataclass(frozen=True)
class RowPlaces:
    """Of neighbouring slots with one dim, column and width: `count` rows, which go to `where` of the dim's result.

    Args:
        times: how many of these places each row goes to; None where one each.
    """

    dim: int
    column: int
    width: int
    count: int
    where: slice | torch.Tensor
    times: torch.Tensor | None = None

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
    joined: list[tuple[tuple[int, int, int], Span]] = []
    for slot, span in zip(slots, spans, strict=True):
        kind = (dims[slot.feature], slot.column, slot.width)
        last = joined[-1] if joined else None
        if last and last[0] == kind and _goes_on(last[1], span, places[span.is_split]):
            rows, ids = range(last[1].rows.start, span.rows.stop), range(last[1].ids.start, span.ids.stop)
            if places[span.is_split] is None:
                ids = range(last[1].ids.start, last[1].ids.stop + len(span.ids))
            joined[-1] = kind, last[1]._replace(rows=rows, ids=ids)
        else:
            joined.append((kind, span))
    return [RowPlaces(*kind, *_where(span, places[span.is_split])) for kind, span in joined]


def _goes_on(last: Span, span: Span, places: Places | None) -> bool:
    if last.is_split != span.is_split:
        return False
    if places is None:
        return last.result.stop == span.result.start
    return last.rows.stop == span.rows.start and last.ids.stop == span.ids.start and last.shift == span.shift


def _where(span: Span, places: Places | None) -> tuple[int, slice | torch.Tensor, torch.Tensor | None]:
    """Rows, where they go, and to how many places each."""
    if places is None:
        return len(span.ids), slice(span.result.start, span.result.stop), None
    where = places.of_ids[span.ids.start : span.ids.stop]
    times = None if places.times is None else places.times[span.rows.start : span.rows.stop]
    return len(span.rows), where + span.shift if span.shift else where, times


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
            return lambda rank, out: self._sum(rank, grads, scale, out)
        read = self._read(grads)

        def pack(rank: int, out: torch.Tensor) -> None:
            at = 0
            for of, grad in read[rank]:
                stop = at + of.count * of.width
                of.take(grad, scale, out[at:stop].view(of.count, of.width))
                at = stop

        return pack

    def _can_sum(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether all rows came once for their ids, with all columns, and compiled code may read the gradients."""
        if any(places is None or places.times is None for places in self._sent.places):
            return False
        slots = (slot for of_rank, _ in self._of_owners for slot in of_rank)
        return all(slot.width == self.dims[slot.feature] for slot in slots) and can_move(self._kernel, grads)

    def _sum(self, rank: int, grads: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> None:
        """One call for all neighbouring slots of a rank whose rows are of one width, and in one order."""
        at = 0
        of_slots = zip(*self._of_owners[rank], strict=True)
        for (is_split, width), run in groupby(of_slots, key=lambda of: (of[1].is_split, of[0].width)):
            sums, runs, first, num_ids = self._sums(grads, is_split), [], at, 0
            for slot, span in run:
                if span.rows:
                    shift = span.shift - self._sent.row_starts[slot.feature]
                    runs.append(sums.run(slot.feature, shift, span.rows, at - first))
                at += len(span.rows) * width
                num_ids += len(span.ids)
            sums.write(runs, num_ids, scale, out[first:at].view(-1, width))

    def _sums(self, grads: Sequence[torch.Tensor], is_split: bool) -> Sums:
        places = self._sent.places[is_split]
        assert places is not None
        return Sums(grads, places.of_ids, self._bounds[is_split])

    @cached_property
    def _bounds(self) -> list[torch.Tensor]:
        """Of the rows among their ids, by key and of those of split features."""
        joined = [places.times for places in self._sent.places if places is not None and places.times is not None]
        return [F.pad(times.cumsum(0, dtype=torch.int32), (1, 0)) for times in joined]

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
        where = _where(own, self._sent.places[span.is_split])
        return RowPlaces(self.dims[slot.feature], slot.column, slot.width, *where)

    def pieces(self) -> Iterator[tuple[RowPlaces, int]]:
        """Places and the first element of their rows, as they come."""
        at = 0
        for rank in self._order:
            for of in self.by_rank[rank]:
                yield of, at
                at += of.count * of.width

    @cached_property
    def columns(self) -> dict[int, list[_Columns]]:
        """Of each dim whose rows do not all go on as they come."""
        by_dim: dict[int, dict[tuple[int, int], list[tuple[RowPlaces, int]]]] = {}
        for of, first in self.pieces():
            by_dim.setdefault(of.dim, {}).setdefault((of.column, of.width), []).append((of, first))
        return {
            dim: [
                _columns(*kind, pieces, self.num_rows[dim], len(kinds) == 1, self.device)
                for kind, pieces in kinds.items()
            ]
            for dim, kinds in by_dim.items()
            if any(isinstance(of.where, torch.Tensor) for pieces in kinds.values() for of, _ in pieces)
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


def _columns(
    column: int,
    width: int,
    pieces: Sequence[tuple[RowPlaces, int]],
    num_rows: int,
    are_all: bool,
    device: torch.device,
) -> _Columns:
    parts = None
    firsts = [first // width for _, first in pieces]
    if any(first % width for _, first in pieces):
        parts = [(first, of.count * width) for of, first in pieces]
        firsts = [sum(of.count for of, _ in pieces[:i]) for i in range(len(pieces))]
    rows = torch.zeros(num_rows, dtype=torch.int32, device=device)  # data-parallel tables' are written after
    for (of, _), first in zip(pieces, firsts, strict=True):
        if isinstance(of.where, slice):
            torch.arange(first, first + of.count, out=rows[of.where])
        else:
            spread(of.where, of.times, first, rows)
    places = [
        torch.arange(of.where.start, of.where.stop, device=device) if isinstance(of.where, slice) else of.where
        for of, _ in pieces
    ]
    are_all = are_all or sum(map(len, places)) == num_rows
    return _Columns(column, width, parts, rows, None if are_all else torch.cat(places).to(torch.int64))
