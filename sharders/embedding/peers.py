"""Who exchanges with whom on a mesh: groups and orders, found once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from dmp import ShardingEnv, ranks


@dataclass(frozen=True)
class Peers:
    """Groups and orders of one rank.

    [Note: order of sources] Samples received are kept in the order in which results leave: the other ranks' in rank
    order, then this rank's own, which do not travel. With two stages the first goes along the inner axis, so samples
    are ordered by inner rank, then by outer rank, in both cases this rank's own last. All copies of a piece keep the
    same order, so they add the same numbers in the same order.

    [Note: parted ranks] gloo ends the process where two all-to-alls of different sizes meet. A rank may be at its next
    forward, or in a collective of the program's, while another is in its backward: so what tables exchange has
    connections of its own, and headers, which come first in every forward, have others. Ranks that part there wait,
    until the watchdog tells them.

    Args:
        exchange: ranks that ids are sent to: the table ranks, or with shared gradients all copies' ranks.
        headers: the same with connections of their own, see [Note: parted ranks].
        table_ranks: table rank of each rank of `exchange`.
        data_ranks: which of the different batches each rank of `exchange` has; equal along tensor axes.
        own: indices in `exchange` of this copy's ranks, in the order of sources.
        everyone: the same of all copies, one copy after the other.
        by_table_rank: indices in `exchange` of this copy's ranks, by table rank.
        table: the table ranks of this copy.
        inner, outer: groups along the innermost table axis and along the others; None, None with one table axis.
        inner_size, outer_size: their sizes.
        replicas: group of the copies of this rank's pieces, or None.
        num_replicas: copies that share gradients.
    """

    exchange: dist.ProcessGroup | None
    headers: dist.ProcessGroup | None
    table_ranks: list[int]
    data_ranks: list[int]
    own: list[int]
    everyone: list[int]
    by_table_rank: list[int]
    table: dist.ProcessGroup | None
    table_rank: int
    inner: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None
    inner_size: int
    outer_size: int
    replicas: dist.ProcessGroup | None
    num_replicas: int


def find_peers(env: ShardingEnv, share_gradients: bool, by_stages: bool) -> Peers:
    """Peers of this rank; the first call for a mesh is collective.

    Args:
        share_gradients: copies of the tables exchange ids and gradients at every step.
        by_stages: results travel in two stages where there are two table axes.
    """
    shape = env.table_shape
    num_replicas = env.size // env.table_size
    shared = share_gradients and num_replicas > 1
    members = (
        range(env.size) if shared else [r for r in range(env.size) if env.replica_of(r) == env.replica_of(env.rank)]
    )
    place = {(env.replica_of(r), env.table_rank_of(r)): i for i, r in enumerate(members)}
    two_stages = by_stages and len(shape) > 1 and shape[-1] > 1 and prod(shape[:-1]) > 1
    inner_size, outer_size = (shape[-1], prod(shape[:-1])) if two_stages else (env.table_size, 1)
    my_outer, my_inner = divmod(env.table_rank, inner_size)
    order = [
        outer * inner_size + inner
        for inner in _own_last(inner_size, my_inner)
        for outer in _own_last(outer_size, my_outer)
    ]
    copy = env.replica_of(env.rank)
    copies = sorted({replica for replica, _ in place})
    axes = env.axes("shard", "tensor")
    exchange = env.group() if shared else env.table_group
    return Peers(
        exchange=_own(exchange),
        headers=exchange if exchange is None or _own(exchange) is exchange else ranks.control_group(exchange),
        table_ranks=[env.table_rank_of(r) for r in members],
        data_ranks=[place_of(env, r, "replicate", "shard") for r in members],
        own=[place[copy, t] for t in order],
        everyone=[place[c, t] for c in copies for t in order],
        by_table_rank=[place[copy, t] for t in range(env.table_size)],
        table=_own(env.table_group),
        table_rank=env.table_rank,
        inner=_own(env.axis_group(axes[-1])) if two_stages else None,
        outer=_own(env.axis_group(*axes[:-1])) if two_stages else None,
        inner_size=inner_size,
        outer_size=outer_size,
        replicas=_own(env.group("replicate")) if num_replicas > 1 else None,
        num_replicas=num_replicas if shared else 1,
    )


def place_of(env: ShardingEnv, rank: int, *roles: str) -> int:
    """Place of the process at `rank` along the axes with these roles, row-major."""
    place, step = 0, 1
    for size, role in zip(reversed(env.shape), reversed(env.roles), strict=True):
        rank, at = divmod(rank, size)
        if role in roles:
            place, step = place + at * step, step * size
    return place


def _own(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The same ranks, for tables alone: see [Note: parted ranks]."""
    return None if group is None or dist.get_world_size(group) == 1 else ranks.own_group(group, "tables")


def _own_last(size: int, own: int) -> list[int]:
    return [i for i in range(size) if i != own] + [own]
