"""How many pieces fit beside each other where a phase takes no longer than so long. Pure, as `planner.search`.

[Note: counting]
Where a phase takes at most h, cut h into m + 1 equal steps. A piece that takes more than t steps has *level* t at
least, and those of one rank (or of the ranks that share the phase) have m levels together at most: more than m pieces
of level 1 do not fit, and so on (Fekete and Schepers' dual feasible functions). So a column takes at least so much of
all levels that there are, in whichever widths it is cut; a mean over ranks knows nothing of that.

A piece on all ranks that share a phase p may leave no room in another phase q, that each rank has for itself: beside
one that takes more than half of q, there is no other that does. So, of pieces that take more than half of q wherever
they are, the former take all levels of p, the others theirs; and those that take less are not counted.
"""

from __future__ import annotations

import numpy as np

from planner.search.bound_columns import Columns
from planner.search.cost_table import Array, CostTable, Integers

LEVELS = (1, 2, 3, 4)
_EDGE = 1e-9


def levels(table: CostTable, columns: Columns, rows: Integers, phase: int, high: float, number: int) -> Array:
    """(rows,) part of all levels of a phase that each column takes at least.

    Args:
        rows: of the columns.
        high: seconds that the phase takes at most.
        number: of levels.
    """
    row, pieces = columns.row[rows], columns.pieces[rows]
    fixed, slope, units = table.fixed[row, phase], table.slope[row, phase], table.units[row]
    step = max(high, 1e-30) / (number + 1)
    narrow = np.where(units > 0, table.least[row], 0)
    lowest = np.clip(np.ceil((fixed + narrow * slope) / step * (1 - _EDGE)) - 1, 0, number)
    is_cut = (units > 0) & (slope > 0)
    safe = np.where(is_cut, slope, 1.0)
    # the widest piece of each level; how much wider another level makes a piece at most
    width = np.floor(((lowest + 1) * step - fixed) / safe * (1 + _EDGE) + _EDGE)
    wider = np.zeros(len(row))
    for more in range(1, number + 1):
        limit = np.floor(((lowest + 1 + more) * step - fixed) / safe * (1 + _EDGE) + _EDGE)
        wider = np.maximum(wider, (limit - width) / more)
    left = units - pieces * width
    extra = np.where(is_cut & (left > 0) & (pieces > 0), np.ceil(left / np.maximum(wider, 1e-9) - 1e-6), 0)
    taken: Array = (pieces * lowest + extra) / number * columns.hits[rows, phase]
    return taken


def crowded(
    table: CostTable, columns: Columns, rows: Integers, span: int, phases: tuple[int, int], high: Array, number: int
) -> Array:
    """(rows,) part of all levels of a shared phase that each column takes at least, where another phase is tight.

    Args:
        span: ranks that share the first of `phases`.
        phases: the shared one, and one that each rank has for itself.
        high: (phases,) seconds.
    """
    shared, own = phases
    row = columns.row[rows]
    narrow = np.where(table.units[row] > 0, table.least[row], 0)
    is_large = table.fixed[row, own] + narrow * table.slope[row, own] > 0.5 * high[own] * (1 + _EDGE)
    alone = levels(table, columns, rows, own, float(high[own]), 1) / columns.hits[rows, own]
    beside = np.where(is_large, levels(table, columns, rows, shared, float(high[shared]), number), 0)
    taken: Array = np.where(table.size[row] % span == 0, alone * columns.hits[rows, shared], beside)
    return taken
