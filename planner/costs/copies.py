"""`Travel`: how the gradients of a plan's copied tables get to all ranks. It is settled for all of them together.

[Note: copies together] The data path joins the gradients of all tables that are copied, and so what one of them costs
depends on the others. A cost model takes each shard by itself: it is told how they travel, and `travel` says it of a
plan that is known. Where none is known each is taken by itself.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from dmp import ShardingEnv
from planner.costs.protocol import Array, Flags, ShardTable

BESIDE_BYTES = 64 << 20
"""A larger sum of data-parallel gradients does not travel at the time of the others."""
APART_BYTES = 1 << 20
"""Of a rank's own results of sharded tables: where they are as many, their gradients and those of copies have an
exchange each. These two are the data path's."""
_LEAST_WIRE_BYTES = 4


class Travel(Enum):
    """Of the gradients of all copied tables."""

    BESIDE = "rows that batches name, in the exchange of other gradients, out of which they are copied"
    ALONE = "such rows, in an exchange of their own at the same time, read where they come"
    ONLY = "such rows, in the only exchange of gradients that there is, read where they come"
    AFTER = "such rows, in an exchange of their own at the end"
    WHOLE = "whole tables, by an all-reduce at the end"


def travel(tables: ShardTable, env: ShardingEnv, samples: float) -> Travel | None:
    """How they travel of a plan; None where nothing is copied.

    Args:
        tables: all parameters, each as one shard, and `replicated` where it is copied.
        samples: of a rank.
    """
    copies, own_ids = tables.replicated & tables.is_table & tables.trained, samples * tables.ids_per_sample
    if not copies.any():
        return None
    whole, named = (of[copies].sum() for of in (_whole(tables), _named(tables, own_ids) * (tables.columns + 2)))
    widest = float(wire_item(tables)[tables.is_table].max())
    beside = may_go_beside(env) and env.table_size * whole * widest <= BESIDE_BYTES
    if not beside and env.size * named > min(2, env.size) * whole:
        return Travel.WHOLE
    if not may_go_beside(env) or _come(tables, env, own_ids, widest)[copies].sum() > BESIDE_BYTES:
        return Travel.AFTER
    sharded = tables.is_table & ~tables.replicated
    if not sharded.any():
        return Travel.ONLY
    own = float(_result_bytes(tables, samples, widest)[sharded & tables.pooled].sum())
    return Travel.ALONE if own >= APART_BYTES else Travel.BESIDE


def ways(tables: ShardTable, env: ShardingEnv, samples: float) -> list[Travel]:
    """How they may travel, whichever of these parameters a plan copies; some that no plan has may be among them.

    Args:
        tables: all parameters, each as one shard.
        samples: of a rank.
    """
    is_table = tables.is_table.astype(bool)
    if not is_table.any():
        return []
    if not may_go_beside(env):
        return [Travel.AFTER, Travel.WHOLE]
    widest = float(wire_item(tables)[is_table].max())
    come = _come(tables, env, samples * tables.ids_per_sample, widest)[is_table]
    own = (_result_bytes(tables, samples, widest) * tables.pooled)[is_table]
    found = [Travel.ALONE] if own.sum() >= APART_BYTES else []
    found.append(Travel.AFTER if come.sum() > BESIDE_BYTES else Travel.ONLY)
    if env.table_size * float(_whole(tables)[is_table].sum()) * widest > BESIDE_BYTES:
        found.append(Travel.WHOLE)
    # nearly all is copied: but for results of less than so many bytes, of which those with most gradients, in parts
    order = np.argsort(-come / np.maximum(own, 1e-9), kind="stable")
    before = np.cumsum(own[order]) - own[order]
    kept = 1 - np.clip((APART_BYTES - before) / np.maximum(own[order], 1e-9), 0, 1)
    if (come[order] * kept).sum() <= BESIDE_BYTES:
        found.append(Travel.BESIDE)
    return found


def conditions(way: Travel, tables: ShardTable, env: ShardingEnv, samples: float) -> list[tuple[Array, float]]:
    """What is so of every plan whose copies travel that way: a sum over copied tables, and how much it is at least.

    Args:
        tables: all parameters, each as one shard.
        samples: of a rank.

    Returns:
        (parameters,) what each adds that is copied, and the least sum.
    """
    is_table = tables.is_table.astype(np.float64)
    own_ids, widest = samples * tables.ids_per_sample, float((wire_item(tables) * is_table).max())
    whole, come = _whole(tables) * is_table, _come(tables, env, own_ids, widest) * is_table
    saved = env.size * _named(tables, own_ids) * (tables.columns + 2) * is_table - min(2, env.size) * whole
    own = _result_bytes(tables, samples, widest) * tables.pooled * is_table
    if not may_go_beside(env):
        return [(saved, 0.0) if way is Travel.WHOLE else (-saved, 0.0)]
    few = -come, -float(BESIDE_BYTES)
    return {
        Travel.BESIDE: [few, (own, float(own.sum()) - APART_BYTES)],
        Travel.ALONE: [few, (-own, APART_BYTES - float(own.sum()))],
        Travel.ONLY: [few, (is_table, float(is_table.sum()))],
        Travel.AFTER: [(come, float(BESIDE_BYTES))],
        Travel.WHOLE: [(saved, 0.0), (env.table_size * widest * whole, float(BESIDE_BYTES))],
    }[way]


def each_by_rows(p: ShardTable, own_ids: Array, env: ShardingEnv) -> Flags:
    """Whether of a copied table those rows travel that batches name, not all, were it the only one.

    Rows alone go beside other gradients, from each rank to each; an all-reduce sends all of a table twice.
    """
    whole, named = _whole(p), _named(p, own_ids) * (p.columns + 2)
    beside = may_go_beside(env) & (env.table_size * whole * wire_item(p) <= BESIDE_BYTES)
    return p.replicated & p.is_table & (beside | (env.size * named <= min(2, env.size) * whole))


def may_go_beside(env: ShardingEnv) -> bool:
    """Whether gradients of copies may travel at the time of others: neither hosts nor replicas."""
    hosts = env.table_size // env.table_shape[-1]
    return env.size == env.table_size and (hosts == 1 or env.table_shape[-1] == 1)


def wire_item(p: ShardTable) -> Array:
    """Bytes of an element of results, and of gradients: 16-bit tables give results of 32."""
    return np.where(p.is_table, np.maximum(p.item_bytes, _LEAST_WIRE_BYTES), p.item_bytes)


def _whole(p: ShardTable) -> Array:
    """Elements of a table's gradient, and which rows were touched."""
    return p.rows * (p.columns + p.is_table) * p.trained


def _come(p: ShardTable, env: ShardingEnv, own_ids: Array, widest: float) -> Array:
    """Bytes of all ranks' rows of a copied table, with their numbers."""
    found: Array = _named(p, own_ids) * (p.columns * widest + 8) * env.table_size
    return found


def _result_bytes(p: ShardTable, samples: float, widest: float) -> Array:
    """Of a rank's own results."""
    found: Array = samples * p.features * p.columns * widest
    return found


def _named(p: ShardTable, own_ids: Array) -> Array:
    """Rows of which a rank's batch may leave a gradient, at most."""
    return np.minimum(own_ids, p.rows) * p.trained
