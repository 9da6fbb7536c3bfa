"""Rivals: placements that are improved beside each other, of which the better ones go on. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.search.best import Best
from planner.search.cost_table import Array
from planner.search.cuts import Cuts
from planner.search.improve import Improver
from planner.search.packing import Menu, Packer, menus
from planner.search.placement import PUT, Part
from planner.search.potential import Potential
from planner.search.problem import Problem

_ROUNDS = ((6, 0.03), (3, 0.05), (2, 0.08))
"""How many are improved in a round, each with this share of the work; the best of all has the rest."""
_OF_MANY = ((2, 0.15),)
"""The same where items are more than so many, of which steps take long."""
_MANY = 650
_POWERS = ((16, 0.5), (64, 0.8), (256, 1.0))
"""Of the potential, and the share of the work that is done then."""
_MENU = 12
"""Cuts of an item that is put down anew."""
SHAKEN = 150
"""Items up to which placements are shaken: of more, steps gain as long as there is time;"""
_PATIENCE = 60
"""steps in vain after which the best placement is."""
_SHAKES = 4
"""In vain, or one for each item, after which the potential's power rises."""
_CUT = 0.3
"""Work of a cut that is compared with others."""


def compete(problem: Problem, cuts: Cuts, best: Best, work: float, out_of_time: Callable[[], bool]) -> bool:
    """Better the best placement and its rivals until the work is used up; whether the time was up before."""
    known: dict[int, list[Menu]] = {}
    target = best.placement().phase_seconds()
    left, rounds = work, _ROUNDS if len(problem.item_class) <= _MANY else _OF_MANY

    def run_of(parts: list[Part | None], memory: float) -> _Run:
        nonlocal left
        used = int(np.bitwise_or.reduce(problem.table.kinds[[part.row for part in parts if part is not None]]))
        if used not in known:
            known[used] = _menus(problem, cuts, target, used)
            left -= _CUT * len(cuts.row)
        left -= PUT * sum(len(part.blocks) for part in parts if part is not None)
        return _Run(problem, known[used], best, parts, memory)

    runs: list[_Run] = []
    if len(best.rivals) > 1 and not best.is_enough:
        runs = [run_of(rival.parts, rival.memory) for rival in best.rivals[: rounds[0][0]]]
    for most, share in rounds if runs else ():
        runs = sorted(runs[:most], key=lambda run: run.best.seconds)
        for run in runs:
            left -= share * work
            if run.go(share * work, out_of_time):
                return True
        runs = sorted(runs, key=lambda run: run.best.seconds)
    last = runs[0] if runs and runs[0].best.seconds <= best.seconds else run_of(best.parts or [], best.memory)
    return last.go(left, out_of_time)


class _Run:
    """A placement that is improved, now and again.

    Args:
        menus: of every class.
        of_all: told of what is better than all others.
    """

    def __init__(
        self, problem: Problem, menus: list[Menu], of_all: Best, parts: list[Part | None], memory: float
    ) -> None:
        self.of_all = of_all
        self.best = Best(problem)
        self.best.floor, self.best.parts, self.best.memory = of_all.floor, parts, memory
        self.placement = self.best.placement()
        self.best.seconds = self.placement.seconds()
        self.potential = Potential(self.placement, self.placement.phase_seconds(), memory)
        self.packer = Packer(self.potential, menus)
        self.random = np.random.default_rng(0)

    def go(self, work: float, out_of_time: Callable[[], bool]) -> bool:
        """Improve it until so much more work is done; returns whether the time was up before."""
        best, potential, number = self.best, self.potential, len(self.placement.parts)
        patience, enough = _PATIENCE if number <= SHAKEN else np.inf, max(_SHAKES, number)
        self.placement.become(best.parts or [])
        begin = potential.work
        for power, share in _POWERS:
            potential.aim(power)
            improver = Improver(self.packer)
            step = vain = shaken = 0
            while potential.work - begin < share * work and not best.is_enough and shaken <= enough:
                if out_of_time():
                    return True
                before, seconds = improver.value, best.seconds
                improver.step(step, self.random)
                if improver.value < before:
                    best.offer(self.placement, best.memory)
                step, vain = step + 1, vain + 1
                if best.seconds < seconds:
                    vain = shaken = 0
                    self.of_all.offer(self.placement, best.memory)
                if is_stuck := vain > patience:
                    improver.shake(best.parts or [], self.random)
                    vain, shaken = 0, shaken + 1
                if is_stuck or step % 64 == 0:
                    potential.aim(power)
                    improver.value = potential.weigh()
        return False


def _menus(problem: Problem, cuts: Cuts, target: Array, used: int) -> list[Menu]:
    """Of every class, the cuts that cost least beside phases of these seconds, with these set-ups."""
    own = cuts.piece[:, :-1] + problem.table.everywhere[cuts.row, :-1]
    cost = cuts.mean[:, :-1].sum(1) + 3 * np.maximum(0, own - target).sum(1)
    cost[problem.table.kinds[cuts.row] & ~used != 0] = np.inf
    return menus(problem, cuts, cost, _MENU)
