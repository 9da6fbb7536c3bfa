"""Plans that a person would write, to hold ours against: one rule for all tables, or a greedy choice by size.

Their steps are those of `planner_judge`, so that neither side has chosen what it is judged by.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.bench.planner_cases import BATCH, PER_HOST, Table, topology
from tests.bench.planner_judge import INSIDE, MEMORY, OUTSIDE, WORD, step_phases
from tests.bench.planner_pieces import Pieces, Placed

Array = NDArray[np.float64]
WIDTHS = (32, 64, 128, 4096)  # of column blocks, at most
THRESHOLDS = 14


@dataclass(frozen=True)
class Way:
    """How a table may be cut: blocks of at most `columns` columns, each by rows over `size` ranks; 0 for copies."""

    columns: int
    size: int


def simple_steps(tables: Sequence[Table], ranks: int) -> dict[str, float]:
    """Seconds of each simple plan that fits, by its name."""
    free = topology(ranks).usable_bytes - sum(len(t.pooling) * t.dim for t in tables) * WORD * BATCH
    every = {
        "row-wise": [Way(4096, ranks)] * len(tables),
        "row-wise in a host": [Way(4096, PER_HOST)] * len(tables),
        "32 columns in a host": [Way(32, PER_HOST)] * len(tables),
    }
    found: dict[str, float] = {}
    for name, ways in every.items():
        pieces = _packed(tables, ways, ranks, free)
        if pieces is not None:
            found[name] = float(sum(step_phases(tables, pieces, ranks).values()))
    greedy = [
        float(sum(step_phases(tables, pieces, ranks).values()))
        for ways in _by_threshold(tables, ranks, free)
        if (pieces := _packed(tables, ways, ranks, free)) is not None
    ]
    if greedy:
        found["greedy"] = min(greedy)
    return found


def _by_threshold(tables: Sequence[Table], ranks: int, free: float) -> Iterator[list[Way]]:
    """For several limits: each table's way of the least work in all, of those that load no rank beyond the limit."""
    sizes = [s for s in _powers(ranks) if s in (1, 2, 4, 8) or s % PER_HOST == 0]
    ways = [Way(columns, size) for columns in WIDTHS for size in sizes] + [Way(4096, 0)]
    costs = np.array([[_seconds(t, way, ranks) for way in ways] for t in tables])  # (tables, ways, [a rank's, all])
    bytes_of = np.array([[t.weight_bytes / max(1, w.size) / _blocks(t, w) for w in ways] for t in tables])
    costs[bytes_of > 0.5 * free] = np.inf
    lowest = float(costs[..., 0].min(axis=1).max())
    highest = float(costs[np.arange(len(tables)), costs[..., 1].argmin(axis=1), 0].max())
    for limit in np.geomspace(lowest, max(highest, lowest * 1.01), THRESHOLDS):
        work = np.where(costs[..., 0] <= limit * (1 + 1e-9), costs[..., 1], np.inf)
        yield [ways[i] for i in work.argmin(axis=1)]


def _seconds(table: Table, way: Way, ranks: int) -> tuple[float, float]:
    """Of a rank that has a piece, and summed over ranks: no latencies, all phases in one."""
    ids, bags = sum(table.pooling), len(table.pooling)
    if way.size == 0:
        one = BATCH * ids * table.dim * WORD * 2 / MEMORY
        one += table.weight_bytes * (4 / MEMORY + 2 / INSIDE + 2 / PER_HOST / OUTSIDE * (ranks > PER_HOST))
        return one, one * ranks
    samples, width = BATCH * ranks, min(way.columns, table.dim)
    parts = min(way.size, table.rows)
    link = OUTSIDE if ranks > PER_HOST else INSIDE
    one = samples * (bags + ids / parts) * WORD / link
    one += (samples * ids * 2 + min(table.rows, samples * ids) * 2) / parts * width * WORD / MEMORY
    results = samples * bags * width * WORD * 2
    one += results / INSIDE + results / MEMORY
    if ranks > PER_HOST:
        one += results / PER_HOST / OUTSIDE
    sharing = min(way.size, PER_HOST)  # a host's ranks send its block together: a piece on one rank loads all of them
    extra = results / PER_HOST / OUTSIDE * (PER_HOST / sharing - 1) if ranks > PER_HOST else 0.0
    return one, (one + extra) * parts * _blocks(table, way)


def _packed(tables: Sequence[Table], ways: Sequence[Way], ranks: int, free: float) -> Pieces | None:
    """Largest first, each piece onto the least loaded ranks that have room; None where one has none."""
    load, held = np.zeros(ranks), np.zeros(ranks)
    placed: list[Placed] = []
    todo: list[tuple[float, int, Placed]] = []
    for i, (table, way) in enumerate(zip(tables, ways, strict=True)):
        if way.size == 0:
            held += table.weight_bytes
            placed.append(Placed(i, 0, table.dim, 0, 0))
            continue
        seconds, _ = _seconds(table, way, ranks)
        for column in range(0, table.dim, way.columns):
            width = min(way.columns, table.dim - column)
            piece = Placed(i, column, width, 0, way.size)
            heapq.heappush(todo, (-seconds * width / min(way.columns, table.dim), len(todo), piece))
    while todo:
        minus, _, piece = heapq.heappop(todo)
        size, need = (
            piece.size,
            tables[piece.table].rows / min(piece.size, tables[piece.table].rows) * piece.columns * WORD,
        )
        busiest = load.reshape(-1, size).max(axis=1) - minus
        busiest[held.reshape(-1, size).max(axis=1) + need > free] = np.inf
        first = int(busiest.argmin()) * size
        if not np.isfinite(busiest.min()):
            return None
        load[first : first + size] -= minus
        held[first : first + size] += need
        placed.append(Placed(piece.table, piece.column, piece.columns, first, size))
    return Pieces.cut(tables, placed)


def _blocks(table: Table, way: Way) -> int:
    return -(-table.dim // way.columns)


def _powers(ranks: int) -> list[int]:
    return [s for s in (1 << i for i in range(13)) if s <= ranks and ranks % s == 0]
