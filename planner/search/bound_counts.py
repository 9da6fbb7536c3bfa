"""How many pieces fit beside each other where a phase takes no longer than so long. Pure, as `planner.search`.

[Note: counting]
Where a phase takes at most h, cut h into m + 1 equal steps. A piece that takes more than t steps has *level* t at
least, and those of one rank (or of the ranks that share the phase) have m levels together at most: more than m pieces
of level 1 do not fit, and so on (Fekete and Schepers' dual feasible functions). So a column takes at least so much of
all levels that there are, in whichever widths it is cut; a mean over ranks knows nothing of that.

A piece on all ranks that share a phase p may leave no room in another phase q, that each rank has for itself: beside
one that takes more than half of q, there is no other that does. So, of pieces that take more than half of q wherever
they are, the former take all levels of p, the others theirs; and those that take less are not counted.

Memory is counted as a phase is; its h is what a rank has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.bound_columns import Columns
from planner.search.cost_table import Array, CostTable, Integers

LEVELS = (1, 2, 3, 4)
_EDGE = 1e-9


class Way(NamedTuple):
    """A way to count, see [Note: counting].

    Args:
        phase: whose levels; the last is memory.
        number: of levels.
        own: a phase that each rank has for itself, of which a piece on all ranks that share `phase` takes its level; -1
            where none does.
    """

    phase: int
    number: int
    own: int = -1

    def taken(self, table: CostTable, columns: Columns, rows: Integers, high: Array, span: Integers) -> Array:
        """(rows,) part of all levels that each column takes at least; arguments as in `crowded`."""
        phase, number = np.array([self.phase, self.own]), np.array([self.number, 1])
        if self.own < 0:
            alone: Array = levels(table, columns, rows, phase[:1], high[phase[:1]], number[:1])[0]
            return alone
        of = levels(table, columns, rows, phase, high[phase], number)
        is_large = _is_large(table, columns, rows, phase[1:], high)[0]
        found: Array = np.where(_is_whole(table, columns, rows, span[self.phase]), of[1], of[0] * is_large)
        return found


def crowded(
    table: CostTable, columns: Columns, rows: Integers, share: Array, high: Array, span: Integers
) -> list[tuple[float, Way]]:
    """Ways to count, and what columns take together of all levels that there are, 1 being all of them.

    Args:
        share: (rows,) items that take each column.
        high: (phases + 1,) seconds at most, or bytes; 0 where that is not known.
        span: (phases + 1,) ranks that share each.
    """
    known = np.flatnonzero(high > 0)
    phase, number = np.repeat(known, len(LEVELS)), np.tile(LEVELS, len(known))
    of = levels(table, columns, rows, phase, high[phase], number)
    ways = [Way(*way) for way in zip(phase.tolist(), number.tolist(), strict=True)]
    found = list(zip((of @ share).tolist(), ways, strict=True))
    own = known[span[known] == 1]
    alone = of[np.flatnonzero((span[phase] == 1) & (number == 1))]
    for p in known[span[known] > 1].tolist():
        is_whole, is_large = _is_whole(table, columns, rows, span[p]), _is_large(table, columns, rows, own, high)
        beside = (of[phase == p] * (share * ~is_whole)) @ is_large.T.astype(np.float64) + alone @ (share * is_whole)
        found += [(float(beside[i, j]), Way(p, n, q)) for i, n in enumerate(LEVELS) for j, q in enumerate(own.tolist())]
    return found


def levels(table: CostTable, columns: Columns, rows: Integers, phase: Integers, most: Array, number: Integers) -> Array:
    """(ways, rows) part of all levels that each column takes at least.

    Args:
        rows: of the columns.
        phase: (ways,) whose levels; the last is memory.
        most: (ways,) seconds that it takes at most, or bytes.
        number: (ways,) of levels.
    """
    row, taken = columns.row[rows], np.zeros((len(phase), len(rows)))
    whole = table.whole.take(row, 0).T[phase]  # of many rows of the table some are asked for
    is_counted = (whole > (most / (number + 1) * (1 - _EDGE))[:, None]) & (columns.pieces[rows] > 0)
    way, at = np.nonzero(is_counted)
    # of no seconds a piece that takes any has all levels
    row, of, most, pieces = row[at], phase[way], np.maximum(most[way], 1e-300), columns.pieces[rows[at]]
    fixed, slope = table.fixed[row, of] / most, table.slope[row, of] / most
    full = _levels(table, row, pieces, fixed, slope, number[way])
    hits, one = columns.hits_of_row[row, of], columns.one[of]
    if len(lacks := np.flatnonzero(table.lacking[row])):
        row, of, most = row[lacks], of[lacks], most[lacks]
        fixed, slope = (
            fixed[lacks] - table.lack[row, of] / most,
            slope[lacks] - table.lack_slope[row, of] / most,
        )
        last = full.copy()
        last[lacks] = _levels(table, row, pieces[lacks], fixed, slope, number[way[lacks]])
        taken[way, at] = full * (hits - one) + last * one
    else:
        taken[way, at] = full * hits
    return taken


def _levels(table: CostTable, row: Integers, pieces: Integers, fixed: Array, slope: Array, number: Integers) -> Array:
    """(columns,) part of a rank's levels that pieces take, all together.

    Args:
        fixed, slope: of what a rank has, of a piece of no units, and for each unit.
    """
    units = table.units[row]
    narrow = np.where(units > 0, table.least[row], 0)
    lowest = np.clip(np.ceil((fixed + narrow * slope) * (number + 1) * (1 - _EDGE)) - 1, 0, number)
    taken = pieces * lowest
    cut = np.flatnonzero((units > 0) & (slope > 0))
    step, lowest, fixed, slope = 1 / (number[cut] + 1), lowest[cut], fixed[cut], slope[cut]
    # the widest piece of each level; how much wider another level makes a piece at most
    width = np.floor(((lowest + 1) * step - fixed) / slope * (1 + _EDGE) + _EDGE)
    left = units[cut] - pieces[cut] * width
    some = np.flatnonzero(left > 0)
    cut, step, lowest, fixed, slope, width = cut[some], step[some], lowest[some], fixed[some], slope[some], width[some]
    wider = np.zeros(len(cut))
    for more in range(1, max(LEVELS) + 1):
        limit = np.floor(((lowest + 1 + more) * step - fixed) / slope * (1 + _EDGE) + _EDGE)
        wider = np.maximum(wider, np.where(more <= number[cut], (limit - width) / more, 0))
    taken[cut] += np.ceil(left[some] / np.maximum(wider, 1e-9) - 1e-6)
    found: Array = taken / number
    return found


def _is_whole(table: CostTable, columns: Columns, rows: Integers, span: int) -> NDArray[np.bool_]:
    """(rows,) whether a piece is on all of the ranks that share a phase, or on none."""
    found: NDArray[np.bool_] = table.filled[columns.row[rows]] % span == 0
    return found


def _is_large(table: CostTable, columns: Columns, rows: Integers, phase: Integers, high: Array) -> NDArray[np.bool_]:
    """(phases, rows) whether a piece takes more than half of a rank, however narrow it is."""
    row = columns.row[rows]
    narrow = np.where(table.units[row] > 0, table.least[row], 0)
    load = table.fixed[row] + narrow[:, None] * table.slope[row]
    found: NDArray[np.bool_] = load.T[phase] > 0.5 * high[phase, None] * (1 + _EDGE)
    return found
