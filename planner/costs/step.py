"""What a step of given layouts costs under a model: no choice, no search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dmp import Layout, ParameterInfo, ShardingEnv, is_replicated
from planner.costs.protocol import ALL_REDUCE, BYTES, EXCHANGE, Array, CostProtocol, ShardInfo, ShardTable
from planner.costs.topology import Topology


class Placed(NamedTuple):
    """A parameter, where it lies, and how many ids a sample has for it."""

    info: ParameterInfo
    layout: Layout
    ids_per_sample: float


def loads(
    model: CostProtocol, placed: Sequence[Placed], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """(table ranks, phases + 1): seconds by phase and bytes of each rank, without what is paid once."""
    infos: list[ShardInfo] = []
    ranks: list[int] = []
    inner = env.table_shape[-1] if len(env.table_shape) > 1 else 0
    for info, layout, ids in placed:
        shards = layout.shards(info.shape, env)
        if is_replicated(shards, info.shape):
            infos.append(ShardInfo.of(info, shards[0], ids, True))
            ranks.append(-1)
            continue
        columns = [(shard.rank // inner, shard.offsets[1:], shard.sizes[1:]) for shard in shards] if inner else []
        on_host = Counter(columns)
        for i, shard in enumerate(shards):
            infos.append(ShardInfo.of(info, shard, ids, False, 1 / on_host[columns[i]] if columns else 1.0))
            ranks.append(shard.rank)
    local, everywhere = model.costs(ShardTable.of(infos), env, topology, batch_size)
    at = np.array(ranks, dtype=np.int64)
    found = np.zeros((env.table_size, local.shape[1]))
    found += everywhere.sum(0) + local[at < 0].sum(0)
    spans = model.spans(env)
    for phase in [*range(len(spans)), BYTES]:
        span = int(spans[phase]) if phase != BYTES else 1
        groups = np.zeros(env.table_size // span)
        np.add.at(groups, at[at >= 0] // span, local[at >= 0, phase])
        found[:, phase] += np.repeat(groups, span)
    return found


def phase_seconds(
    model: CostProtocol, placed: Sequence[Placed], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """(phases,): the slowest rank of each, with what is paid once."""
    slowest: Array = loads(model, placed, env, topology, batch_size)[:, :BYTES].max(0)
    setups = model.setups(env, topology)
    if placed:
        slowest = slowest + setups[EXCHANGE]
    if any(is_replicated(p.layout.shards(p.info.shape, env), p.info.shape) for p in placed):
        slowest = slowest + setups[ALL_REDUCE]
    return slowest
