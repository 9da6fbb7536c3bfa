"""What a step cannot do without: the bytes that lookups and updates touch, and those that ranks exchange.

Memory, for each rank: ids read; forward every row that its batch names is read once, and what is exchanged of it is
written; backward what is exchanged is read, and every such row with its state is read and written once. Where partial
sums or distinct rows travel, the rank that asked for them writes its results from them and reads their gradients.
Exchanged are, for each table's rectangle and each rank that asks it, ids, results and gradients: of every bag that has
ids there, or of every distinct row, whichever are fewer bytes in all.

Seconds are these bytes at the pace of a plain copy, and of a copy into memory that processes share, when all ranks copy
at once; both are measured in the run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

import dmp
from tests.bench.rounds import of_all_ranks
from tests.bench.step_cells import RANKS, Cell
from tests.bench.workload import Workload, make_batch, make_plan
from tests.ranks import run_ranks

ID_BYTES, STATE_BYTES = 4, 4  # of an id on the wire; of a row's Adagrad state
COPIED, TIMES = 1 << 27, 5  # bytes of one copy, beyond what caches hold

Asked = tuple[np.ndarray, int, int]  # distinct rows, how many ids, how many bags have some


@dataclass
class Least:
    """Bytes of one step, by rank."""

    memory: np.ndarray
    wire: np.ndarray
    """Sent to others."""

    @property
    def means(self) -> tuple[float, float]:
        """Of the ranks, in MB."""
        return float(self.memory.mean()) / 1e6, float(self.wire.mean()) / 1e6


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


def seconds(least: Least) -> float:
    """Of the bound: the mean rank while all are at work, or the busiest with the machine for itself."""
    pace = paces()[len(least.memory)]
    memory = max(fmean(least.memory) / pace.memory, least.memory.max() / pace.alone)
    return memory + fmean(least.wire) / max(pace.shared, pace.gloo)


def measured() -> str:
    """The paces of this run, in words."""
    lines = []
    for ranks, pace in paces().items():
        lines.append(
            f"{ranks} ranks, GB/s each: copy {pace.memory / 1e9:.1f} (alone {pace.alone / 1e9:.1f}), "
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
    alone = of_all_ranks(0.0 if me else _quickest(lambda: target.copy_(source)))
    together = of_all_ranks(_quickest(lambda: target.copy_(source), meet=True))
    into = of_all_ranks(_quickest(lambda: shared.copy_(source), meet=True))
    sent = COPIED * (size - 1) // size
    gloo = of_all_ranks(_quickest(lambda: dist.all_to_all_single(target, source), meet=True))
    return Pace(2 * COPIED / alone, 2 * COPIED / together, COPIED / into, sent / gloo)


def _quickest(copy: Callable[[], object], meet: bool = False) -> float:
    taken = []
    for _ in range(TIMES):
        if meet:
            dist.barrier()
        start = perf_counter()
        copy()
        taken.append(perf_counter() - start)
    return min(taken)


def least_bytes(cell: Cell) -> Least:
    """Of the cell's first batch, from its plan and ids alone."""
    work, ranks = cell.work, cell.ranks
    env = dmp.ShardingEnv.abstract(*cell.axes)
    names = [str(i) for i in range(len(work.rows))]
    plan = make_plan(cell.layout, names, ranks)
    least = Least(np.zeros(ranks), np.zeros(ranks))
    batches = [_split(cell, make_batch(work, rank)) for rank in range(ranks)]
    for table, rows in enumerate(work.rows):
        for shard in plan[names[table]].shards((rows, work.dim), env):
            asked = [_asked(ids, bags, shard.offsets[0], shard.sizes[0]) for ids, bags in (b[table] for b in batches)]
            _add(least, work, shard, asked, whole_rows=shard.sizes[0] == rows)
    return least


def _split(cell: Cell, batch: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each table its ids, and the bag of each."""
    work, (values, lengths) = cell.work, batch
    by_table = lengths.view(len(work.rows), -1)
    parts = values.split(by_table.sum(1).tolist())
    bags = torch.arange(work.batch_size)
    return [(part.numpy(), torch.repeat_interleave(bags, of).numpy()) for part, of in zip(parts, by_table, strict=True)]


def _asked(ids: np.ndarray, bags: np.ndarray, first: int, rows: int) -> Asked:
    """Of one rank's ids in a range of rows: the distinct ones, how many there are, how many bags have some."""
    inside = (ids >= first) & (ids < first + rows)
    return np.unique(ids[inside]), int(inside.sum()), int(np.unique(bags[inside]).size)


def _add(least: Least, work: Workload, shard: dmp.Shard, asked: Sequence[Asked], whole_rows: bool) -> None:
    width, owner = 4 * shard.sizes[1], shard.rank
    touched = np.unique(np.concatenate([distinct for distinct, _, _ in asked])).size
    state = 2 * STATE_BYTES if work.optimizer == "rowwise_adagrad" else 0
    least.memory[owner] += touched * (3 * width + state) + ID_BYTES * sum(count for _, count, _ in asked)
    for source, (distinct, count, bags) in enumerate(asked):
        away = source != owner
        results = width * (work.batch_size if work.pooled else count)
        written = width * (bags if work.pooled else count)
        # What travels and is written and read here: as it comes out of the lookup, or each distinct row once.
        direct = (written, ID_BYTES * count, 0 if whole_rows else 2 * results)
        once = (width * distinct.size, ID_BYTES * distinct.size, 2 * results)
        sent, ids, at_source = min(direct, once, key=lambda way: 2 * (1 + away) * way[0] + away * way[1] + way[2])
        least.memory[owner] += 2 * sent
        least.memory[source] += at_source
        if away:
            least.wire[owner] += sent
            least.wire[source] += sent + ids
