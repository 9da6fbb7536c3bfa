"""What a step cannot do without: the bytes that lookups and updates touch, and those that ranks exchange.

Memory, for each rank: ids read; forward every row that its batch names is read once, and what is exchanged of it is
written; backward what is exchanged is read, and every such row with its state is read and written once. Where partial
sums or distinct rows travel, the rank that asked for them writes its results from them and reads their gradients.
Exchanged are, for each table's rectangle and each rank that asks it, ids, results and gradients: of every bag that has
ids there, or of every distinct row, whichever are fewer bytes in all.

Two bounds, both with paces that this run has measured while all ranks are at it (pace.py). The bound of the *stream* is
all these bytes at the pace of a plain copy, and of a copy into memory that processes share: as if rows lay side by side
and nothing were known of where they are. Rows lie anywhere, and the memory of one costs its way through the page table
and a wait that a stream has not. So the bound of *rows* takes for them what torch's plain gather (forward) and scatter
(update) of the same distinct rows of the same batches take, in ascending order, all ranks at once, without any
arithmetic; the other bytes are at the stream's pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch

import dmp
from tests.bench.pace import Touched, paces, seconds_of_rows
from tests.bench.step_cells import Cell
from tests.bench.workload import Workload, make_batch, make_plan

ID_BYTES, STATE_BYTES = 4, 4  # of an id on the wire; of a row's Adagrad state
NUM_BATCHES = 2  # whose rows are gathered in turns; bytes are of the first

Asked = tuple[np.ndarray, int, int]  # distinct rows, how many ids, how many bags have some


@dataclass
class Least:
    """Bytes of one step, by rank."""

    memory: np.ndarray
    wire: np.ndarray
    """Sent to others."""

    rows: np.ndarray
    """Of `memory`, what is read and written of tables and their state."""

    touched: list[list[Touched]] = field(default_factory=list)
    """By rank, of each shard that it has."""

    @property
    def means(self) -> tuple[float, float]:
        """Of the ranks, in MB."""
        return float(self.memory.mean()) / 1e6, float(self.wire.mean()) / 1e6


def stream_seconds(least: Least) -> float:
    """Of the stream's bound: the mean rank while all are at work, or the busiest with the machine for itself."""
    return _moved(least.memory) + _sent(least)


def rows_seconds(least: Least, state: bool) -> float:
    """Of the rows' bound."""
    return seconds_of_rows(least.touched, state) + _moved(least.memory - least.rows) + _sent(least)


def _moved(of_ranks: np.ndarray) -> float:
    pace = paces()[len(of_ranks)]
    return max(fmean(of_ranks) / pace.memory, of_ranks.max() / pace.alone)


def _sent(least: Least) -> float:
    pace = paces()[len(least.wire)]
    return fmean(least.wire) / max(pace.shared, pace.gloo)


def least_bytes(cell: Cell) -> Least:
    """Of the cell's first batch, from its plan and ids alone; rows are those of some more as well."""
    work, ranks = cell.work, cell.ranks
    env = dmp.ShardingEnv.abstract(*cell.axes)
    names = [str(i) for i in range(len(work.rows))]
    plan = make_plan(cell.layout, names, ranks)
    least = Least(np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), [[] for _ in range(ranks)])
    batches = [
        [_split(cell, make_batch(work, 100 * number + rank)) for rank in range(ranks)] for number in range(NUM_BATCHES)
    ]
    for table, rows in enumerate(work.rows):
        for shard in plan[names[table]].shards((rows, work.dim), env):
            asked = [
                [_asked(*of_rank[table], shard.offsets[0], shard.sizes[0]) for of_rank in of_batch]
                for of_batch in batches
            ]
            touched = [np.unique(np.concatenate([distinct for distinct, _, _ in of])) for of in asked]
            least.touched[shard.rank].append((*shard.sizes, touched))  # type: ignore[arg-type]
            _add(least, work, shard, asked[0], touched[0].size, whole_rows=shard.sizes[0] == rows)
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
    seen = np.zeros(rows, dtype=bool)
    seen[ids[inside] - first] = True
    return np.flatnonzero(seen), int(inside.sum()), int(np.unique(bags[inside]).size)


def _add(
    least: Least, work: Workload, shard: dmp.Shard, asked: Sequence[Asked], touched: int, whole_rows: bool
) -> None:
    width, owner = 4 * shard.sizes[1], shard.rank
    state = 2 * STATE_BYTES if work.optimizer == "rowwise_adagrad" else 0
    least.rows[owner] += touched * (3 * width + state)
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
