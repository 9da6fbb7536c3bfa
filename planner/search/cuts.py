"""`Cuts`: every family of a table, cut evenly into some numbers of pieces, with what that costs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.problem import Problem

_COUNTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
"""Numbers of pieces that an item is cut into evenly; others come about when pieces are resized."""


class Cuts(NamedTuple):
    """Each (cuts,), grouped by class, or (cuts, phases + 1).

    Args:
        owner: class.
        row: of the table.
        number: of pieces; of a family that is not divisible, those it has.
        piece: what the largest piece puts on a rank.
        mean: averaged over ranks, what is everywhere included.
        start: (classes + 1,) first cut of each class.
        item: (items,) class of each.
    """

    owner: Integers
    row: Integers
    number: Integers
    piece: Array
    mean: Array
    start: Integers
    item: Integers

    @classmethod
    def of(cls, problem: Problem) -> Cuts:
        """All cuts of all classes."""
        table, num_ranks = problem.table, len(problem.capacity)
        most = np.minimum(table.units // np.maximum(table.least, 1), num_ranks // table.size)
        is_cut = np.where(table.units[:, None] > 0, (most[:, None] >= _COUNTS) | (_COUNTS == 1), _COUNTS == 1)
        row, which = np.nonzero(is_cut)
        count = np.where(table.units[row] > 0, _COUNTS[which], table.pieces[row])
        piece, mean = cut_loads(problem, row, count)
        owner = table.owner[row]
        start = np.searchsorted(owner, np.arange(len(problem.starts)))
        return cls(owner, row, count, piece, mean, start, problem.item_class)

    def of_rows(self, rows: Integers) -> Cuts:
        """Those of some rows of the table; of a class that has none of them, all."""
        chosen = np.isin(self.row, rows)
        has_some = np.bincount(self.owner, chosen, len(self.start) - 1) > 0
        at = np.flatnonzero(chosen | ~has_some[self.owner])
        start = np.searchsorted(self.owner[at], np.arange(len(self.start)))
        return Cuts(self.owner[at], self.row[at], self.number[at], self.piece[at], self.mean[at], start, self.item)


def cut_loads(problem: Problem, row: Integers, number: Integers) -> tuple[Array, Array]:
    """(cuts, phases + 1) twice: what the largest piece puts on a rank; averaged over ranks, `everywhere` included."""
    table = problem.table
    widest = -(-table.units[row] // number)
    piece = table.fixed[row] + widest[:, None] * table.slope[row]
    whole = totals(problem)[row] + (number - 1)[:, None] * _fixed(problem)[row] * (table.units[row] > 0)[:, None]
    mean: Array = whole / len(problem.capacity) + table.everywhere[row]
    return piece, mean


def groups(problem: Problem) -> Array:
    """(rows, phases + 1) ranks whose load a piece adds to, by phase: all those that share the phase with its block."""
    filled, span = problem.table.filled[:, None], np.append(problem.span, 1)[None]
    found: Array = (-(-filled // span) * span).astype(np.float64)
    return found


def totals(problem: Problem) -> Array:
    """(rows, phases + 1) what each family in its fewest pieces puts on all ranks together, but for `everywhere`."""
    table = problem.table
    count = np.where(table.units > 0, 1, table.pieces)[:, None]
    span = np.append(problem.span, 1)  # of ranks that have less
    cut = table.slope * groups(problem) - table.lack_slope * span
    found: Array = _fixed(problem) * count + cut * table.units[:, None]
    for row, loads in table.ragged.items():
        found[row] = loads.sum((0, 1))
        for phase in np.flatnonzero(problem.span > 1).tolist():
            found[row, phase] = shared(loads[..., phase], int(problem.span[phase])).sum()
    return found


def _fixed(problem: Problem) -> Array:
    """(rows, phases + 1) what a piece of no units puts on all ranks together."""
    found: Array = problem.table.fixed * groups(problem) - problem.table.lack * np.append(problem.span, 1)
    return found


def shared(loads: Array, span: int) -> Array:
    """(pieces, ranks in a block) loads of a shared phase -> (pieces, ranks that share it): the most of each group."""
    pieces, size = loads.shape
    if size <= span:
        return np.repeat(loads.max(1, keepdims=True), span, axis=1)
    return np.repeat(loads.reshape(pieces, -1, span).max(2), span, axis=1)
