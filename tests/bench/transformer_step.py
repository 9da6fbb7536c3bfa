"""One training step of a Llama, ours and by hand: forward, backward and AdamW; in turns, as in `tests.bench.step`."""

from __future__ import annotations

from functools import partial
from math import prod
from statistics import geometric_mean
from time import perf_counter

import torch

import dmp
from tests.bench.report import Result
from tests.bench.rounds import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    STEPS,
    Step,
    both,
    in_turns,
    of_all_ranks,
    quartiles,
    quickest_of_rounds,
    slowest,
)
from tests.bench.transformer_by_hand import whole_values
from tests.bench.transformer_workload import LARGE, ON, SMALL, Side, Workload, env_of, make_sides
from tests.ranks import run_ranks

GOAL = round(1 / 1.02, 3)
BATCHES, CHECKED, TOLERANCE, SECONDS_OF_POINT = 4, 3, 1e-5, 5.0
SIZES = {"dim 128": SMALL, "dim 512": LARGE}


def run(quick: bool) -> list[Result]:
    """Each point for information, then the goal: the geometric mean of their ratios."""
    results = []
    for mesh_name, (shape, _) in ON.items():
        for size, work in SIZES.items():
            of_ranks = run_ranks(prod(shape), compare, work, mesh_name, quick, timeout=240)
            theirs, ours = (quickest_of_rounds(slowest([r[i] for r in of_ranks])) for i in (0, 1))
            name = f"step of a transformer: {mesh_name}, {size}, {work.layers} layers"
            results.append(Result(name, "ms", *both(theirs, ours, 1e3), None, quartiles(theirs, ours)))
            print(results[-1], flush=True)
    means = [geometric_mean([getattr(r, side) for r in results]) for side in ("reference", "ours", "ratio")]
    results.append(Result("step of a transformer: geometric mean", "ms", *means, GOAL))
    print(results[-1], flush=True)
    return results


def compare(work: Workload, mesh_name: str, quick: bool) -> tuple[list[float], list[float]]:
    """On each rank: check that both train the same, then time them; seconds of every step, by hand and ours."""
    sides = make_sides(work, mesh_name)
    rank = env_of(mesh_name).data_rank
    batches = [work.batch(rank, step) for step in range(BATCHES)]
    for i in range(CHECKED):
        start = perf_counter()
        a, b = (side.backward(*batches[i]) for side in sides)
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for side in sides:
            side.update()
    pair = of_all_ranks(perf_counter() - start)
    theirs, ours = whole_values(sides[0].model), dmp.full_state_dict(sides[1].model)
    torch.testing.assert_close(dict(ours), theirs, rtol=TOLERANCE, atol=TOLERANCE)
    del theirs, ours
    rounds = min(max(int(SECONDS_OF_POINT / (STEPS * pair)), MIN_ROUNDS), 3 if quick else MAX_ROUNDS)

    def step(side: Side) -> Step:
        return lambda i: partial(_trained, side, batches[i % BATCHES])

    theirs_s, ours_s = in_turns([step(side) for side in sides], rounds)
    return theirs_s, ours_s


def _trained(side: Side, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    side.backward(*batch)
    side.update()
