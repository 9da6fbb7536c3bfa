"""What a step of given layouts costs under a model: no choice, no search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ParameterInfo, Shard, ShardingEnv, is_replicated, shown
from planner.costs.cost_model import goes_straight
from planner.costs.protocol import (
    BYTES,
    Array,
    CostProtocol,
    ShardInfo,
    ShardTable,
    is_pooled,
    kinds_of,
    settled_of,
    setups_of,
)
from planner.costs.topology import Topology

Below = Callable[[NDArray[np.int64]], Array]
"""The share of a table's ids that names a row below each of these."""


class Placed(NamedTuple):
    """A parameter, where it lies, how many ids a sample has for it, and which rows these name: see `ShardTable`."""

    info: ParameterInfo
    layout: Layout
    ids_per_sample: float
    named_rows: tuple[float, float] = (0.0, 0.0)


def loads(
    model: CostProtocol, placed: Sequence[Placed], env: ShardingEnv, topology: Topology, batch_size: float
) -> Array:
    """(table ranks, phases + 1): seconds by phase and bytes of each rank, without what is paid once."""
    return Step.of(placed, env).loads(model, env, topology, batch_size)


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


def whole(
    info: ParameterInfo, ids_per_sample: float, named_rows: float = 0.0, named_rows_of_rank: float = 0.0
) -> ShardInfo:
    """A parameter as one shard."""
    shard = Shard((0,) * len(info.shape), info.shape, 0)
    known = ShardInfo.of(info, shard, ids_per_sample, False)
    return known._replace(named_rows=named_rows, named_rows_of_rank=named_rows_of_rank)


@dataclass(frozen=True, eq=False)
class Step:
    """A plan's shards, made ready to be costed again and again.

    Args:
        tables: parameters as one shard each.
        shards: all of them.
        at: (shards,) rank of each; -1 of what every rank has whole.
        infos: of the parameters; empty where set-ups are not asked for.
        needs: set-ups, a bit each.
    """

    tables: ShardTable
    shards: ShardTable
    at: NDArray[np.int64]
    infos: tuple[ParameterInfo, ...] = ()
    needs: int = 0

    @classmethod
    def of(cls, placed: Sequence[Placed], env: ShardingEnv) -> Step:
        """Of whole parameters in their layouts."""
        cuts = [
            Cut(whole(info, ids, *named), layout.shards(info.shape, env), info.shape)
            for info, layout, ids, named in placed
        ]
        needs = 0
        for (info, *_), cut in zip(placed, cuts, strict=True):
            infos, _ = _infos([cut], env)
            rows = [shard.sizes[:1] for shard in cut.shards]
            has_row_blocks = any(of != tuple(info.shape[:1]) for of in rows)
            is_copied = is_replicated(cut.shards, info.shape)
            is_summed = has_row_blocks and is_pooled(info)
            needs |= int(kinds_of(np.array(is_copied), np.array(is_summed), goes_straight(infos, env)[0]))
        return replace(cls.of_cuts(cuts, env), infos=tuple(of.info for of in placed), needs=needs)

    @classmethod
    def of_cuts(cls, cuts: Sequence[Cut], env: ShardingEnv) -> Step:
        """Without set-ups."""
        tables = [of.known._replace(replicated=is_replicated(of.shards, tuple(of.shape))) for of in cuts]
        return cls(ShardTable.of(tables), *_infos(cuts, env))

    def loads(self, model: CostProtocol, env: ShardingEnv, topology: Topology, batch_size: float) -> Array:
        """See `loads`."""
        at, settled = self.at, settled_of(model, self.tables, env, batch_size)
        local, everywhere = costs_of(settled, self.shards, env, topology, batch_size)
        found = np.zeros((env.table_size, local.shape[1]))
        found += everywhere.sum(0) + local[at < 0].sum(0)
        spans = settled.spans(env)
        for phase in [*range(len(spans)), BYTES]:
            span = int(spans[phase]) if phase != BYTES else 1
            groups = np.zeros(env.table_size // span)
            np.add.at(groups, at[at >= 0] // span, local[at >= 0, phase])
            found[:, phase] += np.repeat(groups, span)
        return found

    def seconds(self, model: CostProtocol, env: ShardingEnv, topology: Topology, batch_size: float) -> Array:
        """See `phase_seconds`."""
        found: Array = self.loads(model, env, topology, batch_size)[:, :BYTES].max(0)
        settled = settled_of(model, self.tables, env, batch_size)
        for kind, seconds in enumerate(setups_of(settled, env, topology, self.infos)):
            found = found + seconds * (self.needs >> kind & 1)
        return found


def _infos(cuts: Sequence[Cut], env: ShardingEnv) -> tuple[ShardTable, NDArray[np.int64]]:
    """All shards, and the rank of each; -1 of what every rank has whole."""
    infos: list[ShardInfo] = []
    ranks: list[int] = []
    for cut in cuts:
        is_copied = is_replicated(cut.shards, tuple(cut.shape))
        infos += [cut.known._replace(replicated=True)] if is_copied else infos_of(cut, env)
        ranks += [-1] if is_copied else [shard.rank for shard in cut.shards]
    return ShardTable.of(infos), np.array(ranks, dtype=np.int64)


def infos_of(cut: Cut, env: ShardingEnv) -> list[ShardInfo]:
    """What the costs of each shard depend on, of a parameter that is not copied to all ranks.

    Of row blocks of the same columns on one host the partial sums are added up there before they leave it.
    """
    inner = env.table_shape[-1] if len(env.table_shape) > 1 else env.table_size
    columns = [(shard.offsets[1:], shard.sizes[1:]) for shard in cut.shards]
    places = [(shard.rank // inner, of) for shard, of in zip(cut.shards, columns, strict=True)]
    on_host, blocks = Counter(places if len(env.table_shape) > 1 else ()), Counter(columns)
    return [
        _shard_of(cut.known, shard, cut.below)._replace(host_share=1 / max(1, on_host[at]), row_blocks=blocks[at[1]])
        for shard, at in zip(cut.shards, places, strict=True)
    ]


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
    return Step.of(placed, env).seconds(model, env, topology, batch_size)


def costs_of(
    model: CostProtocol, shards: ShardTable, env: ShardingEnv, topology: Topology, batch_size: float
) -> tuple[Array, Array]:
    """What a model says that shards cost, see `CostProtocol.costs`.

    Raises:
        ValueError: other shapes, or figures that are none: no search ends well with them.
    """
    found = model.costs(shards, env, topology, batch_size)
    shape = (len(shards.rows), len(model.phases) + 1)
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    if not is_pair or any(np.shape(part) != shape for part in found):
        got = [np.shape(part) for part in found] if is_pair else shown(found)
        raise ValueError(f"{shown(model)}.costs must return two arrays of shape {shape}; got {got}")
    if not all(np.isfinite(part).all() and (np.asarray(part) >= 0).all() for part in found):
        raise ValueError(f"{shown(model)}.costs must return finite seconds and bytes, none below 0")
    local, everywhere = found
    return local, everywhere
