"""Seconds of collectives along mesh axes: rings whose ranks on one host share their way out of it.

Ranks are taken to lie on hosts in the mesh's order. Of a group with several ranks on each host every rank carries its
part of the bytes over its own network card, and the rest inside the host at the same time; the slower of the two is the
time. A latency is paid for each doubling of the group, inside the host and between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from dmp import ShardingEnv
from planner.costs.topology import PerAxis, Topology

_CUDA_RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Ring:
    """Ranks that gather and reduce together.

    Args:
        size: of them.
        seconds_per_byte: of an all-gather or a reduce-scatter, for each byte of the whole.
        latency: of one.
    """

    size: int
    seconds_per_byte: float
    latency: float

    @classmethod
    def along(cls, axes: Sequence[str], env: ShardingEnv, topology: Topology) -> Ring:
        """The group along these axes of the env."""
        sizes = dict(zip(env.names, env.shape, strict=True))
        long = [axis for axis in axes if sizes[axis] > 1]
        if not long:
            return cls(1, 0.0, 0.0)
        links = topology.links(env)
        of_host = host_ranks(env, topology)
        size, local = prod(sizes[axis] for axis in long), 1
        for axis in long:
            stride = prod(env.shape[env.names.index(axis) + 1 :])
            local *= max(1, min(sizes[axis], ceil(of_host / stride)))
        hosts = max(1, size // local)
        outer = min(links[axis].bandwidth for axis in long)
        first = max(links[axis].latency for axis in long)
        if hosts == 1:
            return cls(size, (1 - 1 / size) / outer, first * log2(size))
        local = size // hosts
        inner = _inside(topology, topology.link_bandwidth, max(link.bandwidth for link in links.values()))
        if inner <= outer:
            inner = outer * local  # nobody says: as fast as the cards of the host together
        near = _inside(topology, topology.link_latency, min(link.latency for link in links.values()))
        seconds = max((1 - 1 / hosts) / (local * outer), (1 - 1 / local) / inner)
        return cls(size, seconds, first * log2(hosts) + near * log2(local))

    def gather(self, size: float, times: float = 1) -> float:
        """Seconds of all-gathers, or of reduce-scatters, of `size` bytes altogether.

        Args:
            times: how many.
        """
        return size * self.seconds_per_byte + times * self.latency if self.size > 1 else 0.0

    def all_reduce(self, size: float, times: float = 1) -> float:
        """Seconds of all-reduces of `size` bytes altogether."""
        return 2 * size * self.seconds_per_byte + times * self.latency if self.size > 1 else 0.0


def host_ranks(env: ShardingEnv, topology: Topology) -> int:
    """Ranks on one host, as the topology or the axis called `host` says; else 8 of CUDA, or all."""
    if topology.ranks_per_host is not None:
        return topology.ranks_per_host
    if "host" in env.names:
        return prod(env.shape[env.names.index("host") + 1 :])
    return min(env.size, _CUDA_RANKS_PER_HOST) if env.device_type == "cuda" else env.size


def _inside(topology: Topology, figures: PerAxis, best: float) -> float:
    """The figure inside a host: the second of a pair, or the best of any axis."""
    is_pair = topology.ranks_per_host is not None
    return float(figures[1]) if is_pair and isinstance(figures, Sequence) else best
