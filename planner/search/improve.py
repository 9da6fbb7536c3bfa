"""Improvement of a placement by moves, other options and swaps. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.search.packing import Place, State
from planner.search.problem import Choice

_WORK = 12_000
"""Places looked for; a rank's share of a large machine counts."""
_ENOUGH = 1e-9
"""A step must gain this share of the cost."""


def improve(state: State, out_of_time: Callable[[], bool]) -> bool:
    """Change the placement for the better, in place, until nothing helps or the work is used up.

    Each round takes the busiest rank of each phase in turn, and tries on its items, largest first: the best place of
    each of the item's options, then an exchange with an item of another rank.

    Returns:
        Whether `out_of_time` ended it.
    """
    work = _WORK / (1 + len(state.problem.capacity) / 256)
    gained = True
    while gained and work > 0:
        gained = False
        for phase in range(state.load.shape[1] - 1):
            rank = int(state.load[:, phase].argmax())
            work -= len(state.on_many_ranks) / 20
            for item in _items_on(state, rank, phase):
                if out_of_time():
                    return True
                work -= 1 + len(state.problem.items[item].options)
                if work <= 0:
                    return False
                if _replace(state, item) or _swap(state, item, rank):
                    gained = True
                    break
    return False


def _items_on(state: State, rank: int, phase: int, most: int = 64) -> list[int]:
    """Items with something on a rank, by their load there in a phase, largest first."""
    alone = np.flatnonzero(state.on_one_rank == rank)
    loads = list(zip((-state.load_there[alone, phase]).tolist(), alone.tolist(), strict=True))
    for item in sorted(state.on_many_ranks):
        choice, option = state.choices[item], state.option(item)
        assert choice is not None
        block, place = divmod(rank, option.loads.shape[1])
        if block in choice.blocks:
            loads.append((-float(option.loads[choice.blocks.index(block), place, phase]), item))
    return [item for seconds, item in sorted(loads)[:most] if seconds < 0]


def _replace(state: State, item: int) -> bool:
    """Put an item where it costs least, with any of its options; False when that is no gain."""
    before = state.score()
    old = state.remove(item)
    best: Choice | None = None
    least = before * (1 - _ENOUGH)
    found = [state.find(item, index) for index in range(len(state.problem.items[item].options))]
    places = sorted((p for p in found if isinstance(p, Place)), key=lambda p: p.score)
    for place in places[:2]:
        if place.choice == old:
            continue
        state.add(item, place.choice)
        score = state.score()
        state.remove(item)
        if score < least:
            best, least = place.choice, score
    state.add(item, best or old)
    return best is not None


def _swap(state: State, item: int, rank: int) -> bool:
    """Exchange an item on `rank` with one on another rank, both on one rank each; False when no exchange is a gain."""
    if state.on_one_rank[item] < 0 or not state.is_movable[item]:
        return False
    others = np.flatnonzero((state.on_one_rank >= 0) & (state.on_one_rank != rank) & state.is_movable)
    if not len(others):
        return False
    at, mine, theirs = state.on_one_rank[others], state.load_there[item], state.load_there[others]
    here, there = state.load[rank] - mine + theirs, state.load[at] + mine - theirs
    fits = (here[:, -1] <= state.problem.capacity[rank]) & (there[:, -1] <= state.problem.capacity[at])
    rest = _max_without(state.load[:, :-1], rank, at)
    seconds = np.maximum(rest, np.maximum(here[:, :-1], there[:, :-1])).sum(1)
    seconds = np.where(fits, seconds, np.inf)
    best = int(seconds.argmin())
    if not np.isfinite(seconds[best]):
        return False
    before, other = state.score(), int(others[best])
    mine_was, other_was = state.remove(item), state.remove(other)
    state.add(item, Choice(mine_was.option, other_was.blocks))
    state.add(other, Choice(other_was.option, mine_was.blocks))
    if state.score() < before * (1 - _ENOUGH):
        return True
    state.remove(item), state.remove(other)
    state.add(item, mine_was)
    state.add(other, other_was)
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
