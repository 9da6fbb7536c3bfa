"""A save in the background: how soon the call returns, and what the training beside it pays.

The call must copy the state, so it is held against a copy of the same bytes into memory that is new to the process. The
rest of it, which is agreement between the ranks and with torch's random state and names, may take half as much again.
The training step is that of two ranks that wait for nothing but each other: where each has one core, what the writers
compute is taken from it.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dmp
from tests.bench.report import Result
from tests.bench.rounds import both, quartiles, slowest
from tests.bench.state_workload import DIM, OURS, ROWS, chunks_of, wrapped
from tests.ranks import close_pools, mesh, run_ranks

RANKS = 2
ROUNDS, QUICK_ROUNDS = 7, 3
CALL_GOAL, STEP_GOAL = round(1 / 1.5, 3), round(1 / 1.1, 3)
BATCH, IDS, WIDTH, ALONE, MAX_STEPS = 1024, 4, 256, 20, 200


def run(quick: bool, folder: Path) -> list[Result]:
    """The call of save, then the step beside it."""
    close_pools()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    of_ranks = run_ranks(RANKS, time_calls, str(folder), rounds, timeout=300)
    copied, called = (slowest([r[i] for r in of_ranks]) for i in (0, 1))
    name = "background save: the call, beside a copy in memory"
    results = [Result(name, "s", *both(copied, called, 1.0), CALL_GOAL, quartiles(copied, called))]
    print(results[-1], flush=True)
    of_ranks = run_ranks(RANKS, time_steps, str(folder), rounds, timeout=300)
    alone, beside = (slowest([[median(seconds) for seconds in r[i]] for r in of_ranks]) for i in (0, 1))
    steps = median(len(seconds) for seconds in of_ranks[0][1])
    name = f"background save: the training step ({steps:.0f} steps of each save)"
    results.append(Result(name, "ms", *both(alone, beside, 1e3), STEP_GOAL, quartiles(alone, beside)))
    print(results[-1], flush=True)
    close_pools()
    return results


def time_calls(name: str, rounds: int) -> tuple[list[float], list[float]]:
    """On each rank: seconds of a copy, and of the call, in turns; after one of each that does not count."""
    folder = Path(name)
    model = wrapped(OURS.work(), "row_wise", RANKS)
    dmp.load_checkpoint(OURS.path(folder), model)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(-1, rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            new_memory()
            dist.barrier()
            start = perf_counter()
            if which == 0:
                done: Any = [chunk.clone() for chunk in chunks_of(model).values()]
            else:
                done = dmp.save_checkpoint(folder / "saved", model, asynchronous=True)
            seconds = perf_counter() - start
            if which:
                done.wait()
                remove(folder / "saved")
            del done
            if i >= 0:
                times[which].append(seconds)
    return times


class Ranker(nn.Module):
    """A large table under a few dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        layers = (nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.over = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Of (B, IDS)."""
        out: torch.Tensor = self.over(self.table(ids))
        return out


def time_steps(name: str, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """On each rank and in each round: seconds of the steps before a save, and of those beside it."""
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    path = Path(name) / "saved"
    module = Ranker()
    _apply_optimizer_in_backward(torch.optim.Adagrad, module.table.parameters(), {"lr": 0.01})
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
    model = dmp.DistributedModelParallel(module, env=env, plan={"table.weight": dmp.row_wise()})
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "table.weight"])
    ids = torch.randint(0, ROWS, (BATCH, IDS), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> float:
        dist.barrier()
        start = perf_counter()
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - start

    alone: list[list[float]] = []
    beside: list[list[float]] = []
    for i in range(-1, rounds):
        before = []
        while len(before) < ALONE and not on_any_rank(False):  # what lies between two steps is the same on both sides
            before.append(step())
        pending = dmp.save_checkpoint(path, model, optimizer, asynchronous=True)
        assert pending is not None
        during: list[float] = []
        while len(during) < MAX_STEPS and not on_any_rank(pending.done()):
            during.append(step())
        pending.wait()
        remove(path)
        if i >= 0 and during:
            alone.append(before)
            beside.append(during)
    if not beside:
        raise AssertionError("no save lasted for a step: nothing was measured")
    return alone, beside


def on_any_rank(is_done: bool) -> bool:
    """The same on every rank, so that all take as many steps."""
    flag = torch.tensor(float(is_done))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def remove(path: Path) -> None:
    """By rank 0, when every rank is done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def new_memory() -> None:
    """What was freed goes back to the system, so that what comes next is new to both sides."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
