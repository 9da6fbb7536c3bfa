"""A second model of a step, made from what the data path sends and reads, without the planner's own.

A step is the sum over phases of the slowest rank. It counts bytes:

- ids: 32-bit words of lengths and ids, to every rank that has a part of the table, once for each of its row blocks
- lookup: each id reads a row's part, and each bag writes its part; backward each bag's gradient is read and added for
  each of its ids, and each distinct row is read and written once
- results: inside the host from every rank that has something, where row blocks are summed; then between hosts each
  column block once, shared by the host's ranks. On one host a row block has only bags that have ids there, where those
  are few among the bags of all row blocks; so it has on several, straight to the ranks of the samples, where that is
  fewer bytes, and none more between hosts
- copies: an all-reduce of the table, in the host and between hosts, and an update of all of it

An exchange costs a latency for each doubling of its ranks, and the bytes of the rank with the most; what stays on a
rank, or on its host, is not sent over the link. No overlap, no caches, ids evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from tests.bench.planner_cases import BATCH, PER_HOST, Table
from tests.bench.planner_pieces import Integers, Pieces

Array = NDArray[np.float64]
MEMORY, INSIDE, OUTSIDE = 2.5e12, 450e9, 50e9  # bytes/s of H100 boxes
LATENCY_INSIDE, LATENCY_OUTSIDE = 1e-5, 2.5e-5
WORD = 4  # bytes of an id, a length, an element
ID_PASSES = 6  # over the ids: bucketize before, sort and segment in the backward pass
FEW = 0.7  # of the bags of row blocks have ids there


def step_phases(tables: Sequence[Table], pieces: Pieces, ranks: int) -> dict[str, float]:
    """Seconds of each phase of a plan."""
    hosts, samples = ranks // PER_HOST, BATCH * ranks
    bags = np.array([len(t.pooling) for t in tables], dtype=float)[pieces.table]
    share = pieces.rows / np.array([t.rows for t in tables], dtype=float)[pieces.table]
    ids = np.array([sum(t.pooling) for t in tables])[pieces.table] * share
    results = samples * bags * pieces.columns * WORD
    block = _first_of(pieces.rank // PER_HOST, pieces.table, pieces.column)
    part = _with_ids(ids / np.maximum(share, 1e-30) / bags, share)
    is_straight = _are_few(part, np.where(share < 1, bags if hosts == 1 else results, 0), block, hosts)
    results = results * part if is_straight else results
    row_bytes = np.maximum(pieces.columns * WORD, 64)
    read, changed = samples * ids * row_bytes, _distinct(pieces.rows, samples * ids) * row_bytes

    def by_rank(values: Array) -> Array:
        return np.bincount(pieces.rank, values, ranks)

    once = _first_of(pieces.rank, pieces.table, pieces.row)
    words = _summed(pieces.rank[once], (samples * (bags + ids) * WORD)[once], ranks)
    leaving = _summed((pieces.rank // PER_HOST)[block], results[block], hosts) / PER_HOST
    inner = by_rank(results) * (PER_HOST - 1) / PER_HOST / INSIDE
    summing = 2 * _summed(pieces.rank // PER_HOST, results, hosts) / PER_HOST / MEMORY
    outer = leaving * (hosts - 1) / hosts / OUTSIDE
    outside = (ranks - PER_HOST) / ranks
    of_link = np.maximum(outside / OUTSIDE, (PER_HOST - 1) / ranks / INSIDE)
    passes = by_rank(samples * ids * WORD) * ID_PASSES / MEMORY
    if is_straight and hosts > 1:
        out = _latency(ranks, hosts) + float((by_rank(results) * of_link).max())
    else:
        out = _exchange(inner, hosts, outer) + float(summing.max(initial=0.0)) if len(pieces.rank) else 0.0
    copied = _copies(tables, pieces, ranks)
    return {
        "ids": _latency(ranks, hosts) + float((words * of_link).max()) if len(pieces.rank) else 0.0,
        "lookup": ((by_rank(read + results) / MEMORY) + copied["lookup"]).max(),
        "results": out,
        "gradients": out,
        "update": (by_rank(read + results + 2 * changed) / MEMORY + passes + copied["update"]).max(),
        "copies": copied["sync"],
    }


def _with_ids(length: Array, share: Array) -> Array:
    """(pieces,) part of the bags that have ids in a piece, were a table's bags of one length."""
    filled = np.where(length < 1, length * share, 1 - (1 - share) ** np.maximum(length, 1))
    return np.where(share < 1, filled, 1.0)


def _are_few(part: Array, of_cut: Array, block: Integers, hosts: int) -> bool:
    """Whether bags with ids alone travel, straight to the ranks of their samples.

    Args:
        part: (pieces,) of the bags.
        of_cut: (pieces,) bags of row blocks, in bytes where there are hosts; 0 for whole tables.
        block: of the pieces one for each that hosts have of a table's columns.
    """
    if not of_cut.any():
        return False
    if hosts == 1:
        return bool((part * of_cut).sum() <= FEW * of_cut.sum())
    ranks, straight = hosts * PER_HOST, float((part * of_cut).sum())
    near, far = float(of_cut.sum()) * (PER_HOST - 1) / PER_HOST, float(of_cut[block].sum()) * (hosts - 1) / hosts
    return straight * (hosts - 1) / hosts <= far and straight * (ranks - 1) / ranks <= FEW * (near + far)


def _exchange(inner: Array, hosts: int, outer: Array) -> float:
    between = LATENCY_OUTSIDE * log2(hosts) + outer.max() if hosts > 1 else 0.0
    return float(LATENCY_INSIDE * log2(PER_HOST) + inner.max() + between)


def _latency(ranks: int, hosts: int) -> float:
    """Of one exchange over all ranks."""
    return log2(ranks) * (LATENCY_OUTSIDE if hosts > 1 else LATENCY_INSIDE)


def _copies(tables: Sequence[Table], pieces: Pieces, ranks: int) -> dict[str, float]:
    """Of the tables that every rank has whole."""
    own = [t for t, copied in zip(tables, pieces.copied, strict=True) if copied]
    hosts, size = ranks // PER_HOST, sum(t.weight_bytes for t in own)
    read = sum(BATCH * sum(t.pooling) * t.dim * WORD for t in own)
    bags = sum(BATCH * len(t.pooling) * t.dim * WORD for t in own)
    sync = 2 * size * ((PER_HOST - 1) / PER_HOST / INSIDE + (hosts - 1) / ranks / OUTSIDE)
    latency = LATENCY_INSIDE * log2(PER_HOST) + (LATENCY_OUTSIDE * log2(hosts) if hosts > 1 else 0.0)
    return {
        "lookup": (read + bags) / MEMORY,
        "update": (read + bags + 4 * size) / MEMORY,
        "sync": sync + latency if own else 0.0,
    }


def _distinct(rows: Integers, ids: Array) -> Array:
    """Expected different rows among so many ids, evenly spread."""
    return rows * -np.expm1(-ids / rows)


def _summed(group: Integers, values: Array, count: int) -> Array:
    return np.bincount(group, values, count)


def _first_of(*keys: Integers) -> Integers:
    """Index of the first piece of each combination."""
    if not len(keys[0]):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort(keys)
    changes = np.any([k[order][1:] != k[order][:-1] for k in keys], axis=0)
    return order[np.concatenate([[True], changes])]
