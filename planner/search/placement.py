"""`Placement`: where items are, and what ranks carry. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import shared
from planner.search.problem import Choice, Problem, Ranks

PUT = 1.5
"""Work of putting down a piece with many others, in about microseconds."""
SLACK = 1e-12
"""Of the capacity, for what adding up in another order makes of a sum."""


_Loads = tuple[Array, list[tuple[int, int, float]], Array | None]
"""Of a piece: on each of its ranks; where more ranks than those share a phase, on each of them; less on the last."""


class Part(NamedTuple):
    """What an item got: a row of the table, and of each piece its block and its units (0 where not divisible)."""

    row: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...]


def even(units: int, number: int) -> tuple[int, ...]:
    """Widths of pieces that differ by one at most, largest first; all 0 where an item is not divisible."""
    least, more = divmod(units, number)
    return (least + 1,) * more + (least,) * (number - more)


class Placement:
    """Where the items are that have been placed.

    Attributes:
        local: (ranks, phases + 1) of everything placed, but for `every`; of a shared phase the sum, on each rank.
        every: (phases + 1,) what items put on all ranks, pieces that are as large as the machine among it.
        parts: of each item, None where it is not placed.
        users: (kinds,) how many need each set-up.
        taken: for each spread group, (ranks,) how many members each rank holds.
        held: (shape, block) -> the items that have a piece there.
        shapes: (size, filled) of blocks, ascending.
        touched: ranges of ranks whose load changed, since somebody who minds took them away.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.local = problem.base.copy()
        self.every = np.zeros(problem.base.shape[1])
        self.parts: list[Part | None] = [None] * len(problem.item_class)
        kinds = np.arange(len(problem.setups))
        self.users = np.isin(kinds, sorted(problem.base_kinds)).astype(np.int64)
        self.needs = (problem.table.kinds[:, None] >> kinds) & 1
        num_ranks = len(problem.capacity)
        self.taken = {group: mask.astype(np.int64) for group, mask in problem.taken.items()}
        for groups in problem.spread.values():
            for group in groups:
                self.taken.setdefault(group, np.zeros(num_ranks, dtype=np.int64))
        self.held: dict[tuple[int, int], dict[int, None]] = {}
        self.touched: list[tuple[int, int]] = []
        self.shapes, self._shape = problem.block_shapes
        self._shared = [(int(problem.span[p]), p) for p in np.flatnonzero(problem.span > 1).tolist()]
        self._size: list[int] = problem.table.size.tolist()
        self._filled: list[int] = problem.table.filled.tolist()
        self._lacking: list[bool] = problem.table.lacking.tolist()
        self._loads: dict[tuple[int, int], _Loads] = problem.piece_loads

    @property
    def load(self) -> Array:
        """(ranks, phases + 1) of everything placed."""
        load: Array = self.local + self.every
        return load

    def phase_seconds(self) -> Array:
        """Slowest rank of each phase, with set-ups."""
        slowest: Array = self.local[:, :-1].max(0) + self.every[:-1] + self.problem.setups[self.users > 0].sum(0)
        return slowest

    def seconds(self) -> float:
        """Cost of what is placed."""
        return float(self.phase_seconds().sum())

    def fits(self) -> bool:
        """Whether no rank has more bytes than it may."""
        room = self.problem.capacity * (1 + SLACK) - self.local[:, -1] - self.every[-1]
        return bool((room >= 0).all())

    def chosen(self) -> tuple[Choice, ...]:
        """Choices of all items."""
        found = []
        for item, part in enumerate(self.parts):
            assert part is not None
            first = int(self.problem.starts[self.problem.item_class[item]])
            widths = part.widths if self.problem.table.units[part.row] else None
            found.append(Choice(part.row - first, part.blocks, widths))
        return tuple(found)

    @classmethod
    def of(cls, problem: Problem, parts: Sequence[Part | None]) -> Placement:
        """A placement of these parts, of items in order: the same as to put them down one by one, and quicker."""
        found, alike = cls(problem), []
        for item, part in enumerate(parts):
            if part is None:
                continue
            if part.row in problem.table.ragged or item in problem.spread:
                found.add(item, part)
                continue
            found.parts[item] = part
            found._hold(item, part)
            alike.append(part)
        if alike:
            found._put_together(alike)
        return found

    def _hold(self, item: int, part: Part) -> None:
        shape = self._shape[part.row]
        for block in part.blocks:
            self.held.setdefault((shape, block), {})[item] = None

    def _put_together(self, parts: list[Part]) -> None:
        """Add what parts put on ranks that are all alike."""
        table, num_ranks, phases = self.problem.table, len(self.local), range(self.local.shape[1])
        rows = np.array([part.row for part in parts])
        self.every += table.everywhere[rows].sum(0)
        self.users += self.needs[rows].sum(0)
        self.touched.append((0, num_ranks))
        row = np.repeat(rows, [len(part.blocks) for part in parts])
        block = np.array([block for part in parts for block in part.blocks])
        width = np.array([width for part in parts for width in part.widths])
        own = table.fixed[row] + width[:, None] * table.slope[row]
        size, filled = table.size[row], table.filled[row]
        is_everywhere = (filled == num_ranks) & (num_ranks > 1)
        self.every += own[is_everywhere].sum(0)
        spans = [*self.problem.span.tolist(), 1]
        lacking = np.flatnonzero(table.lacking[row])
        lack = table.lack[row[lacking]] + width[lacking, None] * table.lack_slope[row[lacking]]
        stop = block[lacking] * size[lacking] + filled[lacking]
        for phase in phases if len(lacking) else ():
            self.local[:, phase] -= np.bincount(stop - 1, lack[:, phase], num_ranks)
            if (span := spans[phase]) > 1 and len(some := np.flatnonzero(lack[:, phase])):
                before = (stop[some, None] - np.arange(2, span + 1)).ravel()
                self.local[:, phase] -= np.bincount(before, lack[some, phase].repeat(span - 1), num_ranks)
        for ranks in np.unique(filled[~is_everywhere]).tolist():
            of = np.flatnonzero((filled == ranks) & ~is_everywhere)
            first = block[of] * size[of]
            on = (first[:, None] + np.arange(ranks)).ravel()
            for phase in phases:
                if (span := spans[phase]) > ranks:
                    sums = np.bincount(first // span, own[of, phase], num_ranks // span).repeat(span)
                else:
                    sums = np.bincount(on, own[of, phase].repeat(ranks), num_ranks)
                self.local[:, phase] += sums

    def add(self, item: int, part: Part) -> None:
        """Put an item down."""
        self.parts[item] = part
        self._hold(item, part)
        self._change(item, part, 1)

    def remove(self, item: int) -> Part:
        """Take an item up."""
        part = self.parts[item]
        assert part is not None
        shape = self._shape[part.row]
        for block in part.blocks:
            del self.held[shape, block][item]
        self._change(item, part, -1)
        self.parts[item] = None
        return part

    def become(self, parts: list[Part | None]) -> None:
        """Put all items where they are in another placement."""
        others = [(item, part) for item, part in enumerate(parts) if part is not None and part != self.parts[item]]
        for item, _ in others:
            self.remove(item)
        for item, part in others:
            self.add(item, part)

    def swap(self, item: int, part: Part) -> Part:
        """Put an item down otherwise; only what differs is touched. Returns what it was."""
        old = self.parts[item]
        assert old is not None
        if old.row != part.row or old.row in self.problem.table.ragged or item in self.problem.spread:
            self.remove(item)
            self.add(item, part)
            return old
        shape, index = self._shape[part.row], 0
        before, after = (dict(zip(p.blocks, p.widths, strict=True)) for p in (old, part))
        for block, width in before.items():
            if after.get(block) != width:
                self.put(part.row, index, block, width, -1)
                if block not in after:
                    del self.held[shape, block][item]
        for block, width in after.items():
            if before.get(block) != width:
                self.put(part.row, index, block, width, 1)
                if block not in before:
                    self.held.setdefault((shape, block), {})[item] = None
        self.parts[item] = part
        return old

    def _change(self, item: int, part: Part, sign: int) -> None:
        self.every += sign * self.problem.table.everywhere[part.row]
        for index, (block, width) in enumerate(zip(part.blocks, part.widths, strict=True)):
            self.put(part.row, index, block, width, sign)
        self.users += sign * self.needs[part.row]
        for group in self.problem.spread.get(item, ()):
            self.taken[group][self.ranks(part)] += sign

    def put(self, row: int, index: int, block: int, width: int, sign: int) -> None:
        """Add what a piece puts on ranks, or take it away."""
        table, size = self.problem.table, self._size[row]
        filled = self._filled[row]
        first, stop = block * size, block * size + filled
        if filled == len(self.local) > 1 and row not in table.ragged:  # of hundreds of copies, far less to add up
            own, _, lack = self._loads_of(row, width)
            self.every += sign * own
            if lack is not None:
                self.touched.append((first, stop))
                self._put_lack(-sign * lack, stop)
            return
        if row in table.ragged:
            self.touched.append((first, first + size))
            self._put_ragged(table.ragged[row][index], first, first + size, sign)
            return
        self.touched.append((first, stop))
        own, together, lack = self._loads_of(row, width)
        if sign < 0:
            self.local[first:stop] -= own
        else:
            self.local[first:stop] += own
        for span, phase, seconds in together:
            low = first // span * span
            self.local[low : low + span, phase] += sign * seconds
        if lack is not None:
            self._put_lack(-sign * lack, stop)

    def _loads_of(self, row: int, width: int) -> _Loads:
        found = self._loads.get((row, width))
        if found is None:
            table = self.problem.table
            own, together = table.fixed[row] + width * table.slope[row], []
            for span, phase in self._shared:
                if span > self._filled[row]:
                    together.append((span, phase, float(own[phase])))
                    own[phase] = 0.0
            lack = table.lack[row] + width * table.lack_slope[row] if self._lacking[row] else None
            found = self._loads[row, width] = own, together, lack
        return found

    def _put_lack(self, loads: Array, stop: int) -> None:
        """Add what the last rank has besides, in a phase that ranks share the last group of them."""
        for span, phase in self._shared:
            if loads[phase]:
                self.local[stop - span : stop - 1, phase] += loads[phase]
        self.local[stop - 1] += loads

    def _put_ragged(self, loads: Array, first: int, stop: int, sign: int) -> None:
        loads = sign * loads
        for span, phase in self._shared:
            low, high = first // span * span, -(-stop // span) * span
            self.local[low:high, phase] += sign * shared(sign * loads[None, :, phase], span)[0]
            loads[:, phase] = 0.0
        self.local[first:stop] += loads

    def ranks(self, part: Part) -> Integers:
        """Ranks that hold something of an item."""
        size, ragged = self._size[part.row], self.problem.table.ragged.get(part.row)
        if ragged is None:
            return (np.array(part.blocks)[:, None] * size + np.arange(self._filled[part.row])).ravel()
        ranks = (np.array(part.blocks)[:, None] * size + np.arange(size)).ravel()
        return ranks[ragged[..., -1].ravel() > 0]

    def on(self, rank: int, span: int = 1) -> Iterator[tuple[int, int]]:
        """Items with a piece on a rank, or on any of the `span` ranks that share a phase with it, and the block.

        Those that are on all ranks are left out.
        """
        low = rank // span * span
        for shape, (size, filled) in enumerate(self.shapes):
            if filled == len(self.local) > 1:
                continue
            first, last = low // size, (low + span - 1) // size
            if filled < size and first * size + -(-filled // span) * span <= low:
                first += 1
            for block in range(first, last + 1):
                for item in self.held.get((shape, block), ()):
                    yield item, block

    def open_ranks(self, item: int) -> Ranks | None:
        """Ranks that may hold an item; None for all."""
        ranks = self.problem.allowed.get(item)
        for group in sorted(self.problem.spread.get(item, ())):
            free = self.taken[group] == 0
            ranks = free if ranks is None else ranks & free
        return ranks
