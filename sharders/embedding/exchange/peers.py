"""Who exchanges with whom on a mesh: channels and orders, found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from dmp import ShardingEnv
from sharders.channel import Channel, GroupChannel, Transport
from sharders.embedding.exchange.codec import AS_COMPUTED, Codecs


@dataclass(frozen=True)
class Peers:
    """Channels and orders of one rank.

    [Note: order of sources] Samples received are kept in the order in which results leave: the other ranks' in rank
    order, then this rank's own, which do not travel. With two stages the first goes along the inner axis, so samples
    are ordered by inner rank, then by outer rank, in both cases this rank's own last. All replicas of a shard keep the
    same order, so they add the same numbers in the same order.

    Args:
        exchange: between the ranks that ids are sent to: the table ranks, or with shared gradients all replicas' ranks.
        headers: the same with connections of its own, see [Note: parted ranks] of channel.py.
        ranks: the mesh's number of each rank of `exchange`.
        table_ranks: table rank of each.
        data_ranks: which of the different batches each rank of `exchange` has; equal along tensor axes.
        own: indices in `exchange` of this replica's ranks, in the order of sources.
        everyone: the same of all replicas, one replica after the other.
        by_table_rank: indices in `exchange` of this replica's ranks, by table rank.
        table: between the table ranks of this replica.
        inner, outer: along the innermost table axis and along the others where results travel in two stages; else
            `table`, and this process alone.
        replicas: between the replicas of this rank's shards.
        num_replicas: replicas that share gradients.
        codecs: of what travels.
    """

    exchange: Channel
    headers: Channel
    ranks: list[int]
    table_ranks: list[int]
    data_ranks: list[int]
    own: list[int]
    everyone: list[int]
    by_table_rank: list[int]
    table: Channel
    inner: Channel
    outer: Channel
    replicas: Channel
    num_replicas: int
    codecs: Codecs

    @property
    def is_flat(self) -> bool:
        """Whether gradients of data-parallel tables can travel beside those of rows: one axis, one replica."""
        return self.outer.size == 1 and self.num_replicas == 1

    @property
    def sources(self) -> list[int]:
        """Indices in `exchange` of the ranks whose gradients this rank's shards get, in the order of sources."""
        return self.everyone if self.num_replicas > 1 else self.own

    def in_one_stage(self) -> Peers:
        """The same ranks where results go straight to those of the samples."""
        if self.outer.size == 1:
            return self
        order, each = own_last(self.table), len(self.own)

        def ordered(of_replica: Sequence[int]) -> list[int]:
            by_table_rank = {self.table_ranks[i]: i for i in of_replica}
            return [by_table_rank[rank] for rank in order]

        replicas = [self.everyone[first : first + each] for first in range(0, len(self.everyone), each)]
        everyone = [i for of_replica in replicas for i in ordered(of_replica)]
        alone = GroupChannel(None)
        return replace(self, own=ordered(self.own), everyone=everyone, inner=self.table, outer=alone)


def find_peers(
    env: ShardingEnv, share_gradients: bool, by_stages: bool, transport: Transport, codecs: Codecs = AS_COMPUTED
) -> Peers:
    """Peers of this rank; the first call for a mesh is collective.

    Args:
        share_gradients: replicas of the tables exchange ids and gradients at every step.
        by_stages: results travel in two stages where there are two table axes.
        transport: opens the channels.
        codecs: of what travels on them.
    """
    shape = env.table_shape
    num_replicas = env.size // env.table_size
    shared = share_gradients and num_replicas > 1
    members = [r for r in range(env.size) if shared or env.replica_of(r) == env.replica_of(env.rank)]
    place = {(env.replica_of(r), env.table_rank_of(r)): i for i, r in enumerate(members)}
    axes = env.axes("shard", "tensor")
    table = transport(env.table_group, "tables")
    inner, outer = table, transport(None, "tables")
    if by_stages and len(shape) > 1 and shape[-1] > 1 and prod(shape[:-1]) > 1:
        inner, outer = (transport(env.axis_group(*of), "tables") for of in (axes[-1:], axes[:-1]))
    order = [o * inner.size + i for i in own_last(inner) for o in own_last(outer)]
    replica = env.replica_of(env.rank)
    return Peers(
        exchange=transport(env.group(), "tables") if shared else table,
        headers=transport(env.group() if shared else env.table_group, "headers"),
        ranks=members,
        table_ranks=[env.table_rank_of(r) for r in members],
        data_ranks=[env.place_of(r, "replicate", "shard") for r in members],
        own=[place[replica, t] for t in order],
        everyone=[place[r, t] for r in sorted({r for r, _ in place}) for t in order],
        by_table_rank=[place[replica, t] for t in range(env.table_size)],
        table=table,
        inner=inner,
        outer=outer,
        replicas=transport(env.group("replicate") if num_replicas > 1 else None, "tables"),
        num_replicas=num_replicas if shared else 1,
        codecs=codecs,
    )


def own_last(channel: Channel) -> list[int]:
    """Ranks of a channel, this one last."""
    return [i for i in range(channel.size) if i != channel.rank] + [channel.rank]
