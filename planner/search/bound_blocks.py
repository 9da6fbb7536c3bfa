"""Pieces that leave no room on a rank for others, though a phase's mean has some. Pure, as `planner.search`.

[Note: blocking]
Where a phase q takes at most h, and pieces that take less than l of it are left out, one that takes more than h - l has
a rank for itself: it *blocks* it. Whatever another phase p takes at most, on such a rank the piece might as well take
all of that; on the others the pieces that are counted share it. So a blocking piece takes all that a rank has of p, any
other one its part, one that is left out nothing; the sum is no more than there is on all ranks. Where ranks share p, a
piece blocks them if it is on them all. q may be memory, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.bound_columns import Columns
from planner.search.cost_table import Array, CostTable, Integers

_EDGE = 1e-9
_LEAST = 0.01
"""Part of what a rank has that the smallest piece that is counted takes at least."""
_MOST = 0.5
_SIZES = 6
"""Such pieces up to half of a rank that are tried, besides the next larger one."""


class Blocks(NamedTuple):
    """See [Note: blocking].

    Args:
        phase: q; the last is memory.
        most: seconds, or bytes, h.
        least: those of the smallest piece that is counted, l.
    """

    phase: int
    most: float
    least: float

    def taken(self, table: CostTable, columns: Columns, rows: Integers, other: int, seconds: float) -> Array:
        """(rows,) part of what there is of another phase, which takes so long at most, that each column takes."""
        load, taken = narrowest(table, columns, rows, self.phase), np.zeros(len(rows))
        counted = np.flatnonzero(load >= self.least)
        blocked = _covered(table, columns, rows[counted])[:, other]
        is_blocking = (load[counted] > max(self.most - self.least, 0.0) * (1 + _EDGE)) & (blocked > 0)
        taken[counted] = np.where(is_blocking, blocked, columns.mean[rows[counted], other] / seconds)
        return taken


def tried(
    table: CostTable, columns: Columns, rows: Integers, share: Array, phase: int, most: Array
) -> tuple[Array, Array, Array]:
    """What columns take where a phase takes at most so long, for a few smallest pieces that are counted.

    Args:
        share: (rows,) items that take each column.
        most: (times,) seconds, or bytes.

    Returns:
        (sizes,) of those pieces; (times, sizes, phases) the part of ranks, or groups of ranks, that is blocked;
        (times, sizes, phases) seconds of means that the others have.
    """
    load = narrowest(table, columns, rows, phase)
    least = np.unique(load[(load >= _LEAST * most.min(initial=np.inf)) & (load <= most.max(initial=0.0))])
    half = int(np.searchsorted(least, _MOST * most.max(initial=0.0), side="right"))
    some = np.unique(np.linspace(0, max(half - 1, 0), _SIZES).round().astype(int))
    least = np.append(least[:half][some[:half]], least[half : half + 1])
    is_counted = load >= least[:, None]
    is_blocking = is_counted & (load > np.maximum(most[:, None] - least, 0.0)[..., None] * (1 + _EDGE))
    covered, mean = share[:, None] * _covered(table, columns, rows), share[:, None] * columns.mean[rows]
    others = is_counted.astype(np.float64) @ mean - is_blocking.astype(np.float64) @ np.where(covered > 0, mean, 0.0)
    return least, is_blocking.astype(np.float64) @ covered, others


def narrowest(table: CostTable, columns: Columns, rows: Integers, phase: int) -> Array:
    """(rows,) seconds or bytes that a piece puts on each of its ranks at least; 0 where pieces are not counted."""
    row = columns.row[rows]
    width = np.where(columns.pieces[rows] == 1, table.units[row], np.where(table.units[row] > 0, table.least[row], 0))
    full = table.fixed[row, phase] + width * table.slope[row, phase]
    found: Array = full - table.lack[row, phase] - width * table.lack_slope[row, phase]
    return np.where(columns.pieces[rows] > 0, found, 0.0)


def _covered(table: CostTable, columns: Columns, rows: Integers) -> Array:
    """(rows, phases) part of the ranks, or of groups of ranks, that pieces cover all of."""
    phases = columns.mean.shape[1]
    span = np.maximum(np.round(columns.one[:phases] / columns.one[-1]), 1).astype(np.int64)
    is_whole = table.filled[columns.row[rows]][:, None] % span == 0
    return np.where(is_whole, columns.pieces[rows][:, None] * columns.hits(rows)[:, :phases], 0.0)
