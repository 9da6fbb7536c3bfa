"""A lower bound on every plan. Pure, as `planner.search`.

[Note: the bound]
What a plan costs is relaxed: each rank's load to the mean over ranks, what some rank must hold, and memory in total
(see [Note: columns]). Which column each item takes is not relaxed: what a linear programme says of a *node*, a set of
plans, holds for all of them, and the node with the lowest value is split in two, again and again: by which set-ups are
used, by how long a phase takes (then all larger pieces are struck out), by which columns an item may take. The lowest
value of any node is the bound. Work is counted, not timed, so that the bound is the same on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.search.bound_columns import Columns, columns
from planner.search.bound_node import Frame, Node, settle, split
from planner.search.bound_phases import Phases, joined
from planner.search.cost_table import Array, Integers
from planner.search.problem import Problem

PROGRAMMES = 70.0
"""Programmes solved at most, small ones counting less than one, a large one as several."""
_ROWS = 2500
"""Columns of one that counts once; others by the root of how many they have, for most columns are left out at first,"""
_LEAST, _MANY = 0.75, 12_000
"""but not less than this, nor than one for each so many: all are looked at."""
_CLOSE = 5e-4
"""Nobody cares how much of this part of a plan's cost is missing."""
_PROGRESS, _VAIN = 2e-4, 16.0
"""Part of the value by which it has to rise while so many programmes are solved: else the rest would be in vain."""
_ROUNDING = 1e-9
_USED = 1e-6
"""Of an item: less is rounding."""
_PARTS = 7
"""Of the shortest piece, that all others are tried to be a whole number of."""


class Optimum(NamedTuple):
    """What a plan would be like were items divided among columns, and ranks equally loaded.

    Args:
        own: (phases,) seconds above what is the same on every rank.
        every: (phases,) seconds of that.
        price: (phases,) weight of each phase's mean.
        memory: seconds for all free memory.
        allowed: set-ups that may be used, a bit each.
        rows: of the table, of each column.
        pieces: of each column; 0 where nobody counts them.
        share: items that take each column.
    """

    own: Array
    every: Array
    price: Array
    memory: float
    allowed: int
    rows: Integers
    pieces: Integers
    share: Array

    def used(self) -> Integers:
        """Rows of the table that some item takes, for a part at least."""
        return np.unique(self.rows[self.share > _USED])


class Bound(NamedTuple):
    """What no plan goes below.

    Args:
        seconds: see [Note: the bound].
        item: that which takes longest were it alone, however it is laid out.
        alone: seconds of it then.
        relaxed: the optimum that the seconds are of, when items are shared out; None where the bound is `upper`.
    """

    seconds: float
    item: int | None
    alone: float
    relaxed: Optimum | None = None


def lower_bound(
    problem: Problem,
    upper: float,
    out_of_time: Callable[[], bool] = lambda: False,
    *,
    most: float = PROGRAMMES,
) -> Bound:
    """Seconds that no plan goes below, or `upper` where that is less.

    Args:
        upper: what some plan costs; what costs more need not be looked at.
        out_of_time: asked now and then; True ends it with the bound so far.
        most: programmes solved, a large one counting as several.
    """
    return Tree(problem, upper).grown(upper, out_of_time, most=most)


class Tree:
    """Nodes that are all plans of a problem together. It may grow on when a better plan is known.

    Args:
        problem: of which no plan is better than the nodes say.
        upper: as of `lower_bound`.

    Attributes:
        work: programmes solved so far.
    """

    def __init__(self, problem: Problem, upper: float) -> None:
        self._whole = problem
        problem, self._phases = joined(problem)
        self._constant = float(problem.setups[sorted(problem.base_kinds)].sum())
        self._constant += float(problem.base[:, :-1].min(0).sum())
        self._root, self._frame = _root(problem, upper - self._constant)
        self._longest = (
            _longest(problem, self._frame, self._root) if self._root and len(self._root.rows) else (None, 0.0)
        )
        self._heap: list[tuple[float, int, Node]] = []
        self._number, self.work = 0, 0.0
        self._risen, self._since = -np.inf, 0.0
        if self._longest[0] is not None and self._root and (settled := settle(self._frame, self._root)) is not None:
            self._heap.append((settled.value, 0, settled))

    def grown(
        self,
        upper: float,
        out_of_time: Callable[[], bool] = lambda: False,
        told: Callable[[float], object] = lambda value: None,
        most: float = PROGRAMMES,
    ) -> Bound:
        """See `lower_bound`.

        Args:
            upper: no more than before.
            told: called with the bound so far.
            most: programmes solved, those before among them.
        """
        if self._root is None:
            return Bound(upper, None, 0.0)
        if self._longest[0] is None:
            return Bound(min(upper, self._constant + float(self._root.low.sum())), None, 0.0)
        self._frame = self._frame._replace(upper=upper - self._constant)
        node = self._lowest(lambda work: work >= most or out_of_time(), lambda value: told(self._constant + value))
        value = self._frame.upper if node is None else node.value
        seconds = min(upper, (self._constant + value) * (1 - _ROUNDING))
        optimum = node and _optimum(self._whole, self._phases, self._frame, node)
        return Bound(seconds, *self._longest, optimum)

    def _lowest(self, is_enough: Callable[[float], bool], told: Callable[[float], object]) -> Node | None:
        """The node of least value when the work is done, best first; None where none is left."""
        heap, frame = self._heap, self._frame
        while heap:
            value, _, node = heap[0]
            told(value)
            if value > self._risen + _PROGRESS * abs(value):
                self._risen, self._since = value, self.work
            is_close = value >= frame.upper * (1 - _CLOSE)
            if is_close or self.work - self._since > _VAIN or is_enough(self.work):
                return node
            parts = split(frame, node)
            if not parts:
                return node
            heapq.heappop(heap)
            for part in parts:
                self.work += max(_LEAST, float(np.sqrt(len(part.rows) / _ROWS)), len(part.rows) / _MANY)
                settled = settle(frame, part)
                if settled is not None:
                    self._number += 1
                    heapq.heappush(heap, (settled.value, self._number, settled))
        return None


def _optimum(problem: Problem, joint: Phases, frame: Frame, node: Node) -> Optimum:
    assert node.relaxed is not None
    table, phases, used = problem.table, len(problem.span), np.flatnonzero(node.relaxed.share)
    row = frame.columns.row[node.rows[used]]
    every = table.everywhere[row, :phases].copy()
    is_whole = table.filled[row] >= len(problem.capacity)
    count = np.where(table.units[row] > 0, 1, table.pieces[row])[:, None]
    loads = count * table.fixed[row, :phases] + table.units[row][:, None] * table.slope[row, :phases]
    every[is_whole] += loads[is_whole]
    price, number = node.relaxed.price, len(node.low)
    paid = sum(1 << k for k in problem.base_kinds)
    own = joint.apart(node.relaxed.seconds) + problem.base[:, :-1].min(0)
    prices, allowed = (price[:number][joint.of], float(price[number])), node.allowed | paid
    rows, pieces = frame.columns.row[node.rows], frame.columns.pieces[node.rows]
    return Optimum(own, node.relaxed.share[used] @ every, *prices, allowed, rows, pieces, node.relaxed.share)


def _root(problem: Problem, upper: float) -> tuple[Node | None, Frame]:
    """All plans, and what is the same for all parts of them; None where an item has no column."""
    base, table = problem.base[:, :-1], problem.table
    mean = np.array([base[:: int(s), p].mean() for p, s in enumerate(problem.span)]) - base.min(0)
    classes = int(table.owner.max(initial=-1)) + 1
    counts = np.bincount(problem.item_class, minlength=classes).astype(float)
    found = columns(problem, upper)
    found = found.kept(counts[found.owner] > 0)
    found = found._replace(kinds=found.kinds & ~sum(1 << k for k in problem.base_kinds))
    room, units, setups = (
        float((problem.capacity - problem.base[:, -1]).max()),
        _units(problem, found),
        problem.setups.sum(1),
    )
    sums = _sums(problem, units)
    frame = Frame(
        found,
        np.append(mean, -1.0),
        upper,
        table,
        problem.span,
        room,
        units,
        setups,
        sums,
    )
    start = np.flatnonzero(np.diff(found.owner, prepend=-1))
    low, kinds = base.max(0) - base.min(0), sum(1 << k for k in range(len(problem.setups)))
    high = np.full(len(low), max(upper, 0.0))
    items, together = counts[found.owner[start]], np.zeros(len(sums))
    node = Node(0.0, np.arange(len(found.owner)), start, items, low, high, together, 0, kinds)
    return node if len(start) == int((counts > 0).sum()) else None, frame


def _units(problem: Problem, found: Columns) -> Array:
    """(phases,) seconds of which every piece takes a whole number; 0 where there are none."""
    table, row = problem.table, np.unique(found.row)
    base, units = problem.base[:, :-1], np.zeros(len(problem.span))
    lacks = np.asarray(table.lack[row].any(0) | table.lack_slope[row].any(0))
    row = row[table.filled[row] < len(problem.capacity)]
    if np.isin(row, list(table.ragged)).any():
        return units
    for phase in np.flatnonzero((base.max(0) == base.min(0)) & ~lacks[:-1]).tolist():
        seconds = np.concatenate([table.fixed[row, phase], table.slope[row, phase]])
        seconds = np.unique(seconds[seconds > 0])
        for part in range(1, _PARTS) if len(seconds) else ():
            number = seconds / seconds[0] * part
            if np.abs(number - np.round(number)).max() < _ROUNDING and number[-1] < 1 / _CLOSE:
                units[phase] = seconds[0] / part
                break
    return units


def _sums(problem: Problem, units: Array) -> Array:
    """(sums, phases) those that ranks have for themselves and that have no units, see [Note: sums]."""
    chosen = (problem.span == 1) & (units == 0)
    return chosen[None].astype(np.float64) if chosen.sum() > 1 else np.zeros((0, len(chosen)))


def _longest(problem: Problem, frame: Frame, root: Node) -> tuple[int, float]:
    """The item that takes longest alone, and how long."""
    alone = np.minimum.reduceat(frame.columns.every + frame.columns.piece.sum(0), root.start)
    group = int(alone.argmax())
    owner = int(frame.columns.owner[root.start[group]])
    return int((problem.item_class == owner).argmax()), float(alone[group])
