"""Improvement of a placement by moves, other options and swaps. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.search.placement import Place, Placement
from planner.search.problem import Choice

_WORK = 12_000
"""Places looked for; a rank's share of a large machine counts."""
_ENOUGH = 1e-9
"""A step must gain this share of the cost."""


def improve(placement: Placement, out_of_time: Callable[[], bool]) -> bool:
    """Change the placement for the better, in place, until nothing helps or the work is used up.

    Each round takes the busiest rank of each phase in turn, and tries on its items, largest first: the best place of
    each of the item's options, then an exchange with an item of another rank.

    Returns:
        Whether `out_of_time` ended it.
    """
    work = _WORK / (1 + len(placement.problem.capacity) / 256)
    gained = True
    while gained and work > 0:
        gained = False
        for phase in range(placement.load.shape[1] - 1):
            rank = int(placement.load[:, phase].argmax())
            work -= len(placement.on_many_ranks) / 20
            for item in _items_on(placement, rank, phase):
                if out_of_time():
                    return True
                work -= 1 + len(placement.problem.items[item].options)
                if work <= 0:
                    return False
                if _replace(placement, item) or _swap(placement, item, rank):
                    gained = True
                    break
    return False


def _items_on(placement: Placement, rank: int, phase: int, most: int = 64) -> list[int]:
    """Items with something on a rank, by their load there in a phase, largest first."""
    alone = np.flatnonzero(placement.on_one_rank == rank)
    loads = list(zip((-placement.load_there[alone, phase]).tolist(), alone.tolist(), strict=True))
    for item in sorted(placement.on_many_ranks):
        blocks, option = placement.choices[item].blocks, placement.option(item)
        block, place = divmod(rank, option.loads.shape[1])
        if block in blocks:
            loads.append((-float(option.loads[blocks.index(block), place, phase]), item))
    return [item for seconds, item in sorted(loads)[:most] if seconds < 0]


def _replace(placement: Placement, item: int) -> bool:
    """Put an item where it costs least, with any of its options; False when that is no gain."""
    before = placement.score()
    old = placement.remove(item)
    best: Choice | None = None
    least = before * (1 - _ENOUGH)
    found = [placement.find(item, index) for index in range(len(placement.problem.items[item].options))]
    places = sorted((p for p in found if isinstance(p, Place)), key=lambda p: p.score)
    for place in places[:2]:
        if place.choice == old:
            continue
        placement.add(item, place.choice)
        score = placement.score()
        placement.remove(item)
        if score < least:
            best, least = place.choice, score
    placement.add(item, best or old)
    return best is not None


def _swap(placement: Placement, item: int, rank: int) -> bool:
    """Exchange an item on `rank` with one on another rank, both on one rank each; False when no exchange is a gain."""
    if placement.on_one_rank[item] < 0 or not placement.is_movable[item]:
        return False
    others = np.flatnonzero((placement.on_one_rank >= 0) & (placement.on_one_rank != rank) & placement.is_movable)
    if not len(others):
        return False
    at, mine, theirs = placement.on_one_rank[others], placement.load_there[item], placement.load_there[others]
    here, there = placement.load[rank] - mine + theirs, placement.load[at] + mine - theirs
    fits = (here[:, -1] <= placement.problem.capacity[rank]) & (there[:, -1] <= placement.problem.capacity[at])
    rest = _max_without(placement.load[:, :-1], rank, at)
    seconds = np.maximum(rest, np.maximum(here[:, :-1], there[:, :-1])).sum(1)
    seconds = np.where(fits, seconds, np.inf)
    best = int(seconds.argmin())
    if not np.isfinite(seconds[best]):
        return False
    before, other = placement.score(), int(others[best])
    mine_was, other_was = placement.remove(item), placement.remove(other)
    placement.add(item, Choice(mine_was.option, other_was.blocks))
    placement.add(other, Choice(other_was.option, mine_was.blocks))
    if placement.score() < before * (1 - _ENOUGH):
        return True
    placement.remove(item), placement.remove(other)
    placement.add(item, mine_was)
    placement.add(other, other_was)
    return False


def _max_without(load: NDArray[np.float64], rank: int, others: NDArray[np.intp]) -> NDArray[np.float64]:
    """(others, phases) largest load by phase over the ranks that are neither `rank` nor that entry of `others`."""
    if len(load) == 2:
        return np.zeros((len(others), load.shape[1]))
    kept = load.copy()
    kept[rank] = 0
    order = np.argsort(-kept, axis=0, kind="stable")
    phases = np.arange(load.shape[1])
    first, second = kept[order[0], phases], kept[order[1], phases]
    rest: NDArray[np.float64] = np.where(others[:, None] == order[0][None], second, first)
    return rest
