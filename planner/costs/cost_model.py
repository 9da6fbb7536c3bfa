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

[Note: rows of copies] Of the gradients of copied tables those rows travel that batches name, but where an all-reduce
of whole tables is fewer bytes. The data path settles that for all such tables of a call together, and so does
`settled`, of a plan. A model that is not settled takes each table as if it were the only one: what one costs must not
depend on which others it is asked about with.

[Note: filled bags] Of pooled row blocks only those bags travel that have ids there, where these are few; else all do,
which costs less for each. On one axis the data path settles that for all tables of a call together, the model table by
table. Where there are hosts both settle it table by table: such bags go straight to the ranks of their samples, where
that is fewer bytes than two stages, no more between hosts, and hardly more on any link there; they travel at the same
time as the others, and share links with them. Plans count on it where it gains clearly, else on two stages, which are
no fewer bytes. Such an exchange over all ranks takes longer than two stages do, however little travels in it: a set-up
of plans with such tables. How many have ids it takes from
the mean: as if all bags were of one length, which is never too few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dmp import ShardingEnv
from planner.costs.copies import (
    BESIDE_BYTES,
    Travel,
    conditions,
    each_by_rows,
    may_go_beside,
    travel,
    ways,
    wire_item,
)
from planner.costs.links import Axis, all_to_all, axes_of, latency
from planner.costs.protocol import (
    ALL_REDUCE,
    AWAY,
    BYTES,
    COPIES_WIDTH,
    EXCHANGE,
    OF_GRADIENTS,
    SPLIT,
    STRAIGHT,
    WHOLE,
    WIDTH,
    Array,
    Flags,
    Integers,
    ShardTable,
)
from planner.costs.rings import Ring
from planner.costs.topology import Topology

PHASES = (
    *("input a2a", "lookup fwd", "output a2a", "output a2a", "grad a2a", "grad a2a", "lookup bwd", "replica sync"),
)
"""Of the two stages of results the first is inside the host, of gradients the second."""
INPUT, FORWARD, OUTPUT, OUTPUT_OUTER, GRADIENT_OUTER, GRADIENT, BACKWARD, SYNC = range(8)
MOST_FILLED = 0.7
"""Where more of the bags of row blocks have ids there, all of them travel."""
EVEN = 1.25
"""Of what each rank of a host would send of its sums as much straight, at most. These figures are the data path's."""
CLEARLY = 4
"""So many times fewer bytes must go between hosts for plans to count on it, but of single ids: of many choices that
gain less the search makes worse plans than without them."""


@dataclass(frozen=True)
class CostModel:
    """Modelled time and memory of a step: T = sum over phases of the maximum over ranks. A `CostProtocol`.

    Per rank and phase: ids to the owners; rows read and bags written at memory bandwidth (or additions, where those are
    slower); bags to the samples' ranks, and placed there; their gradients back; rows and optimizer state updated. A
    collective costs a latency (once a plan: all tables travel together), which grows with the logarithm of the ranks,
    plus bytes over bandwidth on the slowest link it crosses; what a rank has for itself does not travel. Pooled row
    blocks send one sum for every bag, or only those that they hold an id of where these are few (see
    [Note: filled bags] beside it); one of no rows costs nothing. Copies along replicate axes get the ids of all in the
    input exchange, and each other's gradients after the backward one (`replica sync`). Gradients of data-parallel
    tables travel while others do, in `replica sync` where they are many, or there are hosts or copies: by the rows that
    batches name, there only where these are no more bytes than an all-reduce of whole tables sends, see
    [Note: rows of copies] beside it.

    Memory: weights, optimizer state as the parameter's info says, gradients of parameters without an in-backward
    optimizer (with Adam's state, as theirs is not known) and of data-parallel ones with the buffers of their sum; ids,
    results and gradients as they lie there in the backward pass, when they are most.

    Not modelled: dense layers, the optimizer step outside the backward pass, overlap of communication and compute, the
    caches that help where a few rows have most ids (that fewer are read and updated then is, where batches were
    observed; else all are equally likely), cache tiers (tables in host memory behind a device's cache), imbalance of
    batch sizes, weights of weighted features, allocator waste, the gather along tensor axes (the same for every plan),
    averages of copies every few steps, contention between links, gradients of frozen tables (which travel with those of
    their collection), and what mixing takes: where some tables are cut by rows and others not, all gradients are copied
    once more; tables too narrow for a line of the cache keep a rank's other results in it. Bags are taken as of one
    length each, which a CPU foresees; what is no table as read once forward and twice backward.

    Args:
        id_bytes: of an id, and of a length, on the wire: 8 for tables of 2^31 rows or of float64.
        travel: how gradients of copied tables do; None: each by itself, see `settled`.
    """

    id_bytes: int = 4
    travel: Travel | None = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Names, in the order of a step."""
        return PHASES

    def spans(self, env: ShardingEnv) -> Integers:
        """See `CostProtocol`: the ranks of a host share what it sends to other hosts."""
        spans = np.ones(len(PHASES), dtype=np.int64)
        spans[[OUTPUT_OUTER, GRADIENT_OUTER]] = _inner_size(env)
        return spans

    def settled(self, tables: ShardTable, env: ShardingEnv, batch_size: float) -> CostModel:
        """See `settled_of`: as copied tables of such a plan exchange their gradients."""
        return replace(self, travel=travel(tables, env, batch_size / env.tensor_size))

    def ways(self, tables: ShardTable, env: ShardingEnv, batch_size: float) -> tuple[CostModel, ...]:
        """See `ways_of`."""
        return tuple(replace(self, travel=way) for way in ways(tables, env, batch_size / env.tensor_size))

    def conditions(self, tables: ShardTable, env: ShardingEnv, batch_size: float) -> list[tuple[Array, float]]:
        """See `conditions_of`."""
        return [] if self.travel is None else conditions(self.travel, tables, env, batch_size / env.tensor_size)

    def costs(self, shards: ShardTable, env: ShardingEnv, topology: Topology, batch_size: float) -> tuple[Array, Array]:
        """See `CostProtocol`."""
        work = _Work.of(shards, env, batch_size, self)
        cost = _Cost(np.zeros((len(shards), len(PHASES) + 1)), np.zeros((len(shards), len(PHASES) + 1)), env, topology)
        _add_ids(cost, shards, work)
        _add_lookups(cost, shards, work)
        _add_results(cost, shards, work)
        _add_sums(cost, shards, work, self)
        _add_bytes(cost, shards, work)
        takes_part = shards.trained[:, None] | ~np.isin([*PHASES, ""], OF_GRADIENTS)
        return cost.local * takes_part, cost.everywhere * takes_part

    def setups(self, env: ShardingEnv, topology: Topology) -> Array:
        """See `CostProtocol`: headers; ids, results, gradients of what is sharded; and what a sum of its own takes."""
        seconds, speeds = np.zeros((8, len(PHASES))), topology.speeds_of_parts
        inner, outer = _stages(env, topology)
        replicas = axes_of(env, topology, "replicate")
        exchange = latency(axes_of(env, topology))
        seconds[EXCHANGE, INPUT] = exchange
        seconds[AWAY, [INPUT, OUTPUT, OUTPUT_OUTER]] = exchange, latency(inner), latency(outer)
        if outer or replicas:
            seconds[AWAY, [GRADIENT, GRADIENT_OUTER, SYNC]] = latency(inner), latency(outer), latency(replicas)
        else:  # one exchange may have both the gradients of rows and those of copies
            seconds[EXCHANGE, GRADIENT] = latency(inner)
        alone = 2 if self.travel is Travel.WHOLE or (self.travel is None and not may_go_beside(env)) else 1
        seconds[ALL_REDUCE, GRADIENT] = exchange * (self.travel is Travel.ALONE)
        seconds[ALL_REDUCE, SYNC] = exchange * alone * (not self.is_meanwhile(env))
        parts = np.array([INPUT, FORWARD, BACKWARD])
        group = speeds.group, speeds.group_results, speeds.group_gradients
        seconds[EXCHANGE, parts] += speeds.step, speeds.step_results, speeds.step_gradients
        if outer:  # a host's ranks add up bags, so that row blocks are one group with others
            seconds[EXCHANGE, parts] += group
            all_at_once = latency(axes_of(env, topology, "shard", "tensor"))
            beyond = max(0.0, all_at_once - latency(inner) - latency(outer))
            seconds[STRAIGHT, [OUTPUT, GRADIENT]] = beyond
        else:
            seconds[ALL_REDUCE, parts] += speeds.copies, speeds.copies_results, speeds.copies_gradients
            seconds[[WHOLE, SPLIT], parts[:, None]] += np.array(group)[:, None]
            seconds[SPLIT, parts] += speeds.split, speeds.split_results, speeds.split_gradients
            seconds[COPIES_WIDTH, BACKWARD] = speeds.copies_width
            seconds[WIDTH, parts] = speeds.width, speeds.width_results, speeds.width_gradients
        return seconds

    def is_meanwhile(self, env: ShardingEnv) -> bool:
        """Whether gradients of copies travel while others do; of a model that is not settled whether they may."""
        return may_go_beside(env) if self.travel is None else self.travel in (Travel.BESIDE, Travel.ALONE, Travel.ONLY)


@dataclass(frozen=True, eq=False)
class _Work:
    """What travels and is looked up of each shard; all (shards,). Own: of one rank's samples, else of all that come."""

    replicas: int
    own_ids: Array
    own_bags: Array
    """Lengths that a rank sends, of every feature and sample."""
    ids: Array
    lengths: Array
    id_bytes: Array
    row_bytes: Array
    wire_bytes: Array
    """Of a row as it travels: 16-bit tables give results of 32."""
    weight_bytes: Array
    state_bytes: Array
    """Of a row."""
    bags: Array
    """Results: bags, or rows where they are not pooled. Of row blocks those that travel."""
    bag_bytes: Array
    rows: Array
    """Of each shard that ids name, as if they were equally likely."""
    own_rows: Array
    """The same for the ids of one rank."""
    touched: Array
    """Ids of a rank's batch in a replicated table, where its gradient travels by rows; else 0."""
    gradient: Array
    """Bytes of a replicated table's gradient that a rank has for each other one."""
    beside: Flags
    """Whether these travel while other gradients do."""

    @classmethod
    def of(cls, p: ShardTable, env: ShardingEnv, batch_size: float, model: CostModel) -> _Work:
        own = batch_size / env.tensor_size * p.is_table * (p.rows > 0)
        samples = own * np.where(p.replicated, 1, env.table_size)
        # A row block gets its share of the ids, and pooled it sends every bag still.
        ids = samples * p.ids_per_sample * p.row_share
        lengths = samples * p.features
        bags = np.where(p.pooled, lengths * filled(p, env), ids)
        row_bytes, wire_bytes = p.columns * p.item_bytes, p.columns * wire_item(p)
        own_ids = own * p.ids_per_sample * p.row_share
        by_rows = each_by_rows(p, own_ids, env)
        if model.travel is not None:
            by_rows = p.replicated & p.is_table & (model.travel is not Travel.WHOLE)
        whole = p.rows * (p.columns + p.is_table) * wire_item(p)  # and which rows were touched
        gradient = np.where(by_rows, np.minimum(own_ids, p.rows) * (wire_bytes + 8), whole) * (p.replicated & p.trained)
        beside = p.replicated & may_go_beside(env) & (gradient * env.table_size <= BESIDE_BYTES)
        if model.travel is not None:
            beside = np.where(p.is_table, p.replicated & model.is_meanwhile(env), beside)
        return cls(
            replicas=env.size // env.table_size,
            own_ids=own_ids,
            own_bags=own * p.features,
            ids=ids,
            lengths=lengths,
            id_bytes=(ids + lengths) * model.id_bytes,
            row_bytes=row_bytes,
            wire_bytes=wire_bytes,
            weight_bytes=p.rows * row_bytes,
            state_bytes=p.columns * p.state_per_element + p.state_per_row,
            bags=bags,
            bag_bytes=bags * wire_bytes,
            rows=_named(p, p.named_rows),
            own_rows=_named(p, np.where(p.named_rows_of_rank > 0, p.named_rows_of_rank, p.named_rows)),
            touched=np.where(by_rows & p.trained, own_ids, 0),
            gradient=gradient,
            beside=beside,
        )


class _Cost(NamedTuple):
    """Costs as they are added up, and where they arise."""

    local: Array
    everywhere: Array
    env: ShardingEnv
    topology: Topology

    def exchange(self, phase: int, seconds: Array, places: int) -> None:
        """Add an exchange that keeps its rank (or host, one of `places`) busy so long: some of it all alike."""
        shared = self.topology.shared_links
        self.local[:, phase] += seconds * (1 - shared)
        self.everywhere[:, phase] += seconds * shared / places


def _add_ids(cost: _Cost, p: ShardTable, work: _Work) -> None:
    """Ids made ready where samples are, sent to the owners of their rows, and put in order there."""
    local, everywhere, env, topology = cost
    speeds, away = topology.speeds_of_parts, ~p.replicated
    sent = work.own_ids * (speeds.send_id + speeds.split_id * (p.rows < p.table_rows))
    slots = p.features * (work.lengths > 0)
    everywhere[:, INPUT] += sent + work.own_bags * speeds.send_bag + slots * speeds.send_slot
    cost.exchange(INPUT, work.id_bytes * away * work.replicas * all_to_all(axes_of(env, topology)), env.table_size)
    come = work.ids * speeds.receive_id + work.lengths * speeds.receive_bag
    local[:, FORWARD] += come + slots * speeds.receive_slot


def _add_lookups(cost: _Cost, p: ShardTable, work: _Work) -> None:
    """Rows read and added up; gradients of a row's ids added up, and the row updated, or a whole gradient written."""
    local, _, env, topology = cost
    speeds = topology.speeds_of_parts
    row = speeds.lookup_row.each + work.row_bytes * speeds.lookup_row.byte
    each_id = speeds.lookup_id.each + work.row_bytes * speeds.lookup_id.byte
    bag = speeds.lookup_bag.each + work.row_bytes * speeds.lookup_bag.byte
    new = distinct(work.rows, work.ids)
    first = speeds.lookup_first.each + work.row_bytes * speeds.lookup_first.byte
    looked_up = new * row + work.ids * each_id + work.bags * bag
    # Of the first ids of bags as many are new as of all.
    looked_up += np.minimum(work.bags, work.ids) * new / np.maximum(work.ids, 1e-9) * first
    local[:, FORWARD] += np.where(p.is_table, looked_up, work.weight_bytes * speeds.lookup_id.byte)

    by_state = np.where(p.state_per_element > 0, 2, np.where(p.state_per_row > 0, 1, 0))
    by_rows = (work.touched > 0) & ~p.dense_gradient
    by_state = np.where(p.replicated & ~by_rows, 3, by_state)
    rows = np.array([speeds.plain_row, speeds.rowwise_row, speeds.pointwise_row, speeds.whole_row])[by_state]
    ids = np.array([speeds.plain_id, speeds.rowwise_id, speeds.pointwise_id, speeds.whole_id])[by_state]
    is_whole = p.dense_gradient | (p.replicated & ~by_rows) | ~p.is_table
    come = distinct(work.own_rows, work.touched) * env.size  # rows with their sums, of all ranks
    local[:, BACKWARD] += come * (speeds.touched_row.each + work.row_bytes * speeds.touched_row.byte)
    # Every rank has the gradients of all when it updates a replicated table; only its own ids are added up by it.
    named = np.where(p.replicated, work.ids * env.size, work.ids * work.replicas)
    added = np.where(p.replicated, work.ids, named)
    updated = rows[:, 0] + (work.row_bytes + work.state_bytes) * rows[:, 1]
    local[:, BACKWARD] += np.where(p.dense_gradient, 0, distinct(work.rows, named) * updated)
    local[:, BACKWARD] += added * (ids[:, 0] + work.row_bytes * ids[:, 1])
    bags = work.bags * np.where(p.replicated, 1, work.replicas) * p.is_table
    local[:, BACKWARD] += bags * (speeds.update_bag.each + work.row_bytes * speeds.update_bag.byte)
    local[:, BACKWARD] += p.features * speeds.update_slot * (work.lengths > 0)
    local[:, BACKWARD] += is_whole * (p.rows * speeds.gradient.each + work.weight_bytes * speeds.gradient.byte)


def _add_results(cost: _Cost, p: ShardTable, work: _Work) -> None:
    """Results there and gradients back: exchanges, and the copies where samples are."""
    local, everywhere, env, topology = cost
    inner, outer = _stages(env, topology)
    ranks, inner_size = env.table_size, _inner_size(env)
    bag_bytes = work.bag_bytes * ~p.replicated
    direct = bag_bytes * all_to_all(axes_of(env, topology, "shard", "tensor"))
    speeds, is_straight = topology.speeds_of_parts, goes_straight(p, env)
    bags, of_parts = work.bags * ~p.replicated, bag_bytes * (is_straight if outer else _in_parts(p))
    # A rank's own bags are written where they belong, but for sums of a host; gradients are made ready, but of copies.
    # Kernels may read its own where the model left them, for the first time: that takes about as long.
    to_place = np.where(p.pooled, 1 - 1 / ranks, 1)
    for first, second, part, copied, each_bag, of_part in (
        (OUTPUT, OUTPUT_OUTER, to_place, speeds.place, speeds.place_bag, speeds.place_part),
        (GRADIENT, GRADIENT_OUTER, 1.0, speeds.pack, speeds.pack_bag, speeds.pack_part),
    ):
        placed, added = (bag_bytes * copied + bags * each_bag) * part, of_parts * of_part
        if not outer:
            cost.exchange(first, direct, ranks)
            everywhere[:, first] += (placed + added) / ranks
            continue
        is_staged, host_share = p.pooled & ~is_straight, np.where(is_straight, 1, p.host_share)
        near = np.where(is_straight, inner_size / ranks, 1) * all_to_all(inner)
        cost.exchange(first, np.where(p.pooled, bag_bytes * near, direct), ranks)
        # What lies on a host is summed by each of its ranks for its part of the samples, which then sends the sum on;
        # what goes straight loads no rank's link more.
        each = bag_bytes * p.pooled / inner_size
        cost.exchange(second, each * host_share * all_to_all(outer), ranks // inner_size)
        local[:, second] += placed / inner_size * is_staged
        everywhere[:, second] += (placed * np.where(is_staged, p.host_share, 1) + added) / ranks
    local[:, BACKWARD] += np.where(p.replicated & p.is_table, work.bag_bytes * speeds.take, 0)


def _add_sums(cost: _Cost, p: ShardTable, work: _Work, model: CostModel) -> None:
    """What copies of shards, and tables that are whole on every rank, exchange to stay equal."""
    local, _, env, topology = cost
    replicate = axes_of(env, topology, "replicate")
    sent = work.bag_bytes * ~p.replicated * work.replicas * all_to_all(replicate)
    cost.exchange(SYNC, sent, env.table_size)
    speeds, gradient = topology.speeds_of_parts, work.gradient
    # There is room for a row for each id; those are written that are there, once for each other rank.
    written = np.where(work.touched > 0, distinct(work.own_rows, work.touched) * (work.wire_bytes + 8), gradient)
    pack = written * speeds.pack * (env.size - 1)
    to_all = env.table_size * gradient * all_to_all(axes_of(env, topology, "shard", "tensor")) + pack
    if model.travel is Travel.BESIDE:  # all that there is room for is copied, of each other rank
        to_all = to_all + gradient * (env.table_size - 1) * speeds.fetch * (work.touched > 0)
    local[:, GRADIENT] += np.where(work.beside, to_all, 0)
    summed = 2 * Ring.along(env.names, env, topology).seconds_per_byte  # the set-up has the latency
    by_rows = env.size * gradient * all_to_all(axes_of(env, topology)) + pack
    local[:, SYNC] += np.where(work.beside, 0, np.where(work.touched > 0, by_rows, gradient * summed))


def _add_bytes(cost: _Cost, p: ShardTable, work: _Work) -> None:
    """Memory: what stays, and the most that there is of a step at once, in the backward pass."""
    ranks, staged = cost.env.table_size, (_inner_size(cost.env) > 1) & ~goes_straight(p, cost.env)
    # A whole gradient is made, joined to the others', sent to each rank, received from each, and added up.
    is_whole = p.dense_gradient | (p.replicated & p.trained & (work.touched == 0))
    to_each = np.where(work.beside | (work.touched > 0), 2 * ranks, 1)
    whole = np.where(is_whole, work.weight_bytes, 0) + work.gradient * to_each
    # Gradients lie where they came, with those of other copies; where there are hosts, their sums too.
    came = work.bag_bytes * (1 + staged + 2 * (work.replicas - 1)) + 3 * work.id_bytes * work.replicas
    cost.local[:, BYTES] = work.weight_bytes + p.rows * work.state_bytes + whole + came
    # Where samples are: the results of a table once and their gradient, and of each shard what is sent back.
    results = 2 * np.where(p.pooled, p.row_share * work.lengths * work.wire_bytes, work.bag_bytes)
    cost.local[:, BYTES] += results * p.replicated
    cost.everywhere[:, BYTES] = (results + work.bag_bytes) / ranks * ~p.replicated


def filled(p: ShardTable, env: ShardingEnv) -> Array:
    """Part of each shard's bags that are looked up and travel, see [Note: filled bags]."""
    are_few = goes_straight(p, env) if _inner_size(env) > 1 else _in_parts(p)
    return np.where(are_few, with_ids(p, p.row_share), 1.0)


def _in_parts(p: ShardTable) -> Flags:
    """Whether those bags alone of a table travel that have ids in a row block, on one axis: of all its blocks alike."""
    return is_cut(p) & (_of_even_blocks(p) <= MOST_FILLED)


def goes_straight(p: ShardTable, env: ShardingEnv) -> Flags:
    """Whether a table's bags go to the ranks of their samples where others' have two stages, as far as plans count on
    it: for all its shards alike.

    What travels is counted as of even row blocks: all bytes, those between hosts, and those of a rank's link there.
    """
    inner = _inner_size(env)
    ranks, hosts = env.table_size, env.table_size // inner
    part = _of_even_blocks(p)
    staged = (inner - 1) / inner + p.host_share * (hosts - 1) / hosts
    is_fewer = (part <= p.host_share) & (part * (ranks - 1) / ranks <= MOST_FILLED * staged)
    is_counted = (p.ids_per_sample <= p.features) | (CLEARLY * part <= p.host_share)
    return is_cut(p) & is_fewer & is_counted & (inner * part <= EVEN) & (inner > 1)


def is_cut(p: ShardTable) -> Flags:
    """Whether bags may have ids in several shards."""
    return p.pooled & (p.rows < p.table_rows) & ~p.replicated


def with_ids(p: ShardTable, share: Array) -> Array:
    """Part of the bags that have one in such a share of their table's rows."""
    ids = p.ids_per_sample / np.maximum(p.features, 1)
    found: Array = np.where(ids > 1, 1 - (1 - share) ** np.maximum(ids, 1), ids * share)
    return found


def _of_even_blocks(p: ShardTable) -> Array:
    """Part of a table's bags that have ids in a row block, as if its blocks had as many ids each."""
    return with_ids(p, 1 / np.where(p.row_blocks > 0, p.row_blocks, p.table_rows / np.maximum(p.rows, 1)))


def _named(p: ShardTable, rows: Array) -> Array:
    """Rows of each shard that ids name: so many of its table, or all where nobody has counted them."""
    return np.where(rows > 0, np.minimum(rows * p.row_share, p.rows), p.rows)


def distinct(rows: Array, ids: Array) -> Array:
    """Expected number of different rows among so many ids, each of which is any row with the same probability."""
    return -rows * np.expm1(-ids / np.maximum(rows, 1))


def _inner_size(env: ShardingEnv) -> int:
    """Ranks along the innermost table axis where results travel in two stages, else 1."""
    hosts, inner = env.table_size // env.table_shape[-1], env.table_shape[-1]
    return inner if hosts > 1 and inner > 1 else 1


def _stages(env: ShardingEnv, topology: Topology) -> tuple[list[Axis], list[Axis]]:
    """The axes that pooled results travel along first, and those of a second stage, if there is one."""
    axes = axes_of(env, topology, "shard", "tensor")
    return (axes[-1:], axes[:-1]) if _inner_size(env) > 1 else (axes, [])
