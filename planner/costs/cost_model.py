"""`CostModel`: seconds by phase and bytes of every shard of every option, all at once.

[Note: phases]
A step has five *phases*; ranks wait for each other between them, so a step takes the sum over phases of the slowest
rank, not the slowest rank's sum. A shard costs its own rank (`local`), and a little on every rank (`everywhere`): what
comes back to where the samples are. Symbols, per copy of the tables: b samples per table rank, R table ranks, N = b * R
samples, G copies (replicas).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import ParameterInfo, Shard, ShardingEnv
from planner.costs.topology import Topology

PHASES = ("input a2a", "lookup fwd", "output a2a", "grad a2a", "lookup bwd")
INPUT, FORWARD, OUTPUT, GRADIENT, BACKWARD = range(5)
BYTES = 5
"""Column of the memory, after the phases'."""
EXCHANGE, ALL_REDUCE = 0, 1
"""Kinds of set-up: a plan that exchanges anything, a plan that all-reduces anything, pays once for it."""
_LENGTH_BYTES = 4
_UNKNOWN_STATE = 2
"""Tensors of the weights' size that an optimizer of which nobody told the state is charged: Adam's."""
Array = NDArray[np.float64]


class ShardInfo(NamedTuple):
    """What the model knows of one shard of one parameter; a column each in the arrays that it works with."""

    rows: float
    columns: float
    table_rows: float
    item_bytes: float
    ids_per_sample: float
    features: float
    pooled: bool
    is_table: bool
    replicated: bool
    """Whole on every rank; this shard stands for all of them."""
    row_cut_in_host: bool
    """Other row blocks of the same columns lie on the same coordinate of the outer axis."""
    state_per_element: float
    state_per_row: float
    dense_gradient: bool

    @classmethod
    def of(
        cls, info: ParameterInfo, shard: Shard, ids_per_sample: float, replicated: bool, row_cut_in_host: bool
    ) -> ShardInfo:
        """What is known of a shard of a parameter."""
        item_bytes = info.dtype.itemsize
        per_element, per_row = info.state_bytes or (_UNKNOWN_STATE * item_bytes, 0)
        return cls(
            shard.sizes[0] if shard.sizes else 1,
            prod(shard.sizes[1:]),
            max(1, info.shape[0]) if info.shape else 1,
            item_bytes,
            ids_per_sample,
            info.num_features,
            info.pooled,
            info.kind == "table",
            replicated,
            row_cut_in_host,
            per_element,
            per_row,
            info.optimizer is None,
        )


@dataclass(frozen=True)
class CostModel:
    """Modelled time and memory of a step: T = sum over phases of the maximum over ranks.

    Per rank and phase: ids to the owners; rows read and bags written at memory bandwidth (or additions, where
    those are slower); bags to the samples' ranks; their gradients back; rows and optimizer state updated. A
    collective costs a latency (once a plan: all tables travel together) plus bytes over bandwidth on the
    slowest link it crosses; along two shard axes, row blocks on one host are summed there before they leave it.
    A rank's sends are as large as its receives on average, so the side that the owner is on is the longer one
    and the only one counted. Pooled row blocks send one partial sum for every bag, also for bags they hold no
    id of. Copies along replicate axes exchange ids and gradients with each other; `data_parallel` all-reduces a
    gradient of the table's size.

    Memory: weights, ids, bags and their gradients, and optimizer state as the parameter's info says. A parameter
    without an in-backward optimizer is charged a gradient of its size and, as the optimizer is not known, Adam's
    state. `data_parallel` keeps a gradient too.

    Not modelled: dense layers (their memory is `Topology.reserved_fraction`), the optimizer step outside the
    backward pass, overlap of communication and compute, skewed and repeated ids (rows are taken as equally
    likely and distinct), caches, sorting of ids, kernel launches, imbalance of batch sizes, weights of weighted
    features, allocator waste, the gather along tensor axes (the same for every plan), and contention between
    links. A parameter that is not a table is taken as read once forward and twice backward.

    Args:
        id_bytes: of an id on the wire.
    """

    id_bytes: int = 8

    def costs(
        self, shards: list[ShardInfo], env: ShardingEnv, topology: Topology, batch_size: float
    ) -> tuple[Array, Array]:
        """Cost of each shard.

        Args:
            batch_size: samples per data rank.

        Returns:
            `local` and `everywhere`, both (shards, 6): seconds of the five `PHASES`, then bytes.
        """
        p = _columns(shards)
        links = topology.links(env)
        ranks, replicas = env.table_size, env.size // env.table_size
        own_samples = batch_size / env.tensor_size
        samples = np.where(p["replicated"], own_samples, own_samples * ranks) * p["is_table"]

        # Rows are taken as equally likely: a row block gets its share of the ids, and pooled it sends every bag still.
        weight_bytes = p["rows"] * p["columns"] * p["item_bytes"]
        row_bytes = p["columns"] * p["item_bytes"]
        ids = samples * p["ids_per_sample"] * p["rows"] / p["table_rows"]
        bags = np.where(p["pooled"], samples * p["features"], ids)
        id_bytes = ids * self.id_bytes + samples * p["features"] * _LENGTH_BYTES
        bag_bytes = bags * row_bytes

        # Lookup, and the way there and back: data-parallel tables are looked up where the samples are.
        direct, summed = _seconds_per_byte(env, topology)
        away = ~p["replicated"]
        local = np.zeros((len(shards), BYTES + 1))
        local[:, INPUT] = id_bytes * direct * away
        read = np.where(p["is_table"], ids * (row_bytes + self.id_bytes) + bag_bytes, weight_bytes)
        local[:, FORWARD] = np.maximum(read / topology.memory_bandwidth, ids * p["columns"] / topology.flops)
        local[:, OUTPUT] = bag_bytes * np.where(p["row_cut_in_host"], summed, direct) * away

        # Gradients come as bags went. Copies then share theirs: by ids and bags, or as one sum of the whole table's.
        slowest = min((links[a].bandwidth for a in env.names), default=1.0)
        to_replica = min((links[a].bandwidth for a in env.axes("replicate")), default=1.0)
        sent_to_replicas = (replicas - 1) * (id_bytes + bag_bytes) / to_replica
        all_reduced = 2 * (1 - 1 / (ranks * replicas)) * weight_bytes / slowest
        whole = p["replicated"] | ~p["is_table"]
        local[:, GRADIENT] = local[:, OUTPUT] + np.where(p["replicated"], all_reduced, sent_to_replicas)

        # An update reads its gradient and reads and writes its row and the row's state. Dense gradients are written
        # and read whole; a data-parallel table's rows are updated from them.
        updates = ids * np.where(p["replicated"], 1, replicas)
        state_bytes = p["columns"] * p["state_per_element"] + p["state_per_row"]
        dense = p["dense_gradient"] | whole
        update_bytes = updates * (3 * row_bytes + np.where(dense, 0, 2 * state_bytes))
        dense_bytes = np.where(dense, 2 * weight_bytes, 0) + np.where(
            p["replicated"] & ~p["dense_gradient"], weight_bytes + 2 * p["rows"] * state_bytes, 0
        )
        local[:, BACKWARD] = (update_bytes + dense_bytes) / topology.memory_bandwidth

        local[:, BYTES] = (
            weight_bytes + p["rows"] * state_bytes + np.where(p["dense_gradient"] | p["replicated"], weight_bytes, 0)
        )
        local[:, BYTES] += id_bytes + 2 * bag_bytes
        everywhere = np.zeros_like(local)
        everywhere[:, OUTPUT] = 2 * bag_bytes / ranks / topology.memory_bandwidth * away
        everywhere[:, BYTES] = 2 * bag_bytes / ranks * away
        return local, everywhere

    def setups(self, env: ShardingEnv, topology: Topology) -> Array:
        """Seconds by phase, (2, 5), that a plan pays once if it exchanges anything, and if it all-reduces anything."""
        links, sizes = topology.links(env), dict(zip(env.names, env.shape, strict=True))

        def latency(*roles: str) -> float:
            return max((links[axis].latency for axis in env.axes(*roles) if sizes[axis] > 1), default=0.0)

        seconds = np.zeros((2, BYTES))
        exchange = latency("shard", "tensor")
        seconds[EXCHANGE, [INPUT, OUTPUT, GRADIENT]] = 2 * exchange, exchange, exchange + latency("replicate")
        seconds[ALL_REDUCE, GRADIENT] = 2 * latency("shard", "tensor", "replicate")
        return seconds


def _seconds_per_byte(env: ShardingEnv, topology: Topology) -> tuple[float, float]:
    """Seconds per byte that a rank spreads evenly over all table ranks: directly, and summed inside the host first."""
    links, axes = topology.links(env), env.axes("shard", "tensor")
    if not axes:
        return 0.0, 0.0
    hosts = env.table_shape[0] if len(axes) > 1 else 1
    local = env.table_size // hosts
    outer = 1 / links[axes[0]].bandwidth
    inner = 1 / min(links[a].bandwidth for a in (axes[1:] or axes))
    to_hosts, to_locals = (hosts - 1) / hosts, (local - 1) / local
    direct = max(to_hosts * outer, to_locals / hosts * inner)
    return direct, to_locals * inner + to_hosts / local * outer


def _columns(shards: list[ShardInfo]) -> dict[str, NDArray[Any]]:
    table = np.array(shards, dtype=np.float64).reshape(len(shards), len(ShardInfo._fields))
    columns: dict[str, NDArray[Any]] = {name: table[:, i] for i, name in enumerate(ShardInfo._fields)}
    for name in ("pooled", "is_table", "replicated", "row_cut_in_host", "dense_gradient"):
        columns[name] = columns[name].astype(bool)
    return columns
