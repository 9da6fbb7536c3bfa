"""Seconds per byte of exchanges, and seconds per exchange, on the links of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import NamedTuple

from dmp import ShardingEnv
from planner.costs.topology import Link, Topology


class Axis(NamedTuple):
    """An axis of the mesh that ranks exchange along."""

    size: int
    link: Link


def axes_of(env: ShardingEnv, topology: Topology, *roles: str) -> list[Axis]:
    """The axes of these roles, outer first; all of the mesh's where none is named."""
    links, sizes = topology.links(env), dict(zip(env.names, env.shape, strict=True))
    return [Axis(sizes[name], links[name]) for name in (env.axes(*roles) if roles else env.names)]


def all_to_all(axes: Sequence[Axis]) -> float:
    """Seconds per byte that a rank has for all ranks of the axes evenly, itself too, in one exchange.

    What goes to a rank crosses the outermost axis along which that is elsewhere. Axes of different bandwidths are
    different links, which work at once; those of one are the same.
    """
    ranks, by_link = prod(axis.size for axis in axes), dict[float, float]()
    for i, (size, link) in enumerate(axes):
        part = (size - 1) * prod(axis.size for axis in axes[i + 1 :]) / ranks
        by_link[link.bandwidth] = by_link.get(link.bandwidth, 0.0) + part / link.bandwidth
    return max(by_link.values(), default=0.0)


def latency(axes: Sequence[Axis]) -> float:
    """Seconds that one exchange takes however little travels: that of the slowest link for every doubling of ranks."""
    ranks = prod(axis.size for axis in axes)
    return max((axis.link.latency for axis in axes if axis.size > 1), default=0.0) * log2(max(2, ranks))
