"""Partials: what travels of bags whose rows lie on several ranks.

[Note: partials] A *partial* is the sum of a bag's ids in one row block, made by the rank that has the rows. Only those
of at least one id are made and sent: single rows where bags have one id, partial sums where they are long, and never
more than either; rows of a batch that only fill it up never are. Which there are, the owner reads from the lengths that
came with the ids, and the rank of the samples from those that it sent.
They travel run by run (`SlotRun`), in a run slot by slot, there sample by sample. On receipt those of one bag are added
in the order of sources. Back goes the gradient of a bag to each rank that gave a partial of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sharders.embedding.exchange.local_tables import SlotRun
from sharders.embedding.exchange.phases import FORWARD, Spent, phase
from sharders.embedding.exchange.placement import Placement, Slot
from sharders.embedding.ids.received import Received, joined
from sharders.embedding.lookup.kernels import MOST_APART, can_place
from sharders.embedding.lookup.numba_layout import place_of
from sharders.embedding.lookup.reads import Segmented, Segments
from sharders.embedding.results.columns import first_columns
from sharders.embedding.results.ragged import Columns


class OwnedBags(NamedTuple):
    """Bags of a run that have ids here, source by source: what `Lookup.rows` reads.

    Args:
        bags: None where each has one id.
        of_sources: (bags, ids, segments) that each source has.
    """

    ids: torch.Tensor
    segments: Segments
    bags: torch.Tensor | None
    weights: torch.Tensor | None
    of_sources: list[tuple[int, int, int]]

    @property
    def num_bags(self) -> int:
        """Of all sources."""
        return sum(of_source[0] for of_source in self.of_sources)

    def bounds(self) -> torch.Tensor:
        """Of the bags."""
        return torch.arange(self.num_bags + 1, device=self.ids.device) if self.bags is None else self.bags

    def read(self) -> Segmented:
        """What `Lookup.rows` is given."""
        return Segmented(self.ids, self.segments, self.bags, self.weights)

    def cut(self) -> tuple[OwnedBags, OwnedBags]:
        """Those of all sources but the last, and those of the last."""
        at = len(self.of_sources) - 1
        return self._of(slice(0, at)), self._of(slice(at, at + 1))

    def each(self) -> list[OwnedBags]:
        """Those of every source."""
        return [self._of(slice(i, i + 1)) for i in range(len(self.of_sources))]

    def _of(self, which: slice) -> OwnedBags:
        """Of some neighbouring sources."""
        before, of_sources = self.of_sources[: which.start], self.of_sources[which]
        (bag, first, segment), (last_bag, last, last_segment) = (
            [sum(of) for of in zip((0, 0, 0), *parts, strict=True)] for parts in (before, [*before, *of_sources])
        )
        bounds = None if self.bags is None else self.bags[bag : last_bag + 1]
        if bounds is not None and first:
            bounds = bounds - first
        weights = None if self.weights is None else self.weights[first:last]
        return OwnedBags(self.ids[first:last], self.segments[segment:last_segment], bounds, weights, of_sources)


def owned_bags(received: Received, run: SlotRun, sources: Sequence[int]) -> OwnedBags:
    """The bags of `sources` that have ids in a run's slots."""
    ids, weights = [], []
    segments: list[tuple[int, int]] = []
    of_sources = []
    ranges = [i - run.tbe.slots.start for i in run.slots]
    for source in sources:
        counts, bags_of = received.counts[source], received.bags[source]
        for piece in run.pieces:
            span = received.span(source, piece)
            ids.append(received.ids[source][span])
            if received.weights is not None:
                weights.append(received.weights[source][span].to(run.tbe.bank.weights.dtype))
        its_counts = [n for piece in run.pieces for n in counts[piece.start : piece.stop]]
        num_bags = sum(sum(bags_of[piece.start : piece.stop]) for piece in run.pieces)
        segments += zip(ranges, its_counts, strict=True)
        of_sources.append((num_bags, sum(its_counts), len(its_counts)))
    all_ids, num_bags, bags = joined(ids), sum(n for n, _, _ in of_sources), None
    if weights or num_bags != all_ids.numel():
        lengths = [received.lengths[source][piece.start : piece.stop] for source in sources for piece in run.pieces]
        of_all = joined([of_piece.reshape(-1) for of_piece in lengths])
        filled = chosen(of_all > 0, of_all, num_bags)
        bags = F.pad(filled.cumsum(0, dtype=filled.dtype), (1, 0))
    return OwnedBags(all_ids, segments, bags, joined(weights) if weights else None, of_sources)


class Piece(NamedTuple):
    """Partials of one width that one rank sends side by side.

    Args:
        slots: numbered through all ranks' slots of partials, in the order of sources.
        sender: in the order of sources.
    """

    sender: int
    slots: range
    width: int


@dataclass(frozen=True)
class Group:
    """Results of one width that are sums of partials.

    Args:
        columns: of the results; U of them.
        slots: (T,) whose partials they sum, numbered as in `Piece`.
        result_of: (T,) the column of each.
        slots_of: (U, K) for each column those of its slots, by their place in `slots`; T where there are fewer.
        has_all_rows: the slots of each column have all rows of its table: every bag with ids has a partial of it. Where
            rows are cut at other columns than their neighbours, some columns of a width have some rows only.
    """

    width: int
    columns: list[Columns]
    slots: torch.Tensor
    result_of: torch.Tensor
    slots_of: torch.Tensor
    has_all_rows: bool


class PartialsPlan:
    """Compiled for the ranks that exchange partials: which come from whom, and what they are part of.

    Args:
        placement: all slots of all ranks.
        order: table ranks in the order of sources, this one last.
        tables: whose lookups travel as partials.
        device: of the lengths.
    """

    def __init__(
        self, placement: Placement, order: Sequence[int], tables: Collection[int], device: torch.device
    ) -> None:
        self.order = list(order)
        self.slots = [placement.pieces(rank, tables) for rank in order]
        """For each of them which of its slots they are."""
        slots = [[slot for slot in placement.slots[rank] if slot.table in tables] for rank in order]
        self.pieces: list[Piece] = []
        at = 0
        for sender, of_rank in enumerate(slots):
            for (_, width), run in groupby(of_rank, key=lambda s: (placement.tables[s.table].bank_key, s.width)):
                stop = at + len(list(run))
                self.pieces.append(Piece(sender, range(at, stop), width))
                at = stop
        flat = [slot for of_rank in slots for slot in of_rank]
        self.columns: list[Columns] = [(slot.feature, slot.column, slot.width) for slot in flat]
        """Of the slots of all ranks, as they are numbered."""
        dims = [placement.tables[feature.table].dim for feature in placement.features]
        self._target: list[Columns] = [(f, 0, dim) for f, dim in enumerate(dims)]
        widths = sorted({slot.width for slot in flat})
        self.groups = [_group(width, flat, placement, device) for width in widths]

    def own(self, run: SlotRun) -> tuple[range, tuple[int, ...]] | None:
        """Which slots are this rank's own, and for each row range of the run's lookup the first column of a result
        that it is a part of; None where they lie in several pieces.

        Args:
            run: the only one.
        """
        mine = [piece.slots for piece in self.pieces if piece.sender == len(self.order) - 1]
        if len(mine) != 1:
            return None
        columns = [0] * len(run.tbe.lookup.ranges)
        of_slots = first_columns([self.columns[i] for i in mine[0]], self._target)
        for slot, column in zip(run.slots, of_slots, strict=True):
            columns[slot - run.tbe.slots.start] = column
        return mine[0], tuple(columns)


def _group(width: int, slots: Sequence[Slot], placement: Placement, device: torch.device) -> Group:
    mine = [i for i, slot in enumerate(slots) if slot.width == width]
    columns = sorted({(slots[i].feature, slots[i].column, width) for i in mine})
    number = {column[:2]: i for i, column in enumerate(columns)}
    result_of = [number[slots[i].feature, slots[i].column] for i in mine]
    of_result: list[list[int]] = [[] for _ in columns]
    for place, result in enumerate(result_of):
        of_result[result].append(place)
    most = max(map(len, of_result))
    padded = [of + [len(mine)] * (most - len(of)) for of in of_result]
    blocks = [len(placement.row_blocks[slots[mine[of[0]]].table]) for of in of_result]
    has_all_rows = all(len(of) == number for of, number in zip(of_result, blocks, strict=True))
    numbers, results, slots_of = (torch.tensor(of, device=device) for of in (mine, result_of, padded))
    return Group(width, columns, numbers, results, slots_of, has_all_rows)


class Awaited:
    """The partials that come for one call's bags, and where they belong.

    Args:
        lengths: (slots, B) of this rank's bags, by the slots of partials in the order of sources.
        bags: how many of each slot's have ids.
        all_filled: no bag is empty.
    """

    def __init__(
        self, plan: PartialsPlan, lengths: Sequence[torch.Tensor], bags: Sequence[int], all_filled: bool
    ) -> None:
        self.plan, self._all_filled = plan, all_filled
        self.lengths, self.counts = joined(lengths).contiguous(), list(bags)
        """(slots, B) of the bags; and of each slot the partials that come."""
        self._place = {rank: i for i, rank in enumerate(plan.order)}
        self._samples = self.lengths.shape[1]
        self._counts = [sum(bags[piece.slots.start : piece.slots.stop]) for piece in plan.pieces]
        self.elements = [0] * len(plan.order)
        """From each rank, in the order of sources."""
        for piece, count in zip(plan.pieces, self._counts, strict=True):
            self.elements[piece.sender] += count * piece.width

    @cached_property
    def _places(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """For each group: its results' partials, result by result; of each partial the result; bounds of the results.

        Results are numbered sample by sample, and there column by column; partials as they come. There are no bounds
        where each result is one partial.
        """
        return [self._places_of(group, self._num_partials(group)) for group in self.plan.groups]

    def _places_of(self, group: Group, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        has_ids = self.lengths > 0
        if len(self.plan.groups) > 1:
            has_ids = has_ids.index_select(0, group.slots)
        num_columns, most = group.slots_of.shape
        partial = has_ids.view(-1).cumsum(0).sub_(1).view_as(has_ids)
        if self._all_filled and group.has_all_rows and count == self._samples * num_columns:
            found = partial.mul(has_ids)
            of_columns = F.pad(found, (0, 0, 0, 1)).index_select(0, group.slots_of.view(-1))
            order = of_columns.view(num_columns, most, -1).sum(1).t().reshape(-1)
            return order, torch.empty_like(order).scatter_(0, order, torch.arange(count, device=order.device)), None
        results = torch.arange(self._samples, device=has_ids.device).mul_(num_columns) + group.result_of.unsqueeze(1)
        result_of = chosen(has_ids, results, count)
        of_results, partial_of = (
            F.pad(t, (0, 0, 0, 1)).index_select(0, group.slots_of.view(-1)).view(num_columns, most, -1).permute(2, 0, 1)
            for t in (has_ids, partial)
        )
        bounds = F.pad(of_results.sum(2).view(-1).cumsum(0), (1, 0))
        return chosen(of_results, partial_of, count), result_of, bounds

    def _num_partials(self, group: Group) -> int:
        of_pieces = zip(self.plan.pieces, self._counts, strict=True)
        return sum(count for piece, count in of_pieces if piece.width == group.width)

    def prepare(self) -> None:
        """What can be worked out before anything has come."""
        self._places  # noqa: B018

    def summed(self, came: torch.Tensor, starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """The results (B, U * width) of each group.

        Args:
            came: flat, with all partials in it.
            starts: first element of what came from each rank, in the order of sources.
        """
        for group, (order, _, bounds) in zip(self.plan.groups, self._places, strict=True):
            matrix, shift = self._matrix(group.width, came, starts)
            rows = order if shift is None else shift[order]
            if not rows.numel():
                sums = matrix.new_zeros(self._samples * len(group.columns), group.width)
            elif bounds is None:
                sums = matrix.index_select(0, rows)
            else:
                sums = F.embedding_bag(rows, matrix, bounds, mode="sum", include_last_offset=True)
            yield sums.view(self._samples, len(group.columns) * group.width)

    def place_of(self, rank: int) -> int:
        """Of a table rank, in the order of sources."""
        return self._place[rank]

    def pack(self, rank: int, gradients: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> None:
        """Write the gradients of the partials that a table rank has sent to the flat `out`.

        Args:
            gradients: of each group's results, (B * U, width).
        """
        sender, at = self._place[rank], 0
        done = [0] * len(self.plan.groups)
        number = {group.width: i for i, group in enumerate(self.plan.groups)}
        for piece, count in zip(self.plan.pieces, self._counts, strict=True):
            i = number[piece.width]
            if piece.sender == sender:
                target = out[at : at + count * piece.width].view(count, piece.width)
                result_of = self._places[i][1]
                torch.index_select(gradients[i], 0, result_of[done[i] : done[i] + count], out=target)
                at += count * piece.width
            done[i] += count
        if scale != 1.0:
            out.mul_(scale)

    def _matrix(
        self, width: int, came: torch.Tensor, starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The partials of a width among the rows of a matrix, and the row of each; None where they are all rows."""
        firsts, counts = [], []
        at = list(starts)
        for piece, count in zip(self.plan.pieces, self._counts, strict=True):
            if piece.width == width:
                firsts.append(at[piece.sender])
                counts.append(count)
            at[piece.sender] += count * piece.width
        if any(first % width for first in firsts):
            parts = [came[first : first + n * width] for first, n in zip(firsts, counts, strict=True)]
            return torch.cat(parts).view(sum(counts), width), None
        matrix = came[: came.numel() // width * width].view(came.numel() // width, width)
        before = accumulate(counts, initial=0)
        shifts = [first // width - n for first, n in zip(firsts, before, strict=False)]
        if not any(shifts):
            return matrix, None
        shift, count_of = torch.tensor([shifts, counts], device=came.device)
        rows = shift.repeat_interleave(count_of, output_size=sum(counts))
        return matrix, rows.add_(torch.arange(rows.numel(), device=rows.device))


class OwnRows(NamedTuple):
    """Partials of a slot of this rank's own that are rows of its table, where compiled code finds them.

    Args:
        ids: address of the first.
        id_bytes: of each.
        table: place of its range's first row, in elements from the address 0.
        last: address of the last id.
    """

    ids: int
    id_bytes: int
    table: int
    last: int


class Partials:
    """The partials of one call, those that go and those that come.

    Args:
        runs: of this rank's slots.
        owned: the bags of each run, by the order of sources.
        coming: those that come.
        dtype: of what travels.
        spent: of the call.
    """

    def __init__(
        self,
        runs: Sequence[SlotRun],
        owned: Sequence[OwnedBags],
        coming: Awaited,
        dtype: torch.dtype,
        spent: Spent,
    ) -> None:
        self._runs, self.coming, self._dtype, self._spent = list(runs), coming, dtype, spent
        cut = [bags.cut() for bags in owned]
        self._of_others, self._own = [others for others, _ in cut], [own for _, own in cut]
        places = [coming.place_of(rank) for rank in range(len(coming.plan.order))]
        elements = elements_from(runs, owned) or [0] * len(places)
        self.sent = [elements[place] for place in places]
        self.awaited = [coming.elements[place] for place in places]
        """Elements for, and from, each table rank, this one too."""

    def look_up_others(self, parts: Sequence[torch.Tensor]) -> None:
        """Write what goes to the others, in rank order.

        Args:
            parts: flat memory for each of them, or for all, one behind the other.
        """
        if not (sizes := self._sizes_of_others()):
            return
        if len(self._runs) == len(parts) == 1:
            self._fill(0, self._of_others[0], parts[0])
            return
        if len(parts) == 1:
            parts = parts[0].split([sum(of_source) for of_source in zip(*sizes, strict=True)])
        of_sources = [part.split(of) for part, of in zip(parts, zip(*sizes, strict=True), strict=True)]
        for i, bags in enumerate(self._of_others if of_sources else ()):
            places = [of_source[i] for of_source in of_sources]
            if len(parts) <= MOST_APART and can_place(self._runs[i].tbe.lookup, self._dtype):
                for of_source, place in zip(bags.each(), places, strict=True):
                    self._fill(i, of_source, place)
                continue
            with phase(self._spent, FORWARD):
                found = self._runs[i].tbe.lookup.rows(bags.read(), None).to(self._dtype).view(-1)
                torch._foreach_copy_(places, found.split(sizes[i]))

    def look_up_own(self, out: torch.Tensor) -> None:
        """Flat, for this rank."""
        sizes = [bags.num_bags * run.width for run, bags in zip(self._runs, self._own, strict=True)]
        for i, (bags, of_run) in enumerate(zip(self._own, out.split(sizes), strict=True)):
            self._fill(i, bags, of_run)

    @cached_property
    def own_rows(self) -> list[OwnRows] | None:
        """Of each of this rank's own slots, where its partials can be read from its table; None where they are looked
        up: sums, and of another dtype. They were written once and read once more than they had to be."""
        found = []
        for (tbe, _, _), own in zip(self._runs, self._own, strict=True):
            weights, at = tbe.bank.weights, own.ids.data_ptr()
            if own.bags is not None or weights.dtype != self._dtype:
                return None
            size, bank = own.ids.element_size(), weights.data_ptr() // weights.element_size()
            for index, count in own.segments:
                stop = at + count * size
                found.append(OwnRows(at, size, bank + place_of(tbe.lookup.ranges[index]), stop - size))
                at = stop
        return found

    def _fill(self, run: int, bags: OwnedBags, out: torch.Tensor) -> None:
        (tbe, _, width), to = self._runs[run], None
        if not out.numel():
            return
        if tbe.bank.weights.dtype == self._dtype:
            to = out.view(-1, width)
        with phase(self._spent, FORWARD):
            found = tbe.lookup.rows(bags.read(), to)
        if found.data_ptr() != out.data_ptr():
            out.copy_(found.reshape(-1))

    def _sizes_of_others(self) -> list[list[int]]:
        """For each run, elements for each of the others."""
        runs = zip(self._runs, self._of_others, strict=True)
        return [[of_source[0] * run.width for of_source in bags.of_sources] for run, bags in runs]


def elements_from(runs: Sequence[SlotRun], owned: Sequence[OwnedBags]) -> list[int]:
    """Of all runs' bags, for each source."""
    of_runs = [[n * run.width for n, _, _ in bags.of_sources] for run, bags in zip(runs, owned, strict=True)]
    return [sum(of_source) for of_source in zip(*of_runs, strict=True)]


def chosen(mask: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """`values[mask]`, which are `count`: no branch, and no wait for the device."""
    mask = mask.reshape(-1)
    places = mask.cumsum(0).sub_(1 + count).mul_(mask).add_(count)  # those left out all go behind the others
    return values.new_empty(count + 1).scatter_(0, places, values.reshape(-1))[:count]
