"""Packing: the largest-first rule that makes a placement, and what it starts with. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts
from planner.search.placement import Place, Placement, even
from planner.search.problem import Infeasible, Problem

_PACKINGS = 12_000
"""Items placed over all starts, so that many items get fewer starts."""


@dataclass(frozen=True, eq=False)
class Start:
    """What a packing begins with.

    Args:
        cost: (cuts,) by which an item prefers one to another.
        order: (items,) in which they are placed.
        fill: 0 places where it costs least; 1 on the emptiest rank, -1 on the fullest that has room.
    """

    cost: Array
    order: Integers
    fill: int = 0


def starts(problem: Problem, cuts: Cuts) -> Iterator[Start]:
    """Starts in a fixed order, without repeats; the last ones, with `fill`, think of memory only."""
    num_items = len(problem.item_class)
    if not num_items:
        return
    spent, most = cuts.mean[:, :-1].sum(1), (cuts.piece[:, :-1] + problem.table.everywhere[cuts.row, :-1]).sum(1)
    size, peak = cuts.mean[:, -1], cuts.piece[:, -1] + problem.table.everywhere[cuts.row, -1]
    count = int(np.clip(_PACKINGS // num_items / (1 + len(problem.capacity) / 64), 3, 24))
    low = float(np.minimum.reduceat(most, cuts.start[:-1]).max())
    high = float(most.max())
    # Price 1 makes an item's share of the free memory as dear as an item's time.
    typical = float(np.median(np.minimum.reduceat(spent, cuts.start[:-1])))
    free = max(float((problem.capacity - problem.base[:, -1]).mean()) / num_items, 1.0)
    seen = set()
    for price in (0.0, 1.0):
        for threshold in [np.inf, *(np.geomspace(low, high, count) if 0 < low < high else [low])]:
            cost = np.where(most <= threshold * (1 + 1e-9), spent, 1e3 * most) + price * size * typical / free
            first = _first(cuts, cost)
            if first.tobytes() not in seen:
                seen.add(first.tobytes())
                yield Start(cost, _order(problem, cuts, first))
    for kind in range(len(problem.setups)):
        without = (problem.table.kinds[cuts.row] >> kind) & 1 == 0
        if without.any() and not without.all():
            cost = np.where(without, spent, 1e3 + spent)
            yield Start(cost, _order(problem, cuts, _first(cuts, cost)))
    for fill in (1, -1):
        for num_bytes in (size, peak):
            least = np.minimum.reduceat(peak, cuts.start[:-1])[problem.item_class]
            yield Start(num_bytes, np.argsort(-least, kind="stable"), fill)


def pack(problem: Problem, cuts: Cuts, start: Start) -> Placement:
    """Place every item, in the start's order, its preferred cut first, where it costs least.

    Raises:
        Infeasible: an item no option of which fits what is left.
    """
    placement = Placement(problem)
    for item in start.order.tolist():
        owner = problem.item_class[item]
        low, high = cuts.start[owner], cuts.start[owner + 1]
        found: list[Infeasible] = []
        for cut in (low + np.argsort(start.cost[low:high], kind="stable")).tolist():
            row = int(cuts.row[cut])
            place = placement.find(item, row, widths_of(problem, row, int(cuts.number[cut])), start.fill)
            if isinstance(place, Place):
                placement.add(item, place.part)
                break
            found.append(place)
        else:
            raise min(found, key=attrgetter("distance"))
    return placement


def widths_of(problem: Problem, row: int, count: int) -> tuple[int, ...]:
    """Widths of a family's pieces when it is cut evenly."""
    units = int(problem.table.units[row])
    return even(units, count) if units else (0,) * count


def _first(cuts: Cuts, cost: Array) -> Integers:
    """(classes,) the first of the cheapest cuts."""
    least = np.minimum.reduceat(cost, cuts.start[:-1])
    at = np.flatnonzero(cost == least[cuts.owner])
    _, first = np.unique(cuts.owner[at], return_index=True)
    return at[first]


def _order(problem: Problem, cuts: Cuts, first: Integers) -> Integers:
    """Items by the largest of their share of the time and of the memory, on one rank."""
    time, size = cuts.piece[first, :-1].sum(1), cuts.piece[first, -1]
    total = max(float(cuts.mean[first, :-1].sum()), 1e-30)
    share = np.maximum(time / total, size / max(float(problem.capacity.max()), 1.0))
    return np.argsort(-share[problem.item_class], kind="stable")
