"""Time to put a Llama on a mesh, ours and by hand, in turns; imports, process start and the model's making apart.

With values, the goal is against a program whose ranks need not have started alike, as ours do not: `fully_shard` keeps
each rank's own values, so by hand rank 0's are broadcast before. One that trusts equal seeds is for information. On
meta both allocate and fill with values that do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from statistics import geometric_mean
from typing import Any

from tests.bench.report import Result
from tests.bench.rounds import both, quartiles, slowest
from tests.bench.transformer_by_hand import by_hand, by_hand_from_first_rank, by_hand_from_meta
from tests.bench.transformer_workload import MESHES, Workload, env_of, wrap_ours
from tests.bench.wrap import timed
from tests.ranks import mesh, run_ranks

WORK = Workload(dim=512, layers=8, heads=8, kv_heads=4, hidden=1536, vocab=8192)
ROUNDS = 7
GOAL = round(1 / 1.1, 3)
TRUSTING = "with values, by hand trusting equal seeds"
POINTS = {"with values": "cpu", TRUSTING: "cpu", "on meta": "meta"}  # what -> where the model is before


def run(quick: bool) -> list[Result]:
    """Each mesh for information, then the geometric mean, which has a goal where both sides give the same."""
    results = []
    for what, device in POINTS.items():
        points = []
        for mesh_name, (shape, _) in MESHES.items():
            rounds = 2 if quick else ROUNDS
            of_ranks = run_ranks(prod(shape), compare, mesh_name, device, what != TRUSTING, rounds, timeout=300)
            theirs, ours = slowest([r[0] for r in of_ranks]), slowest([r[1] for r in of_ranks])
            name = f"wrap a transformer {what}: {mesh_name}"
            points.append(Result(name, "ms", *both(theirs, ours, 1e3), None, quartiles(theirs, ours)))
            print(points[-1], flush=True)
        means = [geometric_mean([getattr(r, side) for r in points]) for side in ("reference", "ours", "ratio")]
        goal = None if what == TRUSTING else GOAL
        results += [*points, Result(f"wrap a transformer {what}: geometric mean", "ms", *means, goal)]
        print(results[-1], flush=True)
    return results


def compare(mesh_name: str, device: str, syncs: bool, rounds: int) -> tuple[list[float], list[float]]:
    """On each rank: seconds of each round, by hand and ours, after one of each that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(-1, rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            make = prepare_theirs(mesh_name, device, syncs) if which == 0 else prepare_ours(mesh_name, device)
            seconds = timed(make)
            if i >= 0:
                times[which].append(seconds)
    return times


def prepare_theirs(mesh_name: str, device: str, syncs: bool) -> Callable[[], Any]:
    """What is to be timed: splitting a new model by hand; with `syncs` every rank ends with rank 0's values."""
    model, on = WORK.model(device), mesh(*MESHES[mesh_name])
    if device == "meta":
        return lambda: by_hand_from_meta(model, on)
    return (lambda: by_hand_from_first_rank(model, on)) if syncs else (lambda: by_hand(model, on))


def prepare_ours(mesh_name: str, device: str) -> Callable[[], Any]:
    """What is to be timed: our wrapper with the planner's plan, on a new model."""
    model, env = WORK.model(device), env_of(mesh_name)
    return lambda: wrap_ours(model, env)
