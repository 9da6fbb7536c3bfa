"""A second model of a step, made from what the data path sends and reads, without the planner's own.

A step is the sum over phases of the slowest rank. It counts bytes:

- ids: 32-bit words of lengths and ids, to every rank that has a part of the table, once for each of its row blocks
- lookup: each id reads a row's part, and each bag writes its part; backward each bag's gradient is read and added for
  each of its ids, and each distinct row is read and written once
- results: inside the host from every rank that has something, where row blocks are summed; then between hosts each
  column block once, shared by the host's ranks. On one host a row block has only bags that have ids there, where those
  are few among the bags of all row blocks; so it has on several, table by table, straight to the ranks of the samples,
  where that is fewer bytes, none more between hosts and hardly more on any link; links carry both at once. Whole tables
  go along where all others do, and where no link between hosts carries much more
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
EVEN = 1.25  # of its share, what one link may carry
EXCHANGE = 1 << 20  # bytes that one exchange more is worth


def step_phases(tables: Sequence[Table], pieces: Pieces, ranks: int) -> dict[str, float]:
    """Seconds of each phase of a plan."""
    hosts, samples = ranks // PER_HOST, BATCH * ranks
    bags = np.array([len(t.pooling) for t in tables], dtype=float)[pieces.table]
    share = pieces.rows / np.array([t.rows for t in tables], dtype=float)[pieces.table]
    ids = np.array([sum(t.pooling) for t in tables])[pieces.table] * share
    results = samples * bags * pieces.columns * WORD
    block = _first_of(pieces.rank // PER_HOST, pieces.table, pieces.column)
    part = _with_ids(ids / np.maximum(share, 1e-30) / bags, share)
    if hosts == 1:
        are_few = _are_few(part, np.where(share < 1, bags, 0))
        is_straight, results = np.zeros(len(part), dtype=bool), results * part if are_few else results
    else:
        is_straight = _go_straight(pieces, results, part, share < 1, block, ranks)
        results = np.where(is_straight, results * part, results)
    row_bytes = np.maximum(pieces.columns * WORD, 64)
    read, changed = samples * ids * row_bytes, _distinct(pieces.rows, samples * ids) * row_bytes

    def by_rank(values: Array) -> Array:
        return np.bincount(pieces.rank, values, ranks)

    once = _first_of(pieces.rank, pieces.table, pieces.row)
    words = _summed(pieces.rank[once], (samples * (bags + ids) * WORD)[once], ranks)
    staged, straight = np.where(is_straight, 0, results), np.where(is_straight, results, 0)
    leaving = _summed((pieces.rank // PER_HOST)[block], staged[block], hosts) / PER_HOST
    inner = by_rank(staged * (PER_HOST - 1) / PER_HOST + straight * (PER_HOST - 1) / ranks) / INSIDE
    summing = 2 * _summed(pieces.rank // PER_HOST, staged, hosts) / PER_HOST / MEMORY
    outer = (np.repeat(leaving, PER_HOST) + by_rank(straight)) * (hosts - 1) / hosts / OUTSIDE
    outside = (ranks - PER_HOST) / ranks
    of_link = np.maximum(outside / OUTSIDE, (PER_HOST - 1) / ranks / INSIDE)
    passes = by_rank(samples * ids * WORD) * ID_PASSES / MEMORY
    if len(pieces.rank) and is_straight.all():
        out = _latency(ranks, hosts) + float((by_rank(straight) * of_link).max())
    elif len(pieces.rank):
        at_once = _latency(ranks, hosts) if is_straight.any() else 0.0
        out = max(at_once, _latencies(hosts)) + float(inner.max() + outer.max() + summing.max())
    else:
        out = 0.0
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


def _are_few(part: Array, of_cut: Array) -> bool:
    """Whether bags with ids alone travel on one host.

    Args:
        part: (pieces,) of the bags.
        of_cut: (pieces,) bags of row blocks; 0 for whole tables.
    """
    return bool(of_cut.any() and (part * of_cut).sum() <= FEW * of_cut.sum())


def _go_straight(
    pieces: Pieces, results: Array, part: Array, is_cut: NDArray[np.bool_], block: Integers, ranks: int
) -> NDArray[np.bool_]:
    """(pieces,) whether their table's bags go straight to the ranks of their samples, those with ids alone.

    Args:
        results: (pieces,) bytes of all bags.
        part: see `_are_few`.
        is_cut: (pieces,) of a table in several row blocks; others count as one table, the last.
        block: of the pieces one for each that hosts have of a table's columns.
    """
    hosts, count, few = ranks // PER_HOST, int(pieces.table.max(initial=0)) + 2, results * part
    table, host = np.where(is_cut, pieces.table, count - 1), pieces.rank // PER_HOST
    leave = (hosts - 1) / hosts
    far, of_hosts = _summed(table, few, count) * leave, _summed(table[block], results[block], count) * leave
    straight = _summed(table, few, count) * (ranks - 1) / ranks / np.where(np.arange(count) < count - 1, FEW, 1)
    staged = _summed(table, results, count) * (PER_HOST - 1) / PER_HOST + of_hosts
    # One link may carry hardly more than its share of the host's sums.
    is_even = PER_HOST * _most(table, pieces.rank, few, count) <= EVEN * _most(
        table[block], host[block], results[block], count
    )
    fewer = is_even & (far <= of_hosts * (1 + 1e-9)) & (straight < staged)
    fewer[-1] = False
    none, each = float(staged.sum()), EXCHANGE * ranks
    some = none - float((staged - straight)[fewer].sum()) + (each if staged[~fewer].any() else -each)
    found = fewer[table] if some < none else np.zeros(len(table), dtype=bool)
    sums = _summed(host[block], np.where(found, 0, results)[block], hosts) / PER_HOST
    otherwise = (np.repeat(sums, PER_HOST) + _summed(pieces.rank, np.where(found, few, 0), ranks)).max()
    busiest = _summed(pieces.rank, few, ranks).max()
    is_even_at_all = busiest <= EVEN * otherwise or (busiest - otherwise) * leave <= EXCHANGE
    if is_even_at_all and far.sum() <= of_hosts.sum() * (1 + 1e-9) and straight.sum() - each <= min(some, none):
        return np.ones(len(table), dtype=bool)
    return found


def _most(table: Integers, place: Integers, values: Array, count: int) -> Array:
    """(count,) of each table the most that it has in one place."""
    both, inverse = np.unique(np.stack([table, place]), axis=1, return_inverse=True)
    most = np.zeros(count)
    np.maximum.at(most, both[0], np.bincount(inverse.reshape(-1), values, both.shape[1]))
    return most


def _latencies(hosts: int) -> float:
    """Of an exchange inside hosts, and one between them."""
    return LATENCY_INSIDE * log2(PER_HOST) + (LATENCY_OUTSIDE * log2(hosts) if hosts > 1 else 0.0)


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
