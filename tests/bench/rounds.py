"""Steps of two or more sides in turns, and what is made of their times.

A round is some steps of each side. A step's time is the slowest rank's; a round gives the ratio of the quickest step of
each; the result is the median of these ratios.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

STEPS, MIN_ROUNDS, MAX_ROUNDS = 3, 7, 25
Step = Callable[[int], Callable[[], object]]
"""Makes the batch of the step with this number; what comes is timed."""


def in_turns(sides: Sequence[Step], rounds: int, steps: int = STEPS) -> tuple[list[float], ...]:
    """On each rank: seconds of every step of each side; the ranks begin each together."""
    times: tuple[list[float], ...] = tuple([] for _ in sides)
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for which in order_of(i, len(sides)):
                for number in range(i * steps, (i + 1) * steps):
                    run = sides[which](number)
                    dist.barrier()
                    start = perf_counter()
                    run()
                    times[which].append(perf_counter() - start)
    finally:
        gc.enable()
    return times


def order_of(number: int, sides: int) -> list[int]:
    """Whose turn is when in a round: each side is first as often as last. Of three or more none follows itself: whose
    tables are still in the caches from the round before is the quicker for that alone."""
    return [(number + i) % sides for i in range(sides)]


def of_all_ranks(seconds: float) -> float:
    """The largest of the ranks', so that all decide alike."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """For each measurement the largest over the ranks."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


def quickest_of_rounds(seconds: Sequence[float], steps: int = STEPS) -> list[float]:
    """The quickest step of each round: what others on the machine add is no part of it."""
    return [min(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]


def both(theirs: Sequence[float], ours: Sequence[float], unit: float) -> tuple[float, float, float]:
    """Median of each in `unit`s per second, and the median of the ratios inside each round."""
    ratio = median(t / o for t, o in zip(theirs, ours, strict=True))
    return median(theirs) * unit, median(ours) * unit, ratio


def quartiles(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Of the ratios of the rounds."""
    return middle_half([t / o for t, o in zip(theirs, ours, strict=True)])


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Their lower and upper quartile."""
    ratios = sorted(values)
    return ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
