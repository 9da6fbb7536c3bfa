"""What `make bench` says of a pipeline beside a plain loop: as good as sure, or undecided."""

from __future__ import annotations

import random

import pytest

from tests.bench.against_itself import BLOCK, MISSED, OK, UNDECIDED, Beside, interval, told_apart
from tests.bench.report import Result
from tests.ranks import run_ranks

GOAL = 0.97


def drawn(rounds: int, noise: float, copy: float = 1.0, ours: float = 1.0) -> Beside:
    """Steps that vary by so much, of which the copy's and ours take so many times longer."""
    draw = random.Random(rounds)
    times = ([factor * draw.lognormvariate(0, noise) for _ in range(rounds)] for factor in (1.0, copy, ours))
    return Beside(*times)


@pytest.mark.parametrize(
    ("beside", "verdict"),
    [
        (drawn(100, 0.01), OK),
        (drawn(100, 0.01, ours=1.01), OK),
        (drawn(100, 0.01, ours=1.05), MISSED),
        (drawn(100, 0.2), UNDECIDED),
        (drawn(100, 0.2, ours=1.05), UNDECIDED),
        (drawn(4000, 0.2), OK),
        (drawn(4000, 0.2, ours=1.08), MISSED),
        (drawn(100, 0.01, copy=1.06, ours=1.03), UNDECIDED),  # where two that are the same are not
        (drawn(100, 0.01, copy=1.06, ours=1.0), UNDECIDED),
        (drawn(100, 0.2, ours=2.0), MISSED),  # which is more than that
    ],
)
def test_what_is_said(beside: Beside, verdict: str) -> None:
    assert beside.verdict(GOAL) == verdict
    assert Result("", "ms", 1.0, 1.0, 1.0, GOAL, told=verdict).verdict == verdict


def test_the_median_is_in_its_interval_as_often_as_it_says() -> None:
    draw = random.Random(0)
    found = [interval([draw.gauss(0, 1) for _ in range(101)]) for _ in range(2000)]
    assert 0.985 <= sum(low <= 0 <= high for low, high in found) / len(found) < 0.999
    assert interval([1.0, 2.0]) == (1.0, 2.0)


def _counted() -> tuple[list[int], Beside]:
    steps = [0, 0, 0]

    def side(which: int) -> None:
        steps[which] += 1

    beside = told_apart(lambda: side(0), lambda: side(1), lambda: side(2), GOAL, 0.0)
    return steps, beside


def test_all_ranks_take_as_many_rounds() -> None:
    (steps, beside), (its_steps, its) = run_ranks(2, _counted)
    assert steps == its_steps == [BLOCK] * 3 and beside == its and len(beside.ours) == BLOCK
