"""Whether ours keeps up with a reference, where what is to be shown is less than what a step varies by.

The reference runs twice, as two models of its own: what it differs by from its copy is what ours may differ by without
meaning anything. A round is one step of each, in an order that is drawn anew, for whose step it was before is felt in
the caches. A round's ratio is the mean of the two reference steps by ours. Rounds go on until their median is known
well enough, by its 99 % interval (order statistics, which take no view of how times are spread), or time is up:

- OK: the whole interval reaches the goal.
- MISSED: none of it does.
- UNDECIDED: the goal lies in it; or the interval of the reference beside its copy reaches as far from 1 as the goal
  does, for who finds such a difference between two that are the same cannot tell it from ours (MISSED is then what is
  below the goal by as much again).

It is looked at after every `BLOCK` rounds, hence 99 % and not 95.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

BLOCK, DEVIATIONS = 50, 2.576
OK, MISSED, UNDECIDED = "OK", "MISSED", "UNDECIDED"


class Beside(NamedTuple):
    """Seconds of every step of the slowest rank, round by round."""

    reference: list[float]
    copy: list[float]
    ours: list[float]

    def of_itself(self) -> list[float]:
        """For each round, the reference's step by its copy's."""
        return [a / b for a, b in zip(self.reference, self.copy, strict=True)]

    def of_ours(self) -> list[float]:
        """For each round, the mean of the reference's two steps by ours."""
        return [(a + b) / 2 / c for a, b, c in zip(*self, strict=True)]

    def verdict(self, goal: float) -> str:
        """OK, MISSED or UNDECIDED, against a ratio below 1."""
        (least, most), (low, high) = interval(self.of_itself()), interval(self.of_ours())
        tells = least >= goal and most <= 1 / goal
        if low >= goal and tells:
            return OK
        return MISSED if high < (goal if tells else goal * least) else UNDECIDED


def interval(values: Sequence[float]) -> tuple[float, float]:
    """In which their median is, with 99 %."""
    ordered, half = sorted(values), DEVIATIONS * len(values) ** 0.5 / 2
    middle = (len(ordered) - 1) / 2
    return ordered[max(int(middle - half), 0)], ordered[min(-int(-(middle + half) // 1), len(ordered) - 1)]


def told_apart(
    reference: Callable[[], Any], copy: Callable[[], Any], ours: Callable[[], Any], goal: float, seconds: float
) -> Beside:
    """On every rank the same: steps of the three until it is known whether ours reaches the goal, or for so long."""
    sides, draw, known = (reference, copy, ours), random.Random(0), Beside([], [], [])
    gc.collect()
    gc.disable()
    try:
        began = perf_counter()
        is_known = False
        while not is_known:
            mine = torch.zeros(BLOCK + 1, len(sides), dtype=torch.float64)
            for i in range(BLOCK):
                for which in draw.sample(range(len(sides)), len(sides)):
                    dist.barrier()
                    start = perf_counter()
                    sides[which]()
                    mine[i, which] = perf_counter() - start
            mine[BLOCK] = perf_counter() - began
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            for times, column in zip(known, mine[:BLOCK].T.tolist(), strict=True):
                times += column
            is_known = known.verdict(goal) != UNDECIDED or float(mine[BLOCK, 0]) > seconds
    finally:
        gc.enable()
    return known


def figures_of(beside: Beside, unit: float) -> tuple[float, float, float]:
    """Median steps of the reference and of ours in `unit`s per second, and the median ratio."""
    return median(beside.reference + beside.copy) * unit, median(beside.ours) * unit, median(beside.of_ours())
