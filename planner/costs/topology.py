"""`Topology`: how fast and how large the machine under each rank is. Bytes, seconds, per rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from dmp import ShardingEnv, shown
from planner.arguments import is_number, positive, several

_PER_AXIS = "expected a number, one per mesh axis (outer first), or a dict axis name -> number"
_CUDA_RANKS_PER_HOST = 8
PerAxis = float | Sequence[float] | Mapping[str, float]


class Link(NamedTuple):
    """What connects the ranks along one mesh axis."""

    bandwidth: float
    """Bytes per second that one rank sends, and as many that it receives at the same time."""
    latency: float
    """Seconds before the first byte of a collective."""


@dataclass(frozen=True)
class Topology:
    """The machine under each rank.

    Args:
        memory_bytes: of the device.
        memory_bandwidth: of the device, bytes/s, for rows read at random.
        flops: of the device, per second, in the tables' dtype.
        link_bandwidth: bytes/s of a rank along each mesh axis: a number, one per axis (outer first), or by axis name.
        link_latency: seconds per collective along each axis, in the same forms.
        reserved_fraction: part of the memory that the planner leaves to dense parameters and the allocator.

    Raises:
        ValueError: a figure that is not positive, a reserved fraction outside [0, 1).

    Example:
        >>> Topology(80e9, 2e12, 6e13, link_bandwidth=(5e10, 4.5e11), link_latency=(2e-5, 1e-5))
    """

    memory_bytes: float
    memory_bandwidth: float
    flops: float
    link_bandwidth: PerAxis
    link_latency: PerAxis
    reserved_fraction: float = 0.15

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_bandwidth", "flops"):
            positive(f"Topology.{field}", getattr(self, field))
        if not is_number(self.reserved_fraction, or_zero=True) or self.reserved_fraction >= 1:
            raise ValueError(f"Topology.reserved_fraction must be in [0, 1); got {shown(self.reserved_fraction)}")
        for field in ("link_bandwidth", "link_latency"):
            values = getattr(self, field)
            if isinstance(values, str) or not isinstance(values, (int, float, Sequence, Mapping)):
                raise ValueError(f"Topology.{field}: {_PER_AXIS}; got {shown(values)}")
            for value in several(values.values() if isinstance(values, Mapping) else values, (int, float)):
                positive(f"Topology.{field}", value, or_zero=field == "link_latency")

    @classmethod
    def of(cls, env: ShardingEnv) -> Topology:
        """Usual figures for the env's device type.

        `cuda`: H100 boxes of 8, one 50 GB/s network card per GPU; an axis that stays inside 8 consecutive ranks, or
        lies inside an axis called `host`, is NVLink. `cpu`: gloo on one machine, whose memory the ranks on it share
        (`LOCAL_WORLD_SIZE` of them where a launcher set it, else all but the axis called `host`).

        Raises:
            ValueError: another device type.
        """
        if env.device_type == "cuda":
            fast = [_is_inside_host(env, i) for i in range(len(env.shape))]
            return cls(
                memory_bytes=80e9,
                memory_bandwidth=2.5e12,
                flops=6e13,
                link_bandwidth=tuple(450e9 if f else 50e9 for f in fast),
                link_latency=tuple(1e-5 if f else 2.5e-5 for f in fast),
            )
        if env.device_type == "cpu":
            hosts = dict(zip(env.names, env.shape, strict=True)).get("host", 1)
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, env.size // hosts)
            return cls(
                memory_bytes=host_memory_bytes() / local_ranks,
                memory_bandwidth=1.2e10,
                flops=2e10,
                link_bandwidth=2.2e9,
                link_latency=3e-4,
            )
        raise ValueError(
            f"no default topology for device type {env.device_type!r} (known: cpu, cuda); "
            "pass ShardingPlanner(topology=Topology(...)) with its figures"
        )

    @property
    def usable_bytes(self) -> float:
        """Memory of a rank that tables and their buffers may take."""
        return self.memory_bytes * (1 - self.reserved_fraction)

    def links(self, env: ShardingEnv) -> dict[str, Link]:
        """Link along each axis of the env's mesh, outer first.

        Raises:
            ValueError: figures for another number of axes, or for other names.
        """
        bandwidth = _per_axis("link_bandwidth", self.link_bandwidth, env)
        latency = _per_axis("link_latency", self.link_latency, env)
        return {name: Link(b, a) for name, b, a in zip(env.names, bandwidth, latency, strict=True)}


def host_memory_bytes() -> float:
    """Memory that this process's machine, or its container, has."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                return min(total, float(file.read()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def _is_inside_host(env: ShardingEnv, axis: int) -> bool:
    if env.names[axis] == "host":
        return False
    return "host" in env.names[:axis] or prod(env.shape[axis:]) <= _CUDA_RANKS_PER_HOST


def _per_axis(field: str, values: PerAxis, env: ShardingEnv) -> list[float]:
    if isinstance(values, (int, float)):
        return [float(values)] * len(env.names)
    if isinstance(values, Mapping):
        if set(values) != set(env.names):
            raise ValueError(f"Topology.{field} names the axes {shown(list(values))}; the mesh has {env.names}")
        return [float(values[name]) for name in env.names]
    if len(values) != len(env.names):
        raise ValueError(f"Topology.{field} has {len(values)} figures; the mesh has {len(env.names)} axes {env.names}")
    return [float(v) for v in values]
