"""`Best`: the best placement of all items so far, and its rivals. Pure, as `planner.search`.

[Note: rivals]
What a start is worth shows only when it has been improved: of two, the one that is packed better ends worse about as
often as not. So the best are kept of starts that differ in what items take, to be improved beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Integers
from planner.search.placement import Part, Placement
from planner.search.problem import Problem

ENOUGH = 1e-4
"""Share of the cost for which no work is done."""
_ALIKE = 0.9
"""Share of the items that take the same in two placements of which only the better is kept,"""
_FAR = 1.1
"""and by how much one may cost more than the best."""
_KEPT = 12

Told = Callable[[float, float], object]


class Rival(NamedTuple):
    """A placement of all items.

    Args:
        seconds: that it costs.
        parts: of each item.
        memory: weight of memory that it was made with.
        rows: (items,) of the table.
    """

    seconds: float
    parts: list[Part | None]
    memory: float
    rows: Integers


class Best:
    """The best placement of all items so far.

    Attributes:
        floor: seconds that are as good as the least there can be.
        least: seconds that no placement goes below, as far as is known.
        rivals: see [Note: rivals].
    """

    def __init__(self, problem: Problem, told: Told = lambda *_: None) -> None:
        self.problem = problem
        self.told = told
        self.seconds = np.inf
        self.parts: list[Part | None] | None = None
        self.memory = 0.0
        self.floor = 0.0
        self.least = 0.0
        self.rivals: list[Rival] = []

    @property
    def is_enough(self) -> bool:
        """Whether nothing much better can be."""
        return self.seconds <= self.floor * (1 + ENOUGH)

    def offer(self, placement: Placement, memory: float) -> None:
        """Take a placement, if it is better and fits."""
        seconds = placement.seconds()
        if seconds < self.seconds * (1 - 1e-12) and placement.fits():
            self.seconds, self.parts, self.memory = seconds, list(placement.parts), memory
            self.told(seconds, self.least)

    def rival(self, placement: Placement, memory: float) -> None:
        """Take a placement of a start, and keep it beside the best if it differs from the others."""
        self.offer(placement, memory)
        seconds = placement.seconds()
        if seconds > _FAR * self.seconds or not placement.fits():
            return
        rows = np.array([part.row for part in placement.parts if part is not None])
        for other in self.rivals:
            if np.count_nonzero(other.rows == rows) >= _ALIKE * len(rows):
                if other.seconds <= seconds:
                    return
                self.rivals.remove(other)
                break
        self.rivals.append(Rival(seconds, list(placement.parts), memory, rows))
        self.rivals = sorted(self.rivals, key=lambda r: r.seconds)[:_KEPT]

    def placement(self) -> Placement:
        """Made anew, so that nothing is left of what was taken up."""
        return Placement.of(self.problem, self.parts or [])
