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


def levels(
    table: CostTable, columns: Columns, rows: Integers, weights: Array, phase: int | Integers, number: int
) -> Array:
    """(..., rows) part of all levels of a phase that each column takes at least.

    Args:
        rows: of the columns.
        weights: (..., phases + 1) of seconds and bytes, so that no rank has more than 1.
        phase: one whose ranks, or groups of ranks, are meant; or one for each of the weights.
        number: of levels.
    """
    taken = np.zeros((*weights.shape[:-1], len(rows)))
    counted = _counted(table, columns, rows, weights, number)
    rows, row = rows[counted], columns.row[rows[counted]]
    hits, one = columns.hits[rows].T[phase], columns.one[phase][..., None]
    fixed, slope = weights @ table.fixed[row].T, weights @ table.slope[row].T
    lacks = np.flatnonzero(table.lacking[row])
    last = row[lacks]
    fixed = np.concatenate([fixed, fixed[..., lacks] - weights @ table.lack[last].T], -1)
    slope = np.concatenate([slope, slope[..., lacks] - weights @ table.lack_slope[last].T], -1)
    found = _levels(table, columns, np.append(rows, rows[lacks]), fixed, slope, number)
    of_full = found[..., : len(rows)]
    of_last = of_full.copy()
    of_last[..., lacks] = found[..., len(rows) :]
    taken[..., counted] = of_full * (hits - one) + of_last * one
    return taken


def _counted(table: CostTable, columns: Columns, rows: Integers, weights: Array, number: int) -> Integers:
    """Those of the rows that may take a level: all others take none, even in one piece."""
    row, top = columns.row[rows], np.maximum(weights, 0).reshape(-1, weights.shape[-1]).max(0, initial=0.0)
    used = np.flatnonzero(top)
    at = np.ix_(row, used)
    most = np.maximum(table.fixed[at], 0) + table.units[row][:, None] * np.maximum(table.slope[at], 0)
    if len(lacks := np.flatnonzero(table.lacking[row])):
        last, units = np.ix_(row[lacks], used), table.units[row[lacks]][:, None]
        # there may be more on a last rank
        most[lacks] -= np.minimum(table.lack[last], 0) + units * np.minimum(table.lack_slope[last], 0)
    return np.flatnonzero((most @ top[used] * (number + 1) > 1 - _EDGE) & (columns.pieces[rows] > 0))


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
