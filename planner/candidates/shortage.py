"""`Shortage`: what no search can mend, told by bytes alone; and what surely fits. Arithmetic over the cost table.

[Note: certificates]
Each item takes at least the bytes of its smallest family on all ranks together, and at least its narrowest piece on one
rank. Where the first sum is above what all ranks have, or the second above what any has, there is no placement. On the
other hand, pieces for single ranks, and items that lie on all ranks evenly, always fit where all of them together
leave the largest piece's bytes free on every rank: some rank is no fuller than the mean (of k pieces of one item,
which lie on different ranks: than the mean without the k - 1 fullest).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from planner.search.cost_table import Array
from planner.search.cuts import totals
from planner.search.problem import Infeasible, Problem

_LARGE = 8  # a rank has room for at least so many pieces where it is sure that they fit


class Shortage(Infeasible):
    """No placement exists, see [Note: certificates].

    Attributes:
        needed: bytes that all items take at least, on all ranks.
        free: bytes that all ranks have for them.
        is_total: all items together are too much; else `item` alone is.
    """

    def __init__(self, cause: Infeasible, needed: float, free: float, is_total: bool) -> None:
        super().__init__(cause.item, cause.option, cause.rank, cause.bytes_short, cause.load)
        self.needed, self.free, self.is_total = needed, free, is_total


def shortage(problem: Problem) -> Shortage | None:
    """What is short by bytes alone; of one item where one alone is too large. None where there may be a placement."""
    if not len(problem.item_class):
        return None
    free = _free(problem)
    needed, has = float(_by_class(problem, _anywhere(problem))[problem.item_class].sum()), float(free.sum())
    if not np.isfinite(needed):  # ranks are missing, not bytes
        return None
    alone = _alone(problem)
    least = _by_class(problem, alone)[problem.item_class]
    over = least - free.max()
    for item, allowed in problem.allowed.items():
        over[item] = least[item] - free[allowed].max(initial=0)
    item = int(over.argmax())
    if over[item] > 1e-9 * least[item]:
        may_hold = problem.allowed.get(item)
        rank = int((free if may_hold is None else np.where(may_hold, free, -1)).argmax())
        return Shortage(_cause(problem, alone, item, rank, over[item]), needed, has, False)
    if needed - has > 1e-9 * needed:
        total = _anywhere(problem)
        item = int(_by_class(problem, total)[problem.item_class].argmax())
        return Shortage(_cause(problem, total, item, int(free.argmin()), needed - has), needed, has, True)
    return None


def surely_fits(problem: Problem) -> bool:
    """Whether there is a placement, by arithmetic alone, see [Note: certificates]; often not seen where there is."""
    if problem.allowed or problem.spread or not len(problem.item_class):
        return False
    table, num_ranks, free = problem.table, len(problem.capacity), float(_free(problem).min())
    fixed, cut = table.fixed[:, -1], table.units * table.slope[:, -1]
    most = np.minimum(table.units // np.maximum(table.least, 1), num_ranks // _LARGE)
    count = np.clip(np.ceil(cut / max(free / _LARGE, 1)), 1, np.maximum(most, 1))
    piece = fixed + np.ceil(table.units / count) * table.slope[:, -1]
    is_single = (table.size == 1) & (table.pieces == 1) & (piece <= free / _LARGE * 1.25)
    is_everywhere = (table.filled == num_ranks) & (table.pieces == 1)
    others = num_ranks - count[is_single].max(initial=1) + 1  # mean over these at worst
    single = (count * fixed + cut) / others
    whole = np.where(is_single, single, np.where(is_everywhere, fixed + cut, np.inf)) + table.everywhere[:, -1]
    largest = piece[is_single].max(initial=0.0)
    return bool(_by_class(problem, whole)[problem.item_class].sum() + largest <= free)


def ranks_for(problem: Problem, part: float) -> float:
    """How many ranks like these have room for all items, with such a part of the bytes taken; infinite: no number."""
    first = np.searchsorted(problem.table.owner, problem.item_class)
    least = _by_class(problem, _anywhere(problem))[problem.item_class].sum()
    common = problem.table.everywhere[first, -1].sum()
    room = part * float(_free(problem).mean()) - common
    return float((least - common * len(problem.capacity)) / room) if room > 0 else np.inf


def _free(problem: Problem) -> Array:
    """(ranks,) bytes."""
    return np.maximum(problem.capacity - problem.base[:, -1], 0)


def _anywhere(problem: Problem) -> Array:
    """(rows,) bytes on all ranks together at least; infinite where there are too few ranks for the pieces."""
    table, num_ranks = problem.table, len(problem.capacity)
    found = totals(problem)[:, -1] + num_ranks * table.everywhere[:, -1]
    return np.where(table.pieces * table.size <= num_ranks, found, np.inf)


def _alone(problem: Problem) -> Array:
    """(rows,) bytes of the narrowest cut's widest piece, with what all items put on every rank."""
    table, common = problem.table, problem.table.everywhere[:, -1]
    most = np.minimum(table.units // np.maximum(table.least, 1), len(problem.capacity) // table.size)
    widest = -(-table.units // np.maximum(most, 1))
    least = _by_class(problem, common)
    others = least[problem.item_class].sum() - least
    found: Array = table.fixed[:, -1] + widest * table.slope[:, -1] + common + others[table.owner]
    return found


def _by_class(problem: Problem, of_rows: Array) -> Array:
    """(classes,) the least of each class's rows."""
    found = np.full(len(problem.starts) - 1, np.inf)
    np.minimum.at(found, problem.table.owner, of_rows)
    return found


def _cause(problem: Problem, of_rows: Array, item: int, rank: int, short: float) -> Infeasible:
    """One item's, with its smallest family."""
    first, stop = problem.starts[problem.item_class[item] : problem.item_class[item] + 2].tolist()
    return Infeasible(item, int(of_rows[first:stop].argmin()), rank, ceil(short), problem.base)
