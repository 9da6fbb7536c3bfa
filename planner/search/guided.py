"""Starts like the relaxed optimum that the bound is of. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.search.bound import Optimum
from planner.search.cuts import Cuts
from planner.search.potential import ranks_together
from planner.search.problem import Problem
from planner.search.rounded import rounded
from planner.search.starts import Start, first_of

_BEYOND = 3.0
"""What a second costs by which a piece takes longer than its phase in the optimum."""
_EDGE = 1e-3
LIKE = ((1.0, 0.0), (1.5, 0.6), (2.0, 0.3), (1.2, 1.0), (1.0, 0.3))
"""By how much pieces may be larger than the optimum's phases, and the least price of a phase: ways to be like it."""
_WAYS = ((1, False), (2, True), None, (3, False), (0, True), (2, False), (0, False), (1, True), (4, False))
"""By number, and whether with cuts of the rows that the optimum uses alone; None: its own shares. The first are those
that make good plans of many items, where time is for few."""
_SMALL, _MIDDLE, _LARGE = (0.0, 0.5), (0.125, 0.5), (0.5, 1.0)
"""Parts of a host that blocks in it take: more than the first, at most the second."""
_OF_SIZES = ((1, _MIDDLE), (3, _SMALL), (2, _MIDDLE), (0, _SMALL), (4, _MIDDLE), (0, _LARGE))
"""Ways by number, and the only blocks: the best cuts of all items together are mostly such of a few sizes."""

Like = tuple[float, float]


def guided(problem: Problem, cuts: Cuts, optimum: Optimum, like: Like = LIKE[0]) -> Start | None:
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
    is_whole = (table.filled[cuts.row] >= len(problem.capacity))[:, None]
    price = np.where(is_whole, 1.0, np.clip(optimum.price, least_price, 1.0))
    room = max(float((problem.capacity - problem.base[:, -1]).mean()), 1e-30)
    beyond = np.where(is_whole, 0.0, cuts.piece[:, :phases] - longer * optimum.own * (1 + _EDGE))
    cost = every.sum(1) + (mean * price).sum(1) + optimum.memory * cuts.mean[:, -1] / room
    cost = cost + _BEYOND * np.maximum(beyond, 0).sum(1)
    cost = np.where(table.kinds[cuts.row] & ~optimum.allowed, np.inf, cost)
    if not np.isfinite(np.minimum.reduceat(cost, cuts.start[:-1])).all():
        return None
    first = first_of(cuts, cost)
    counts = np.bincount(problem.item_class, minlength=len(cuts.start) - 1)
    fill = float((cuts.mean[first, -1] * counts).sum()) / room
    target = np.maximum(optimum.own + optimum.every, 1e-12)
    return Start(float(target.sum()), target, cost, first, (1, 12), fill)


def ways(problem: Problem, cuts: Cuts, optimum: Optimum) -> Iterator[tuple[Cuts, Start]]:
    """Starts like the optimum in several ways, each with its cuts."""
    its_own = cuts.of_rows(optimum.used())
    for way in _WAYS:
        if way is None:
            yield rounded(problem, optimum)
            continue
        like, of = LIKE[way[0]], its_own if way[1] else cuts
        start = guided(problem, of, optimum, like)
        if start is not None:
            yield of, start
    for number, sizes in _OF_SIZES:
        start = guided(problem, cuts, optimum, LIKE[number])
        if start is not None:
            yield cuts, _of_sizes(problem, cuts, start, sizes)


def _of_sizes(problem: Problem, cuts: Cuts, start: Start, sizes: tuple[float, float]) -> Start:
    """The start without smaller or larger blocks inside a host, of the classes that have others."""
    part = problem.table.size[cuts.row] / ranks_together(problem)
    cost = np.where((part > 1) | ((part > sizes[0]) & (part <= sizes[1])), start.cost, np.inf)
    has_some = np.isfinite(np.minimum.reduceat(cost, cuts.start[:-1]))[cuts.owner]
    cost = np.where(has_some, cost, start.cost)
    return start._replace(cost=cost, first=first_of(cuts, cost))
