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

import numpy as np

from planner.search.bound_columns import Columns
from planner.search.cost_table import Array, CostTable, Integers

LEVELS = (1, 2, 3, 4)
_EDGE = 1e-9


def levels(table: CostTable, columns: Columns, rows: Integers, weights: Array, phase: int, number: int) -> Array:
    """(..., rows) part of all levels of a phase that each column takes at least.

    Args:
        rows: of the columns.
        weights: (..., phases + 1) of seconds and bytes, so that no rank has more than 1.
        phase: one whose ranks, or groups of ranks, are meant.
        number: of levels.
    """
    row, hits = columns.row[rows], columns.hits[rows, phase]
    fixed, slope = weights @ table.fixed[row].T, weights @ table.slope[row].T
    of_full = _levels(table, columns, rows, fixed, slope, number)
    lacks = np.flatnonzero(table.lacking[row])
    if not len(lacks):
        taken: Array = of_full * hits
        return taken
    last, one = row[lacks], columns.one[phase]
    fixed = fixed[..., lacks] - weights @ table.lack[last].T
    slope = slope[..., lacks] - weights @ table.lack_slope[last].T
    of_last = of_full.copy()
    of_last[..., lacks] = _levels(table, columns, rows[lacks], fixed, slope, number)
    taken = of_full * (hits - one) + of_last * one
    return taken


def _levels(table: CostTable, columns: Columns, rows: Integers, fixed: Array, slope: Array, number: int) -> Array:
    """(..., rows) part of a rank's levels that pieces take, all together.

    Args:
        fixed, slope: (..., rows) of what a rank has, of a piece of no units, and for each unit.
    """
    row, pieces = columns.row[rows], columns.pieces[rows]
    units, step = table.units[row], 1 / (number + 1)
    narrow = np.where(units > 0, table.least[row], 0)
    lowest = np.clip(np.ceil((fixed + narrow * slope) / step * (1 - _EDGE)) - 1, 0, number)
    is_cut = (units > 0) & (slope > 0)
    safe = np.where(is_cut, slope, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):  # where width is all but free
        # the widest piece of each level; how much wider another level makes a piece at most
        width = np.floor(((lowest + 1) * step - fixed) / safe * (1 + _EDGE) + _EDGE)
        wider = np.zeros(fixed.shape)
        for more in range(1, number + 1):
            limit = np.floor(((lowest + 1 + more) * step - fixed) / safe * (1 + _EDGE) + _EDGE)
            wider = np.maximum(wider, (limit - width) / more)
        left = units - pieces * width
        extra = np.where(is_cut & (left > 0) & (pieces > 0), np.ceil(left / np.maximum(wider, 1e-9) - 1e-6), 0)
    taken: Array = (pieces * lowest + extra) / number
    return taken


def crowded(
    table: CostTable, columns: Columns, rows: Integers, weights: tuple[Array, Array], phase: int, span: int, number: int
) -> Array:
    """(..., rows) part of all levels of a shared phase that each column takes at least, where each rank is tight too.

    Args:
        weights: of what is shared, (phases + 1,), and of what each rank has for itself, as in `levels`.
        phase: the shared one.
        span: ranks that share it.
    """
    shared, own = weights
    row = columns.row[rows]
    narrow = np.where(table.units[row] > 0, table.least[row], 0)
    is_large = own @ (table.fixed[row] + narrow[:, None] * table.slope[row]).T > 0.5 * (1 + _EDGE)
    alone = levels(table, columns, rows, own, phase, 1)
    beside = np.where(is_large, levels(table, columns, rows, shared, phase, number), 0)
    taken: Array = np.where(table.size[row] % span == 0, alone, beside)
    return taken
