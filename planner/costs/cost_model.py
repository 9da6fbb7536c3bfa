"""`CostModel`: seconds by phase and bytes of every shard of every option, all at once.

[Note: phases]
A step has *phases*; ranks wait for each other between them, so a step takes the sum over phases of the slowest rank,
not the slowest rank's sum. A shard costs its own rank (`local`), and a little on every rank (`everywhere`): what is
done where the samples are. Pooled results travel in two exchanges where the tables lie along two axes: inside the host,
where row blocks are summed, then between hosts, rank by rank, so that all ranks of a host carry an equal part of
whatever lies anywhere on it: a phase that they share.

[Note: the longer side]
All ranks have as many samples, so every rank sends as many ids, and receives as many results, as all do on average; the
owner's side of each exchange (ids received, results sent, gradients received) is as long on average, and longer on the
rank that has most. So the owner's side is the one that is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmp import ShardingEnv
from planner.costs.links import Axis, all_reduce, all_to_all, axes_of, latency
from planner.costs.protocol import ALL_REDUCE, BYTES, EXCHANGE, Array, Integers, ShardTable
from planner.costs.topology import Topology

PHASES = (
    *("input a2a", "lookup fwd", "output a2a", "output a2a", "grad a2a", "grad a2a", "lookup bwd", "replica sync"),
)
"""Of the two stages of results the first is inside the host, of gradients the second."""
INPUT, FORWARD, OUTPUT, OUTPUT_OUTER, GRADIENT_OUTER, GRADIENT, BACKWARD, SYNC = range(8)
_BESIDE_BYTES = 64 << 20
"""A larger sum of data-parallel gradients does not travel beside the others."""


@dataclass(frozen=True)
class CostModel:
    """Modelled time and memory of a step: T = sum over phases of the maximum over ranks. A `CostProtocol`.

    Per rank and phase: ids to the owners; rows read and bags written at memory bandwidth (or additions, where those are
    slower); bags to the samples' ranks, and placed there; their gradients back; rows and optimizer state updated. A
    collective costs a latency (once a plan: all tables travel together), which grows with the logarithm of the ranks,
    plus bytes over bandwidth on the slowest link it crosses; what a rank has for itself does not travel. Pooled row
    blocks send one partial sum for every bag, also for bags they hold no id of; one of no rows costs nothing. Copies
    along replicate axes get the ids of all in the input exchange, and each other's gradients after the backward one
    (`replica sync`). The gradient of a data-parallel table travels beside the others in the gradient exchange, as a sum
    of its own in `replica sync` where it is large, or there are hosts or copies.

    Memory: weights, optimizer state as the parameter's info says, gradients of parameters without an in-backward
    optimizer (with Adam's state, as theirs is not known) and of data-parallel ones; ids, bags, results and their
    gradients as they are kept until the end of the backward pass, with the buffers of the largest exchange.

    Not modelled: dense layers, the optimizer step outside the backward pass, overlap of communication and compute,
    skewed ids (rows are taken as equally likely) and the caches that help with them, cache tiers (tables in host memory
    behind a device's cache: there are none here), imbalance of batch sizes, weights of weighted features, allocator
    waste, the gather along tensor axes (the same for every plan), averages of copies every so many steps, and
    contention between links. A parameter that is not a table is taken as read once forward and twice backward.

    Args:
        id_bytes: of an id, and of a length, on the wire: 8 for tables of 2^31 rows or of float64.
    """

    id_bytes: int = 4

    @property
    def phases(self) -> tuple[str, ...]:
        """Names, in the order of a step."""
        return PHASES

    def spans(self, env: ShardingEnv) -> Integers:
        """See `CostProtocol`: the ranks of a host share what it sends to other hosts."""
        spans = np.ones(len(PHASES), dtype=np.int64)
        spans[[OUTPUT_OUTER, GRADIENT_OUTER]] = _inner_size(env)
        return spans

    def costs(self, shards: ShardTable, env: ShardingEnv, topology: Topology, batch_size: float) -> tuple[Array, Array]:
        """See `CostProtocol`."""
        p, ranks, replicas = shards, env.table_size, env.size // env.table_size
        own_samples = batch_size / env.tensor_size
        samples = np.where(p.replicated, own_samples, own_samples * ranks) * p.is_table * (p.row_share > 0)
        away = (~p.replicated).astype(np.float64)

        # A row block gets its share of the ids, and pooled it sends every bag still.
        weight_bytes = p.rows * p.columns * p.item_bytes
        row_bytes = p.columns * p.item_bytes
        ids = samples * p.ids_per_sample * p.row_share
        bags = np.where(p.pooled, samples * p.features, ids)
        id_bytes = (ids + samples * p.features) * self.id_bytes
        bag_bytes = bags * row_bytes

        local = np.zeros((len(p), len(PHASES) + 1))
        everywhere = np.zeros_like(local)
        local[:, INPUT] = id_bytes * replicas * all_to_all(axes_of(env, topology)) * away

        read = np.where(p.is_table, ids * (row_bytes + self.id_bytes) + bag_bytes, weight_bytes)
        local[:, FORWARD] = np.maximum(read / topology.memory_bandwidth, ids * p.columns / topology.flops)

        self._add_results(local, everywhere, p, bag_bytes * away, env, topology)
        self._add_sums(local, p, bag_bytes * away, env, topology)

        # An update reads its gradient and reads and writes its row and the row's state. Dense gradients are written
        # and read whole; a data-parallel table's rows are updated from them.
        whole = p.replicated | ~p.is_table
        updates = ids * np.where(p.replicated, 1, replicas)
        state_bytes = p.columns * p.state_per_element + p.state_per_row
        dense = p.dense_gradient | whole
        update_bytes = updates * (3 * row_bytes + np.where(dense, 0, 2 * state_bytes))
        dense_bytes = np.where(dense, 2 * weight_bytes, 0) + np.where(
            p.replicated & ~p.dense_gradient, weight_bytes + 2 * p.rows * state_bytes, 0
        )
        local[:, BACKWARD] = (update_bytes + dense_bytes) / topology.memory_bandwidth

        kept = np.where(p.dense_gradient | p.replicated, weight_bytes, 0)
        local[:, BYTES] = weight_bytes + p.rows * state_bytes + kept + 2 * id_bytes * replicas + 2 * bag_bytes
        everywhere[:, BYTES] = 3 * bag_bytes / ranks * away
        return local, everywhere

    def setups(self, env: ShardingEnv, topology: Topology) -> Array:
        """See `CostProtocol`: sizes and ids, results, gradients; and what a sum of its own takes."""
        seconds = np.zeros((2, len(PHASES)))
        inner, outer = _stages(env, topology)
        replicas = axes_of(env, topology, "replicate")
        exchange = latency(axes_of(env, topology))
        seconds[EXCHANGE, [INPUT, OUTPUT, OUTPUT_OUTER]] = 2 * exchange, latency(inner), latency(outer)
        seconds[EXCHANGE, [GRADIENT, GRADIENT_OUTER, SYNC]] = latency(inner), latency(outer), latency(replicas)
        if outer or replicas:
            seconds[ALL_REDUCE, SYNC] = 2 * exchange
        return seconds

    def _add_results(
        self, local: Array, everywhere: Array, p: ShardTable, bag_bytes: Array, env: ShardingEnv, topology: Topology
    ) -> None:
        """Results there and gradients back: exchanges, and the copies where samples are."""
        inner, outer = _stages(env, topology)
        copied = 2 / topology.memory_bandwidth  # read and written
        direct = bag_bytes * all_to_all(axes_of(env, topology, "shard", "tensor"))
        if not outer:
            local[:, [OUTPUT, GRADIENT]] = direct[:, None]
            everywhere[:, [OUTPUT, GRADIENT]] = (bag_bytes * copied / env.table_size)[:, None]
            return
        in_stages = bag_bytes * p.pooled
        local[:, [OUTPUT, GRADIENT]] = np.where(p.pooled, in_stages * all_to_all(inner), direct)[:, None]
        # What lies on a host is summed by each of its ranks for its part of the samples, which then sends the sum on.
        summed = in_stages / _inner_size(env)
        between = summed * (p.host_share * all_to_all(outer) + copied)
        local[:, [OUTPUT_OUTER, GRADIENT_OUTER]] = between[:, None]
        placed = bag_bytes * np.where(p.pooled, p.host_share, 1) * copied / env.table_size
        everywhere[:, [OUTPUT_OUTER, GRADIENT_OUTER]] = placed[:, None]

    def _add_sums(self, local: Array, p: ShardTable, bag_bytes: Array, env: ShardingEnv, topology: Topology) -> None:
        """What copies of shards, and tables that are whole on every rank, exchange to stay equal."""
        replicate = axes_of(env, topology, "replicate")
        replicas = env.size // env.table_size
        local[:, SYNC] = bag_bytes * replicas * all_to_all(replicate)
        gradient = p.rows * (p.columns + p.is_table) * p.item_bytes * p.replicated  # and which rows were touched
        if replicas > 1 or _stages(env, topology)[1]:
            beside = np.zeros(len(p), dtype=bool)
        else:
            beside = gradient * env.table_size <= _BESIDE_BYTES
        sent = gradient * env.table_size * all_to_all(axes_of(env, topology, "shard", "tensor"))
        local[:, GRADIENT] += np.where(beside, sent, 0)
        local[:, SYNC] += np.where(beside, 0, gradient * all_reduce(axes_of(env, topology)))


def _inner_size(env: ShardingEnv) -> int:
    """Ranks along the innermost table axis where results travel in two stages, else 1."""
    hosts, inner = env.table_size // env.table_shape[-1], env.table_shape[-1]
    return inner if hosts > 1 and inner > 1 else 1


def _stages(env: ShardingEnv, topology: Topology) -> tuple[list[Axis], list[Axis]]:
    """The axes that pooled results travel along first, and those of a second stage, if there is one."""
    axes = axes_of(env, topology, "shard", "tensor")
    return (axes[-1:], axes[:-1]) if _inner_size(env) > 1 else (axes, [])
