"""Time to wrap a model of 1,000 tables on two ranks; imports, process start and the model's making apart.

The model is on meta, so that both wrappers allocate and fill. Where a plan is given, TorchRec gets the equivalent one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import dmp
from tests.bench.report import Result
from tests.bench.rounds import both, slowest
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import Workload, make_model, make_plan
from tests.ranks import mesh, run_ranks

RANKS = 2
WORK = Workload((1000,) * 1000, 16, 1)
PLANNER_GOAL_S = 3.0


def run(quick: bool) -> list[Result]:
    """Given plans against TorchRec's; then the planner's own plan."""
    results = []
    rounds = 1 if quick else 3
    for device in ("meta", "cpu"):
        for layout in ("table_wise", "row_wise"):
            of_ranks = run_ranks(RANKS, compare, layout, device, rounds, timeout=300)
            theirs, ours = slowest([r[0] for r in of_ranks]), slowest([r[1] for r in of_ranks])
            what = "on meta" if device == "meta" else "with values, which TorchRec drops"
            goal = 1.0 if device == "meta" else None
            results.append(Result(f"wrap 1,000 tables {what}: {layout}", "s", *both(theirs, ours, 1.0), goal))
            print(results[-1], flush=True)
    times = slowest(run_ranks(RANKS, planned, rounds, timeout=300))
    results.append(Result("wrap 1,000 tables with the planner's own plan", "s", None, min(times), None, PLANNER_GOAL_S))
    print(results[-1], flush=True)
    return results


def compare(layout: str, device: str, rounds: int) -> tuple[list[float], list[float]]:
    """On each rank: seconds of each round, theirs and ours, after one of each that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(-1, rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            seconds = (wrap_theirs, wrap_ours)[which](layout, device)
            if i >= 0:
                times[which].append(seconds)
    return times


def planned(rounds: int) -> list[float]:
    """On each rank: seconds to plan and wrap."""
    wrap_ours(None, "meta")
    return [wrap_ours(None, "meta") for _ in range(rounds)]


def wrap_theirs(layout: str, device: str) -> float:
    """Seconds of TorchRec's wrapper."""
    model = make_model(WORK, device)
    plan = torchrec_plan(model, layout, RANKS)
    return timed(lambda: torchrec_wrap(model, plan))


def wrap_ours(layout: str | None, device: str) -> float:
    """Seconds of our wrapper."""
    return timed(prepare_ours(layout, device))


def prepare_ours(layout: str | None, device: str) -> Callable[[], dmp.DistributedModelParallel]:
    """What is to be timed: our wrapper, with the layout given or the planner's plan, on a new model."""
    model = make_model(WORK, device)
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
    plan = None if layout is None else make_plan(layout, [name for name, _ in model.named_parameters()], RANKS)
    return lambda: dmp.DistributedModelParallel(model, env=env, plan=plan)


def timed(make: Callable[[], Any]) -> float:
    """Seconds of one call; the ranks begin it together."""
    gc.collect()
    torch.manual_seed(0)
    dist.barrier()
    start = perf_counter()
    made = make()
    seconds = perf_counter() - start
    del made
    return seconds
