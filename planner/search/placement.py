"""`Placement`: where items are, what ranks carry, and where the next item costs least. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import shared
from planner.search.problem import Choice, Infeasible, Problem, Ranks

_EVEN = 1e-3
"""Weight of the load where it is put, against the step time: among ranks that cost the same, the idlest."""


class Part(NamedTuple):
    """What an item got: a row of the table, and of each piece its block and its units (0 where not divisible)."""

    row: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...]


class Place(NamedTuple):
    """A feasible place and what it makes of the objective; the smaller the better."""

    score: float
    part: Part


def even(units: int, count: int) -> tuple[int, ...]:
    """Widths of `count` pieces that differ by one at most, largest first."""
    least, more = divmod(units, count)
    return (least + 1,) * more + (least,) * (count - more)


class Placement:
    """Where the items are that have been placed.

    Attributes:
        load: (ranks, phases + 1) of everything placed; of a shared phase the sum, on each rank that shares it.
        parts: of each item, None where it is not placed.
        users: (kinds,) how many need each set-up.
        taken: for each spread group, (ranks,) how many members each rank holds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.load = problem.base.copy()
        self.parts: list[Part | None] = [None] * len(problem.item_class)
        kinds = np.arange(len(problem.setups))
        self.users = np.isin(kinds, sorted(problem.base_kinds)).astype(np.int64)
        self.needs = (problem.table.kinds[:, None] >> kinds) & 1
        num_ranks = len(problem.capacity)
        self.taken = {group: mask.astype(np.int64) for group, mask in problem.taken.items()}
        for groups in problem.spread.values():
            for group in groups:
                self.taken.setdefault(group, np.zeros(num_ranks, dtype=np.int64))
        self.shared = [(int(s), np.append(problem.span == s, False)) for s in np.unique(problem.span) if s > 1]
        self.own = np.append(problem.span == 1, True)

    def phase_seconds(self) -> Array:
        """Slowest rank of each phase, with set-ups."""
        slowest: Array = self.load[:, :-1].max(0) + self.problem.setups[self.users > 0].sum(0)
        return slowest

    def seconds(self) -> float:
        """Cost of what is placed."""
        return float(self.phase_seconds().sum())

    def chosen(self) -> tuple[Choice, ...]:
        """Choices of all items."""
        found = []
        for item, part in enumerate(self.parts):
            assert part is not None
            first = int(self.problem.starts[self.problem.item_class[item]])
            widths = part.widths if self.problem.table.units[part.row] else None
            found.append(Choice(part.row - first, part.blocks, widths))
        return tuple(found)

    def add(self, item: int, part: Part) -> None:
        """Put an item down."""
        self.parts[item] = part
        self._change(item, part, 1)

    def remove(self, item: int) -> Part:
        """Take an item up."""
        part = self.parts[item]
        assert part is not None
        self._change(item, part, -1)
        self.parts[item] = None
        return part

    def _change(self, item: int, part: Part, sign: int) -> None:
        table = self.problem.table
        self.load += sign * table.everywhere[part.row]
        for i, (block, width) in enumerate(zip(part.blocks, part.widths, strict=True)):
            self._put(part.row, i, block, width, sign)
        self.users += sign * self.needs[part.row]
        for group in self.problem.spread.get(item, ()):
            self.taken[group][self.ranks(part)] += sign

    def _put(self, row: int, index: int, block: int, width: int, sign: int) -> None:
        table = self.problem.table
        size = int(table.size[row])
        first, stop = block * size, (block + 1) * size
        if row in table.ragged:
            loads = sign * table.ragged[row][index]
        else:
            loads = np.broadcast_to(sign * (table.fixed[row] + width * table.slope[row]), (size, self.load.shape[1]))
        if not self.shared:
            self.load[first:stop] += loads
            return
        self.load[first:stop] += np.where(self.own, loads, 0)
        for span, phases in self.shared:
            low, high = first // span * span, -(-stop // span) * span
            for phase in np.flatnonzero(phases).tolist():
                self.load[low:high, phase] += sign * shared(sign * loads[None, :, phase], span)[0]

    def ranks(self, part: Part) -> Integers:
        """Ranks that hold something of an item."""
        size = int(self.problem.table.size[part.row])
        ranks = (np.array(part.blocks)[:, None] * size + np.arange(size)).ravel()
        ragged = self.problem.table.ragged.get(part.row)
        return ranks if ragged is None else ranks[ragged[..., -1].ravel() > 0]

    def find(self, item: int, row: int, widths: tuple[int, ...], fill: int = 0) -> Place | Infeasible:
        """The place where a family, so cut, costs least (`fill` as in `packing.Start`), or what is short."""
        problem, table = self.problem, self.problem.table
        num_ranks, size = len(problem.capacity), int(table.size[row])
        option = row - int(problem.starts[problem.item_class[item]])
        missing = (self.needs[row] > 0) & (self.users == 0)
        extra = float(problem.setups[missing].sum())
        open_ranks = self.open_ranks(item)
        before = self.load
        self.load = before + table.everywhere[row]
        try:
            used = np.zeros(num_ranks // size, dtype=bool)
            blocks, score = [0] * len(widths), 0.0
            for i in self._largest_first(row, len(widths)):
                loads = self._loads(row, i, widths[i])
                after = self.load.reshape(-1, size, self.load.shape[1]) + loads
                room = problem.capacity.reshape(-1, size) - after[..., -1]
                closed = used
                if open_ranks is not None:
                    closed = used | ((loads[:, -1] > 0) & ~open_ranks.reshape(-1, size)).any(1)
                if closed.all():
                    return Infeasible(item, option, None, 0, before)
                lack = np.where(closed, np.inf, -room.min(1))
                peak = after[..., :-1].max(1)
                sums = np.maximum(self.load[:, :-1].max(0), peak).sum(1) + _EVEN * peak.sum(1)
                sums = np.where(lack > 0, np.inf, fill * after[..., -1].sum(1) if fill else sums)
                block = int(sums.argmin())
                if not np.isfinite(sums[block]):
                    nearest = int(lack.argmin())
                    rank = nearest * size + int(room[nearest].argmin())
                    return Infeasible(item, option, rank, int(np.ceil(lack[nearest])), before)
                blocks[i], used[block], score = block, True, float(sums[block])
                if len(widths) > 1:
                    self._put(row, i, block, widths[i], 1)
            excess = self.load[:, -1] - problem.capacity
            rank = int(excess.argmax())
            if excess[rank] > 0 and table.everywhere[row, -1] > 0:
                return Infeasible(item, option, rank, int(np.ceil(excess[rank])), before)
        finally:
            self.load = before
        return Place(score + extra, Part(row, tuple(blocks), widths))

    def _loads(self, row: int, index: int, width: int) -> Array:
        """(ranks of a block or 1, phases + 1) that a piece puts on each rank of its block."""
        table = self.problem.table
        if row in table.ragged:
            ragged: Array = table.ragged[row][index]
            return ragged
        loads: Array = (table.fixed[row] + width * table.slope[row])[None]
        return loads

    def _largest_first(self, row: int, count: int) -> list[int]:
        if row not in self.problem.table.ragged:
            return list(range(count))  # widths fall
        loads = self.problem.table.ragged[row]
        order: list[int] = np.argsort(-loads[..., :-1].sum((1, 2)), kind="stable").tolist()
        return order

    def open_ranks(self, item: int) -> Ranks | None:
        """Ranks that may hold an item; None for all."""
        ranks = self.problem.allowed.get(item)
        for group in sorted(self.problem.spread.get(item, ())):
            free = self.taken[group] == 0
            ranks = free if ranks is None else ranks & free
        return ranks
