"""What a step of given layouts costs under a model: no choice, no search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ParameterInfo, Shard, ShardingEnv, is_replicated
from planner.costs.cost_model import goes_straight
from planner.costs.protocol import BYTES, Array, CostProtocol, ShardInfo, ShardTable, kinds_of, setups_of
from planner.costs.topology import Topology

Below = Callable[[NDArray[np.int64]], Array]
"""The share of a table's ids that names a row below each of these."""


class Placed(NamedTuple):
    """A parameter, where it lies, and how many ids a sample has for it."""

    info: ParameterInfo
    layout: Layout
    ids_per_sample: float


def loads(
    model: CostProtocol, placed: Sequence[Placed], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """(table ranks, phases + 1): seconds by phase and bytes of each rank, without what is paid once."""
    cuts = [Cut(whole(info, ids), layout.shards(info.shape, env), info.shape) for info, layout, ids in placed]
    return loads_of_cuts(model, cuts, env, topology, batch_size)


class Cut(NamedTuple):
    """A parameter and its shards.

    Args:
        known: of it as one shard, see `whole`.
        below: which of its rows ids name; None: all alike.
    """

    known: ShardInfo
    shards: Sequence[Shard]
    shape: Sequence[int]
    below: Below | None = None


def whole(info: ParameterInfo, ids_per_sample: float, named_rows: float = 0.0) -> ShardInfo:
    """A parameter as one shard."""
    shard = Shard((0,) * len(info.shape), info.shape, 0)
    return ShardInfo.of(info, shard, ids_per_sample, False)._replace(named_rows=named_rows)


def loads_of_cuts(
    model: CostProtocol, cuts: Sequence[Cut], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """See `loads`."""
    infos, at = _infos(cuts, env)
    local, everywhere = model.costs(infos, env, topology, batch_size)
    found = np.zeros((env.table_size, local.shape[1]))
    found += everywhere.sum(0) + local[at < 0].sum(0)
    spans = model.spans(env)
    for phase in [*range(len(spans)), BYTES]:
        span = int(spans[phase]) if phase != BYTES else 1
        groups = np.zeros(env.table_size // span)
        np.add.at(groups, at[at >= 0] // span, local[at >= 0, phase])
        found[:, phase] += np.repeat(groups, span)
    return found


def _infos(cuts: Sequence[Cut], env: ShardingEnv) -> tuple[ShardTable, NDArray[np.int64]]:
    """All shards, and the rank of each; -1 of what every rank has whole."""
    infos: list[ShardInfo] = []
    ranks: list[int] = []
    inner = env.table_shape[-1] if len(env.table_shape) > 1 else env.table_size
    for known, shards, shape, below in cuts:
        if is_replicated(shards, tuple(shape)):
            infos.append(known._replace(replicated=True))
            ranks.append(-1)
            continue
        columns = [(shard.offsets[1:], shard.sizes[1:]) for shard in shards]
        on_host = Counter((shard.rank // inner, of) for shard, of in zip(shards, columns, strict=True))
        blocks = Counter(columns)
        for shard, of in zip(shards, columns, strict=True):
            share = 1 / on_host[shard.rank // inner, of] if len(env.table_shape) > 1 else 1.0
            infos.append(_shard_of(known, shard, below)._replace(host_share=share, row_blocks=blocks[of]))
            ranks.append(shard.rank)
    return ShardTable.of(infos), np.array(ranks, dtype=np.int64)


def _shard_of(known: ShardInfo, shard: Shard, below: Below | None) -> ShardInfo:
    rows = shard.sizes[0] if shard.sizes else 1
    share = rows / known.table_rows
    if below is not None:
        first, stop = below(np.array([shard.offsets[0], shard.offsets[0] + rows]))
        share = float(stop - first)
    return known._replace(rows=rows, columns=prod(shard.sizes[1:]), row_share=share)


def phase_seconds(
    model: CostProtocol, placed: Sequence[Placed], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """(phases,): the slowest rank of each, with what is paid once."""
    slowest: Array = loads(model, placed, env, topology, batch_size)[:, :BYTES].max(0)
    needs = 0
    for info, layout, ids in placed:
        shards = layout.shards(info.shape, env)
        infos, _ = _infos([Cut(whole(info, ids), shards, info.shape)], env)
        rows = [shard.sizes[:1] for shard in shards]
        has_row_blocks = any(of != tuple(info.shape[:1]) for of in rows)
        needs |= kinds_of(info, is_replicated(shards, info.shape), has_row_blocks, goes_straight(infos, env)[0].item())
    for kind, seconds in enumerate(setups_of(model, env, topology, (of.info for of in placed))):
        slowest = slowest + seconds * (needs >> kind & 1)
    return slowest
