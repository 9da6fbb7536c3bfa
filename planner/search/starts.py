"""Starts: which cut each item should get, before it is known where. Pure, as `planner.search`.

Were all ranks equally loaded, the best cut of an item would be the one of least work, and a phase would take the mean
over ranks. But it takes no less than the largest piece in it, and the larger the pieces the less evenly they lie. So a
start allows only cuts whose pieces stay below a threshold; there is one for each of some thresholds, and for each set
of set-ups that may be used. Blocks of many hosts lie less evenly, too: what has least work there may make a worse plan
than what has more on blocks inside a host, so that there are starts with and without them where hosts are many.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts
from planner.search.placement import SLACK
from planner.search.potential import ranks_together
from planner.search.problem import Problem
from planner.search.problem import Ranks as Flags

_THRESHOLDS = 14
_UNEVEN = 1.15
"""Phases of many small pieces are expected to take this many times the mean."""
_LOSS = 0.1
"""Share of the largest pieces that is lost because they do not fill ranks evenly."""
_HARDLY = 1e-2
"""Share of the least step below which a set-up is paid without asking."""
_FREE = 0.98
"""Share of the memory that starts count with."""
_OVER = 0.02
"""And may be over that."""
_LARGE = 0.3
"""Where the largest pieces take this share of the mean, an item gets more than one cut to choose from."""


class Start(NamedTuple):
    """A way to begin.

    Args:
        estimate: seconds of a placement, at least.
        target: (phases,) seconds that a good placement may have.
        cost: (cuts,) by which they are compared; infinity for those not to be used.
        first: (classes,) cut of least cost.
        most: cuts of each item to look at, the better number first.
        fill: share of the memory that the first cuts take, or of a rank's that the largest piece of one takes.
    """

    estimate: float
    target: Array
    cost: Array
    first: Integers
    most: tuple[int, int]
    fill: float


def starts(problem: Problem, cuts: Cuts, *, in_turn: bool = False, free: float = _FREE) -> list[Start]:
    """Starts without repeats, the most promising first; memory has such a price that their cuts fit together.

    Args:
        in_turn: the most promising of all cuts comes first, then the most promising of those inside hosts, and so on.
        free: share of the memory that they fit into.
    """
    found = _starts(problem, cuts, np.ones(len(cuts.row), dtype=np.bool_), free)
    inside = inside_hosts(problem, cuts)
    if inside.all() or not in_turn:
        return found
    known = {start.first.tobytes() for start in found}
    others = _starts(problem, cuts, inside, free)
    others = [start for start in others if start.first.tobytes() not in known]
    pairs = [start for pair in zip(found, others, strict=False) for start in pair]
    return pairs + found[len(others) :] + others[len(found) :]


def inside_hosts(problem: Problem, cuts: Cuts) -> Flags:
    """(cuts,) whether blocks are inside a host, or all ranks."""
    size = problem.table.size[cuts.row]
    return np.asarray((size <= ranks_together(problem)) | (size >= len(problem.capacity)), dtype=np.bool_)


def least_fill(problem: Problem, cuts: Cuts) -> float:
    """Share of the memory that the cuts which need least of it take, were they spread evenly."""
    room = max(float((problem.capacity - problem.base[:, -1]).mean()), 1e-30)
    return float(_least(cuts, cuts.mean[:, -1])[problem.item_class].sum()) / room


def _starts(problem: Problem, cuts: Cuts, may: Flags, free: float) -> list[Start]:
    """The most promising first.

    Args:
        may: (cuts,) those to choose from.
        free: see `starts`.
    """
    own = cuts.piece[:, :-1] + problem.table.everywhere[cuts.row, :-1]
    most, spent = own.sum(1), cuts.mean[:, :-1].sum(1)
    largest = max(float((problem.capacity - problem.base[:, -1]).max()), 1e-30) * (1 + SLACK)
    fits = cuts.piece[:, -1] + problem.table.everywhere[cuts.row, -1] <= largest
    counts = np.bincount(problem.item_class, minlength=len(cuts.start) - 1).astype(np.float64)
    base = problem.base[:, :-1].mean(0)
    room = max(float((problem.capacity - problem.base[:, -1]).mean()), 1e-30)
    found: dict[bytes, Start] = {}
    for used in setup_sets(problem, cuts):
        paid = float(problem.setups[[k for k in range(len(problem.setups)) if used >> k & 1]].sum())
        is_open = fits & may & (problem.table.kinds[cuts.row] & ~used == 0)
        if not np.isfinite(_least(cuts, np.where(is_open, 0.0, np.inf))).all():
            continue
        begin = float(_least(cuts, np.where(is_open, most, np.inf)).max())
        price = _price(cuts, np.where(is_open, spent, np.inf), counts, free * room)
        end = max(float(most[is_open].max()), begin)
        for threshold in np.unique(np.geomspace(begin, end, _THRESHOLDS) if 0 < begin < end else [begin]):
            below = np.where(most <= threshold * (1 + 1e-9), spent, 1e3 * most)
            cost = np.where(is_open, below + price * cuts.mean[:, -1], np.inf)
            first = first_of(cuts, cost)
            if (
                float((cuts.mean[first, -1] * counts).sum()) > min(1.0, free + 0.02) * room
            ):  # those below need another price
                dearer = _price(cuts, np.where(is_open, below, np.inf), counts, free * room)
                cost = np.where(is_open, below + dearer * cuts.mean[:, -1], np.inf)
                first = first_of(cuts, cost)
            if first.tobytes() in found:
                continue
            mean = (cuts.mean[first, :-1] * counts[:, None]).sum(0) + base
            peak = own[first].max(0)
            estimate = float(np.maximum(mean, peak).sum() + _LOSS * peak.sum()) + paid
            choice = (3, 1) if float(peak.sum()) > _LARGE * float(mean.sum()) else (1, 3)
            cost = np.where(cost <= 1e3 * float(cost[first].max() + threshold), cost, np.inf)
            target = np.maximum(_UNEVEN * mean, peak)
            fill = max(
                float((cuts.mean[first, -1] * counts).sum()) / room, float(cuts.piece[first, -1].max()) / largest
            )
            found[first.tobytes()] = Start(estimate, target, cost, first, choice, fill)
    return sorted(found.values(), key=lambda start: start.estimate)


def floor(problem: Problem, cuts: Cuts) -> float:
    """Seconds that no placement of even cuts goes below: those of the cuts of least work, were ranks equally loaded."""
    spent = cuts.mean[:, :-1].sum(1)
    found = []
    for used in setup_sets(problem, cuts):
        paid = float(problem.setups[[k for k in range(len(problem.setups)) if used >> k & 1]].sum())
        is_open = problem.table.kinds[cuts.row] & ~used == 0
        found.append(paid + float(_least(cuts, np.where(is_open, spent, np.inf))[problem.item_class].sum()))
    return float(problem.base[:, :-1].mean(0).sum()) + min(found, default=0.0)


def everywhere_bytes(problem: Problem, cuts: Cuts, first: Integers) -> Array:
    """(classes,) bytes of cuts that every rank gets wherever they go: those put down before leave room for them."""
    row = cuts.row[first]
    whole = np.where(problem.table.filled[row] == len(problem.capacity), cuts.piece[first, -1], 0.0)
    found: Array = problem.table.everywhere[row, -1] + whole
    return found


def with_rest(cuts: Cuts, cost: Array) -> Array:
    """The same costs, with those of cuts that are not to be used after all others, by their seconds."""
    is_used = np.isfinite(cost)
    return np.where(is_used, cost, float(cost[is_used].max(initial=0.0)) + cuts.piece[:, :-1].sum(1))


def setup_sets(problem: Problem, cuts: Cuts) -> list[int]:
    """Sets of set-ups, a bit each, with which every class has a cut; what is paid, or hardly costs, is in all."""
    least = _least(cuts, cuts.mean[:, :-1].sum(1))[problem.item_class].sum() + problem.base[:, :-1].mean(0).sum()
    hardly = problem.setups.sum(1) <= _HARDLY * float(least)
    paid = sum(1 << kind for kind in range(len(problem.setups)) if hardly[kind] or kind in problem.base_kinds)
    others = [kind for kind in range(len(problem.setups)) if not paid >> kind & 1]
    found = []
    for number in range(len(others) + 1):
        for chosen in combinations(others, number):
            used = paid | sum(1 << kind for kind in chosen)
            is_open = problem.table.kinds[cuts.row] & ~used == 0
            needed = int(np.bitwise_or.reduce(problem.table.kinds[cuts.row[is_open]], initial=paid))
            if needed == used and np.isfinite(_least(cuts, np.where(is_open, 0.0, np.inf))).all():
                found.append(used)
    return found[-8:]


def _least(cuts: Cuts, cost: Array) -> Array:
    least: Array = np.minimum.reduceat(cost, cuts.start[:-1])
    return least


def first_of(cuts: Cuts, cost: Array) -> Integers:
    """(classes,) the first of the cheapest cuts."""
    at = np.flatnonzero(cost == _least(cuts, cost)[cuts.owner])
    _, first = np.unique(cuts.owner[at], return_index=True)
    return at[first]


def _price(cuts: Cuts, cost: Array, counts: Array, room: float) -> float:
    """Seconds of a byte on every rank with which the cheapest cuts just fit together into `room`; the last one tried if
    none do."""
    size = cuts.mean[:, -1]
    low, high = 0.0, float(_least(cuts, cost).sum() + 1e-30) / max(room, 1.0)
    if float((size[first_of(cuts, cost)] * counts).sum()) <= room:
        return 0.0
    for _ in range(40):
        if float((size[first_of(cuts, cost + high * size)] * counts).sum()) <= room:
            break
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        fits = float((size[first_of(cuts, cost + middle * size)] * counts).sum()) <= room
        low, high = (low, middle) if fits else (middle, high)
    return high
