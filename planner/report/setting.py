"""`Setting`: what was planned and for what: model, mesh, batch, machine. Words are made when asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from dmp import ParameterInfo, ShardingEnv
from planner.costs.topology import Topology
from planner.report.words import count, plural, size


@dataclass(frozen=True)
class Setting:
    """What a plan was made for.

    Args:
        model: class of the root module.
        axes: name, size and role of each mesh axis, outer first.
        device_type: of the mesh.
        table_shape: sizes of the axes that table ranks count over, outer first.
        batch_size: samples per data rank.
        data_ranks: ranks that have samples of their own.
        dense_parameters: elements of dense weights.
        machine: figures of the topology: memory in bytes, bytes/s, flop/s.
        links: bandwidth in bytes/s and latency in seconds along each axis.
        machine_name: of the topology, where it has one.
    """

    model: str = "model"
    axes: tuple[tuple[str, int, str], ...] = ()
    device_type: str = "cpu"
    table_shape: tuple[int, ...] = (1,)
    batch_size: int = 1
    data_ranks: int = 1
    dense_parameters: int = 0
    machine: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    machine_name: str = ""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        weights: Mapping[str, ParameterInfo],
        env: ShardingEnv,
        topology: Topology,
        batch_size: int,
    ) -> Setting:
        """The setting of a call of `ShardingPlanner.plan`."""
        figures = ("memory_bytes", "memory_bandwidth", "flops", "reserved_fraction")
        return cls(
            type(module).__name__,
            tuple(zip(env.names, env.shape, env.roles, strict=True)),
            env.device_type,
            env.table_shape,
            batch_size,
            max(1, env.size // env.tensor_size),
            sum(prod(info.shape) for info in weights.values()),
            {name: float(getattr(topology, name)) for name in figures},
            {axis: (float(link.bandwidth), float(link.latency)) for axis, link in topology.links(env).items()},
            topology.name,
        )

    @property
    def num_ranks(self) -> int:
        """Of the whole mesh."""
        return prod(length for _, length, _ in self.axes)

    @property
    def samples(self) -> int:
        """In a step, on all ranks."""
        return self.batch_size * self.data_ranks

    @property
    def hosts(self) -> int:
        """Coordinates of the outer table axis where there are two; else 1."""
        return self.table_shape[0] if len(self.table_shape) > 1 else 1

    def mesh_text(self) -> str:
        """`512 x 8 (host, local), cuda`."""
        sizes = " x ".join(str(length) for _, length, _ in self.axes) or "1"
        names = ", ".join(name if role == "shard" else f"{name}: {role}" for name, _, role in self.axes)
        return f"{sizes}{f' ({names})' if names else ''}, {self.device_type}"

    def batch_text(self) -> str:
        """`2,048 on each of 16 ranks: 32,768`."""
        return f"{self.batch_size:,} on each of {plural(self.data_ranks, 'rank')}: {self.samples:,}"

    def machine_text(self) -> str:
        """Memory, its bandwidth, flops and links in a line."""
        if not self.machine:
            return "not known"
        of: Any = self.machine
        links = ", ".join(f"{axis} {size(b)}/s {a * 1e6:.3g} us" for axis, (b, a) in self.links.items())
        name = f"{self.machine_name}, " * bool(self.machine_name)
        return (
            f"{name}{size(of['memory_bytes'])} ({of['reserved_fraction']:.0%} reserved) at "
            f"{size(of['memory_bandwidth'])}/s, {count(of['flops'])}flop/s{f'; {links}' if links else ''}"
        )
