"""`Placement`: where items are, what ranks carry, and where the next item costs least. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.problem import Array, Choice, Infeasible, Option, Problem

_EVEN = 1e-3
"""Weight of the load where it is put, against the step time: among ranks that cost the same, the idlest."""


class Place(NamedTuple):
    """A feasible place of an option and what it makes of the objective; the smaller the better."""

    score: float
    choice: Choice


class Placement:
    """Where the items are that have been placed.

    Attributes:
        load: (ranks, phases + 1) of everything placed.
        choices: of each item that is placed.
        on_one_rank: (items,) the rank of an item that is on a single one, else -1.
        load_there: (items, phases + 1) its load there.
        on_many_ranks: the other items that are placed.
        is_movable: (items,) whether every rank may hold an item.
        users: (kinds,) how many need each set-up.
        taken: for each spread group, (ranks,) how many members each rank holds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.load = problem.base.copy()
        self.choices: dict[int, Choice] = {}
        self.on_one_rank = np.full(len(problem.items), -1)
        self.load_there = np.zeros((len(problem.items), problem.base.shape[1]))
        self.on_many_ranks: set[int] = set()
        self.is_movable = np.array([i.allowed is None and not i.spread for i in problem.items], dtype=bool)
        self.users = np.array([int(k in problem.base_kinds) for k in range(len(problem.setups))], dtype=np.int64)
        self.taken = {group: mask.astype(np.int64) for group, mask in problem.taken.items()}
        for item in problem.items:
            for group in item.spread:
                self.taken.setdefault(group, np.zeros(len(problem.capacity), dtype=np.int64))

    def phase_seconds(self) -> Array:
        """Slowest rank of each phase, with set-ups."""
        slowest: Array = self.load[:, :-1].max(0) + self.problem.setups[self.users > 0].sum(0)
        return slowest

    def seconds(self) -> float:
        """Cost of what is placed."""
        return float(self.phase_seconds().sum())

    def score(self) -> float:
        """Cost, with a small part for how even the load is, so that a step which only evens it counts as one."""
        return self.seconds() + _EVEN * float(np.sqrt((self.load[:, :-1] ** 2).mean(0)).sum())

    def chosen(self) -> tuple[Choice, ...]:
        """Choices of all items."""
        return tuple(self.choices[item] for item in range(len(self.problem.items)))

    def option(self, item: int) -> Option:
        """The option that an item has."""
        return self.problem.items[item].options[self.choices[item].option]

    def ranks(self, item: int) -> NDArray[np.intp]:
        """Ranks that hold something of an item."""
        option = self.option(item)
        size = option.loads.shape[1]
        ranks = np.array(self.choices[item].blocks)[:, None] * size + np.arange(size)
        held: NDArray[np.intp] = ranks[option.loads[..., -1] > 0]
        return held

    def add(self, item: int, choice: Choice) -> None:
        """Put an item down."""
        self.choices[item] = choice
        self._change(item, 1)

    def remove(self, item: int) -> Choice:
        """Take an item up."""
        self._change(item, -1)
        return self.choices.pop(item)

    def _change(self, item: int, sign: int) -> None:
        choice, option = self.choices[item], self.option(item)
        size = option.loads.shape[1]
        if option.loads.shape[:2] == (1, 1):
            self.on_one_rank[item] = choice.blocks[0] if sign > 0 else -1
            self.load_there[item] = option.loads[0, 0]
        else:
            (self.on_many_ranks.add if sign > 0 else self.on_many_ranks.discard)(item)
        self.load += sign * option.everywhere
        for block, loads in zip(choice.blocks, option.loads, strict=True):
            self.load[block * size : (block + 1) * size] += sign * loads
        for kind in option.kinds:
            self.users[kind] += sign
        for group in self.problem.items[item].spread:
            self.taken[group][self.ranks(item)] += sign

    def find(self, item: int, index: int, fill: int = 0) -> Place | Infeasible:
        """The place where an item's option costs least (`fill` as in `packing.Start`), or what is short."""
        problem, what = self.problem, self.problem.items[item]
        option = what.options[index]
        num_ranks, size = len(problem.capacity), option.loads.shape[1]
        load = self.load + option.everywhere
        missing = [k for k in option.kinds if not self.users[k]]
        extra = float(problem.setups[missing].sum()) if missing else 0.0
        open_ranks = self._open_ranks(item)
        used = np.zeros(num_ranks // size, dtype=bool)
        blocks, score = [0] * len(option.loads), 0.0
        for i in _largest_first(option.loads):
            loads = option.loads[i]
            after = load.reshape(-1, size, load.shape[1]) + loads
            room = problem.capacity.reshape(-1, size) - after[..., -1]
            closed = used if open_ranks is None else used | ((loads[:, -1] > 0) & ~open_ranks.reshape(-1, size)).any(1)
            if closed.all():
                return Infeasible(item, index, None, 0, self.load)
            lack = np.where(closed, np.inf, -room.min(1))
            peak = after[..., :-1].max(1)
            sums = np.maximum(load[:, :-1].max(0), peak).sum(1) + _EVEN * peak.sum(1)
            sums = np.where(lack > 0, np.inf, fill * after[..., -1].sum(1) if fill else sums)
            block = int(sums.argmin())
            if not np.isfinite(sums[block]):
                nearest = int(lack.argmin())
                rank = nearest * size + int(room[nearest].argmin())
                return Infeasible(item, index, rank, int(np.ceil(lack[nearest])), self.load)
            blocks[i], used[block], score = block, True, float(sums[block])
            if len(blocks) > 1:
                load[block * size : (block + 1) * size] += loads
        excess = load[:, -1] - problem.capacity
        rank = int(excess.argmax())
        if excess[rank] > 0 and option.everywhere[-1] > 0:
            return Infeasible(item, index, rank, int(np.ceil(excess[rank])), self.load)
        return Place(score + extra, Choice(index, tuple(blocks)))

    def _open_ranks(self, item: int) -> NDArray[np.bool_] | None:
        what = self.problem.items[item]
        ranks = what.allowed
        for group in what.spread:
            free = self.taken[group] == 0
            ranks = free if ranks is None else ranks & free
        return ranks


def _largest_first(loads: Array) -> list[int]:
    if len(loads) == 1:
        return [0]
    order: list[int] = np.argsort(-loads[..., :-1].sum((1, 2)), kind="stable").tolist()
    return order
