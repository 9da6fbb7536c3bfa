"""A lower bound on those plans of which a sum is so much at least. Pure, as `planner.search`.

[Note: held sums] What a plan lacks in the sum is charged at a price, and what it has beyond is paid back: of plans that
lack nothing this costs no more than they do, and so a bound on what it costs is one on them, whatever the price. Each
item is charged where it adds less than it might. The price that makes the bound highest lies between one where the
relaxed optimum lacks something and one where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.search.bound import Bound, lower_bound
from planner.search.cost_table import Array
from planner.search.problem import Problem

_PRICES = 4
_WORK = 12.0
"""Of a bound at a price, see `lower_bound`."""
_BEYOND = 1.2
"""The first price is so much more than would be enough, did the optimum not change with it."""
_CLOSE = 5e-4
"""Nobody cares how much of this part of the seconds is missing."""
_ROUNDING = 1e-9


def bound_of_held(
    problem: Problem,
    adds: Array,
    least: float,
    free: Bound,
    upper: float,
    out_of_time: Callable[[], bool] = lambda: False,
) -> float:
    """Seconds that no plan goes below whose items add up to so much, or `upper` where that is less.

    Args:
        adds: (rows of the table,) what an item adds that takes one.
        free: bound on all plans, with which the search for a price begins.
    """
    table = problem.table
    owner = np.searchsorted(np.unique(table.owner), table.owner)
    top = np.maximum.reduceat(adds, np.flatnonzero(np.diff(table.owner, prepend=-1)))
    counts = np.bincount(problem.item_class, minlength=len(top))
    lacking, missing = top[owner] - adds, least - float(top @ counts)
    size = max(float(np.abs(lacking).max(initial=0.0)), abs(missing), 1e-300)
    lacking, missing = lacking / size, missing / size
    best, price, found = 0.0, 0.0, free
    below: tuple[float, float, float] | None = None  # price, seconds, what the optimum lacks
    above: tuple[float, float, float] | None = None
    for _ in range(_PRICES):
        if price > 0:
            every = table.everywhere.copy()
            every[:, -2] += price * lacking
            priced = replace(problem, table=replace(table, everywhere=every))
            found = lower_bound(priced, upper - price * missing, out_of_time, most=_WORK)
        seconds = found.seconds + price * missing
        best = max(best, seconds)
        if found.relaxed is None or best >= upper * (1 - _CLOSE) or out_of_time():
            break
        lack = float(found.relaxed.share @ lacking[found.relaxed.rows]) + missing
        if lack > _ROUNDING:
            below = price, seconds, lack
        else:
            above = price, seconds, lack
        if below is None:
            break
        if above is None:
            price = price + _BEYOND * (upper - seconds) / below[2]
        else:  # where what both say of prices between them is the same
            price = (above[1] - below[1] + below[0] * below[2] - above[0] * above[2]) / (below[2] - above[2])
            if below[1] + (price - below[0]) * below[2] <= best * (1 + _CLOSE):
                break
    return min(best, upper)
