"""How fast this machine moves bytes while all ranks of a group are at it: what the bounds of floor.py are made with.

A pace is that of all ranks together: they begin in step, and what counts is the time from the first one's start to the
last one's end, shared out evenly. So four ranks on two cores get what two cores give; the quickest copy of each rank
would be one that had a core for itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from tests.bench.rounds import of_all_ranks
from tests.bench.step_cells import RANKS
from tests.ranks import run_ranks

COPIED, TIMES = 1 << 27, 7  # bytes of one copy, beyond what caches hold
LONG_ENOUGH = 0.02  # seconds, beside which a late start is nothing
BUFFER = 1 << 18  # bytes of rows that are gathered at once: they stay in the cache, for only the table is asked about

Touched = tuple[int, int, list[np.ndarray]]
"""A shard's rows and columns, and for each batch the distinct rows that it names, ascending."""


@dataclass(frozen=True)
class Pace:
    """Bytes per second and rank, when so many ranks are at it at once.

    Args:
        alone: read and written by a copy while the other ranks rest.
        memory: read and written by a copy.
        shared: sent, by a copy into memory that another process reads.
        gloo: sent to others by an all-to-all.
    """

    alone: float
    memory: float
    shared: float
    gloo: float


def measured() -> str:
    """The paces of this run, in words."""
    lines = []
    for ranks, pace in paces().items():
        lines.append(
            f"{ranks} ranks at once on {os.cpu_count()} cores, GB/s each: "
            f"copy {pace.memory / 1e9:.1f} (one alone {pace.alone / 1e9:.1f}), "
            f"into shared memory {pace.shared / 1e9:.1f}, gloo's all-to-all {pace.gloo / 1e9:.2f}"
        )
    return "\n".join(lines)


@cache
def paces() -> dict[int, Pace]:
    """By number of ranks."""
    found = {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            found[ranks] = run_ranks(ranks, _pace, Path(folder))[0]
    return found


def _pace(folder: Path) -> Pace:
    me, size = dist.get_rank(), dist.get_world_size()
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    if me == 0:
        (folder / "shared").write_bytes(bytes(COPIED * size))
    dist.barrier()
    shared = torch.from_file(str(folder / "shared"), shared=True, size=size * COPIED // 4).view(size, -1)[me]
    alone = of_all_ranks(0.0 if me else _alone(lambda: target.copy_(source)))
    together = all_at_once(lambda: target.copy_(source))
    into = all_at_once(lambda: shared.copy_(source))
    gloo = all_at_once(lambda: dist.all_to_all_single(target, source))
    sent = COPIED * (size - 1) // size
    return Pace(2 * COPIED / alone, 2 * COPIED / together, COPIED / into, sent / gloo)


def _alone(copy: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMES):
        start = perf_counter()
        copy()
        taken.append(perf_counter() - start)
    return median(taken)


def all_at_once(work: Callable[[], object]) -> float:
    """Seconds of one call while every rank makes it: from the first start to the last end, the median of several."""
    start = perf_counter()
    work()  # and what first use costs
    calls = ceil(LONG_ENOUGH / of_all_ranks(perf_counter() - start))
    taken = []
    for _ in range(TIMES):
        dist.barrier()
        start = perf_counter()
        for _ in range(calls):
            work()
        end = perf_counter()  # the clock is the machine's, the same in all processes
        taken.append((of_all_ranks(end) + of_all_ranks(-start)) / calls)
    return median(taken)


def seconds_of_rows(of_ranks: Sequence[Sequence[Touched]], state: bool) -> float:
    """Of all ranks at once, for a batch: each distinct row of their shards read once, and written once later.

    Args:
        state: whether each row has a number beside it, which is read and written with it.
    """
    return float(run_ranks(len(of_ranks), _seconds_of_rows, of_ranks, state)[0])


def _seconds_of_rows(of_ranks: Sequence[Sequence[Touched]], state: bool) -> float:
    mine = of_ranks[dist.get_rank()]
    jobs = [_gather_and_scatter(rows, width, batches) for rows, width, batches in mine]
    if state:
        jobs += [_gather_and_scatter(rows, 1, batches) for rows, _, batches in mine]
    batches = max(len(named) for shards in of_ranks for _, _, named in shards)

    def work() -> None:
        for number in range(batches):
            for way in (0, 1):
                for job in jobs:
                    job(number, way)

    return all_at_once(work) / batches


def _gather_and_scatter(rows: int, width: int, batches: Sequence[np.ndarray]) -> Callable[[int, int], None]:
    """By the number of a batch: its rows read (0) or written (1), by torch's plain operators."""
    table, at_once = torch.ones(rows, width), max(BUFFER // (4 * width), 1)
    buffer = torch.ones(at_once, width)
    parts = [
        [(part, buffer[: len(part)]) for part in torch.from_numpy(of).split(at_once) if len(part)] for of in batches
    ]

    def run(number: int, way: int) -> None:
        for part, held in parts[number]:
            if way == 0:
                torch.index_select(table, 0, part, out=held)
            else:
                table.index_copy_(0, part, held)

    return run
