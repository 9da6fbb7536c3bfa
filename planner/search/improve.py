"""Improvement of a placement by moves and other cuts. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Callable

from planner.search.cuts import Cuts
from planner.search.packing import widths_of
from planner.search.placement import Part, Place, Placement

_WORK = 6_000
"""Places looked for; a rank's share of a large machine counts."""
_ENOUGH = 1e-9
"""A step must gain this share of the cost."""


def improve(placement: Placement, cuts: Cuts, out_of_time: Callable[[], bool]) -> bool:
    """Change the placement for the better, in place, until nothing helps or the work is used up.

    Each round takes the busiest rank of each phase in turn, and tries the best place of each cut of its items.

    Returns:
        Whether `out_of_time` ended it.
    """
    work = _WORK / (1 + len(placement.problem.capacity) / 256)
    gained = True
    while gained and work > 0:
        gained = False
        for phase in range(placement.load.shape[1] - 1):
            rank = int(placement.load[:, phase].argmax())
            for item in _items_on(placement, rank, phase):
                if out_of_time():
                    return True
                owner = placement.problem.item_class[item]
                work -= 1 + int(cuts.start[owner + 1] - cuts.start[owner])
                if work <= 0:
                    return False
                if _replace(placement, cuts, item):
                    gained = True
                    break
    return False


def _items_on(placement: Placement, rank: int, phase: int, most: int = 64) -> list[int]:
    """Items with something on a rank, by what they put on a rank in a phase, largest first."""
    table, loads = placement.problem.table, []
    for item, part in enumerate(placement.parts):
        if part is not None and rank // int(table.size[part.row]) in part.blocks:
            loads.append((-float(table.fixed[part.row, phase] + part.widths[0] * table.slope[part.row, phase]), item))
    return [item for seconds, item in sorted(loads)[:most] if seconds < 0]


def _replace(placement: Placement, cuts: Cuts, item: int) -> bool:
    """Put an item where it costs least, with any of its cuts; False when that is no gain."""
    before = placement.seconds()
    old = placement.remove(item)
    owner = placement.problem.item_class[item]
    found = []
    for cut in range(int(cuts.start[owner]), int(cuts.start[owner + 1])):
        row = int(cuts.row[cut])
        found.append(placement.find(item, row, widths_of(placement.problem, row, int(cuts.number[cut]))))
    best: Part | None = None
    least = before * (1 - _ENOUGH)
    places = sorted((p for p in found if isinstance(p, Place)), key=lambda p: p.score)
    for place in places[:2]:
        placement.add(item, place.part)
        seconds = placement.seconds()
        placement.remove(item)
        if seconds < least:
            best, least = place.part, seconds
    placement.add(item, best or old)
    return best is not None
