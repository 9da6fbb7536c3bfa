"""Packing: the largest-first rule that makes a placement, and what it starts with. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from planner.search.option_costs import NEVER, OptionCosts
from planner.search.placement import Place, Placement
from planner.search.problem import Infeasible, Problem

_PACKINGS = 12_000
"""Items placed over all starts, so that many items get fewer starts."""


@dataclass(frozen=True, eq=False)
class Start:
    """What a packing begins with.

    Args:
        preference: (items, options) of each item, in the order to try.
        order: (items,) in which they are placed.
        fill: 0 places where it costs least; 1 on the emptiest rank, -1 on the fullest that has room.
    """

    preference: NDArray[np.intp]
    order: NDArray[np.intp]
    fill: int = 0


def starts(problem: Problem) -> Iterator[Start]:
    """Starts in a fixed order, without repeats; the last ones, with `fill`, think of memory only."""
    if not problem.items:
        yield Start(np.zeros((0, 0), dtype=np.intp), np.zeros(0, dtype=np.intp))
        return
    costs = OptionCosts.of(problem)
    count = int(np.clip(_PACKINGS // len(problem.items), 4, 24))
    free_bytes = float((problem.capacity - problem.base[:, -1]).sum())
    low, high = float(costs.most.min(1).max()), float(costs.most[costs.most < NEVER].max())
    # Price 1 makes an item's share of the free memory as dear as an item's time.
    typical_seconds, typical_bytes = float(np.median(costs.mean.min(1))), max(free_bytes / len(problem.items), 1.0)
    seen = set()
    thresholds = [np.inf, *(np.geomspace(low, high, count) if 0 < low < high else [low])]
    for price in (0.0, 1.0):
        for threshold in thresholds:
            cost = np.where(costs.most <= threshold * (1 + 1e-9), costs.mean, 1e3 * costs.most)
            cost = cost + price * costs.size * typical_seconds / typical_bytes
            preference = cost.argsort(1, kind="stable")
            if preference[:, 0].tobytes() in seen:
                continue
            seen.add(preference[:, 0].tobytes())
            yield Start(preference, _order(problem, costs, preference[:, 0]))
    for kind in range(len(problem.setups)):
        without = costs.without(problem, frozenset([kind])).mean < NEVER
        if without.any() and not without.all():
            preference = np.where(without, costs.mean, 1e3 + costs.mean).argsort(1, kind="stable")
            yield Start(preference, _order(problem, costs, preference[:, 0]))
    for fill in (1, -1):
        for num_bytes in (costs.size, costs.peak):
            preference = num_bytes.argsort(1, kind="stable")
            yield Start(preference, np.argsort(-costs.peak.min(1), kind="stable"), fill)


def pack(problem: Problem, start: Start) -> Placement:
    """Place every item, in the start's order, its preferred option first, where it costs least.

    Raises:
        Infeasible: an item no option of which fits what is left.
    """
    placement = Placement(problem)
    for item in start.order.tolist():
        found: list[Infeasible] = []
        for index in start.preference[item, : len(problem.items[item].options)].tolist():
            place = placement.find(item, index, start.fill)
            if isinstance(place, Place):
                placement.add(item, place.choice)
                break
            found.append(place)
        else:
            raise min(found, key=attrgetter("distance"))
    return placement


def _order(problem: Problem, costs: OptionCosts, first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Items by the largest of their share of the time and of the memory, on one rank."""
    rows = np.arange(len(first))
    time, size = costs.most[rows, first], costs.peak[rows, first]
    total = max(float(costs.mean[rows, first].sum()), 1e-30)
    return np.argsort(-np.maximum(time / total, size / max(float(problem.capacity.max()), 1.0)), kind="stable")
