"""Starts like the relaxed optimum that the bound is of. Pure, as `planner.search`."""

from __future__ import annotations

import numpy as np

from planner.search.bound import Optimum
from planner.search.cuts import Cuts
from planner.search.problem import Problem
from planner.search.starts import Start

_BEYOND = 3.0
"""What a second costs by which a piece takes longer than its phase in the optimum."""
_EDGE = 1e-3
LIKE = ((1.0, 0.0), (1.5, 0.6), (2.0, 0.3), (1.2, 1.0), (1.0, 0.3))
"""By how much pieces may be larger than the optimum's phases, and the least price of a phase: ways to be like it."""


def guided(problem: Problem, cuts: Cuts, optimum: Optimum, like: tuple[float, float] = LIKE[0]) -> Start | None:
    """A start whose cuts are cheapest at the optimum's prices and, if they can, keep to its times.

    A phase that ranks are idle in is cheap there, one that all are busy in is dear, and how long each phase should take
    is known: a start by least work, or by a threshold for all phases together, sees none of that. None where a class
    has no cut without set-ups that the optimum does not pay.

    Args:
        like: one of `LIKE`; real ranks are not so idle as the optimum's.
    """
    longer, least_price = like
    table, phases = problem.table, len(problem.span)
    every, mean = table.everywhere[cuts.row, :phases], cuts.mean[:, :phases] - table.everywhere[cuts.row, :phases]
    is_whole = (table.size[cuts.row] >= len(problem.capacity))[:, None]
    price = np.where(is_whole, 1.0, np.clip(optimum.price, least_price, 1.0))
    room = max(float((problem.capacity - problem.base[:, -1]).mean()), 1e-30)
    beyond = np.where(is_whole, 0.0, cuts.piece[:, :phases] - longer * optimum.own * (1 + _EDGE))
    cost = every.sum(1) + (mean * price).sum(1) + optimum.memory * cuts.mean[:, -1] / room
    cost = cost + _BEYOND * np.maximum(beyond, 0).sum(1)
    cost = np.where(table.kinds[cuts.row] & ~optimum.allowed, np.inf, cost)
    least = np.minimum.reduceat(cost, cuts.start[:-1])
    if not np.isfinite(least).all():
        return None
    at = np.flatnonzero(cost == least[cuts.owner])
    first = at[np.unique(cuts.owner[at], return_index=True)[1]]
    counts = np.bincount(problem.item_class, minlength=len(cuts.start) - 1)
    fill = float((cuts.mean[first, -1] * counts).sum()) / room
    target = np.maximum(optimum.own + optimum.every, 1e-12)
    return Start(float(target.sum()), target, cost, first, (1, 12), fill)
