"""`Topology`: how fast and how large the machine under each rank is. Bytes, seconds, per rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmp import ShardingEnv, shown
from planner.arguments import is_number, positive, several, whole
from planner.costs import topology_file
from planner.costs.speeds import Speeds

_log = logging.getLogger("dmp")

_PER_AXIS = "expected a number, one per mesh axis (outer first), or a dict axis name -> number"
_PAIR = "with ranks_per_host, expected a number, a pair (between hosts, inside one), or a dict axis name -> number"
_CUDA_RANKS_PER_HOST = 8
_H100_BYTES = 80e9
_NEEDED = ("memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "link_latency")
_PER_AXIS_FIGURES = ("link_bandwidth", "link_latency", "collective_bandwidth", "collective_latency")
_LEAST, _MOST = 1e-15, 1e30
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
        reserved_fraction: part of the memory that neither tables nor what dense weights hold between steps may take.
            What comes and goes within a step, dense activations and gathered weights, comes out of it first, and what
            it does not cover out of the rest. A third of it stays free for what nobody models: the allocator's waste,
            buffers of the libraries, the optimizer step's temporaries.
        ranks_per_host: where it is given, a pair of link figures is (between hosts, inside one), whatever the mesh: an
            axis that stays inside so many consecutive ranks, or lies inside an axis called `host`, is inside.
        product_flops_16: of the device, per second, in matrix products of 16-bit numbers as they are reached; None: as
            `flops`.
        collective_bandwidth, collective_latency: of the collectives of dense weights, in the same forms, where they go
            another way than what tables exchange, as gloo's connections do beside shared memory; None: as the links.
        shared_links: part of an exchange's time that goes by what all ranks send together, as where they share cores
            that do it; the rest by what the busiest rank has.
        speeds: of the parts of the data path; by default all go at the memory's bandwidth.
        name: of the machine.
        sources: where figures come from: name of a field -> words.

    Raises:
        ValueError: a figure that is not positive, a reserved fraction outside [0, 1), a source of no field.

    Example:
        >>> Topology(80e9, 2e12, 6e13, link_bandwidth=(5e10, 4.5e11), link_latency=(2e-5, 1e-5))
    """

    memory_bytes: float
    memory_bandwidth: float
    flops: float
    link_bandwidth: PerAxis
    link_latency: PerAxis
    reserved_fraction: float = 0.15
    ranks_per_host: int | None = None
    product_flops_16: float | None = None
    collective_bandwidth: PerAxis | None = None
    collective_latency: PerAxis | None = None
    shared_links: float = 0.0
    speeds: Speeds | None = None
    name: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bandwidth", "flops"):
            _check_figure(name, getattr(self, name))
        if not is_number(self.reserved_fraction, or_zero=True) or self.reserved_fraction >= 1:
            raise ValueError(f"Topology.reserved_fraction must be in [0, 1); got {shown(self.reserved_fraction)}")
        if self.product_flops_16 is not None:
            _check_figure("product_flops_16", self.product_flops_16)
        if not is_number(self.shared_links, or_zero=True) or self.shared_links > 1:
            raise ValueError(f"Topology.shared_links must be in [0, 1]; got {shown(self.shared_links)}")
        if isinstance(self.speeds, Mapping):
            object.__setattr__(self, "speeds", Speeds.of_figures(self.speeds) if self.speeds else None)
        if not isinstance(self.speeds, Speeds | None):
            raise ValueError(f"Topology.speeds must be Speeds, or a dict of its figures; got {shown(self.speeds)}")
        if self.ranks_per_host is not None:
            whole("Topology.ranks_per_host", self.ranks_per_host)
        for name in _PER_AXIS_FIGURES:
            if name in _NEEDED or getattr(self, name) is not None:
                self._check_per_axis(name, getattr(self, name))
        known = [f.name for f in fields(self)]
        if not isinstance(self.sources, Mapping) or not set(self.sources) <= set(known):
            raise ValueError(
                f"Topology.sources must be a dict of field -> words, of {known}; got {shown(self.sources)}"
            )

    def _check_per_axis(self, name: str, values: PerAxis) -> None:
        if isinstance(values, str) or not isinstance(values, (int, float, Sequence, Mapping)):
            raise ValueError(f"Topology.{name}: {_PER_AXIS}; got {shown(values)}")
        for value in several(values.values() if isinstance(values, Mapping) else values, (int, float)):
            _check_figure(name, value, or_zero=name.endswith("latency"))
        if self.ranks_per_host is not None and isinstance(values, Sequence) and len(values) != 2:
            raise ValueError(f"Topology.{name}: {_PAIR}; got {shown(values)}")

    @classmethod
    def load(cls, path_or_name: str | Path) -> Topology:
        """A machine that was saved, or one of those that come with the planner, by name (`topology_names()`).

        What was not measured yet when it was saved is logged, for it costs nothing in plans.

        Raises:
            ValueError: no such file or machine, another kind of file, or a version, field or figure that is not known.
        """
        where, figures = topology_file.read(path_or_name)
        known = [f.name for f in fields(cls)]
        for names, words in ((figures.keys() - set(known), "has fields"), (set(_NEEDED) - figures.keys(), "lacks")):
            if names:
                raise ValueError(f"{where} {words} {sorted(names)}; expected {_NEEDED}, and maybe others of {known}")
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in figures.items()}
        try:
            found = cls(**given)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error
        speeds = figures.get("speeds") or {}
        if speeds and (lacking := [f.name for f in fields(Speeds) if f.name not in speeds]):
            _log.warning(
                "%s has no speeds of %s, which cost nothing in its plans: `python -m dmp calibrate` measures them",
                *(where, ", ".join(lacking)),
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `load`."""
        figures = asdict(self)
        topology_file.write(path, {name: value for name, value in figures.items() if value not in (None, "", {})})

    @classmethod
    def of(cls, env: ShardingEnv) -> Topology:
        """Usual figures for the env's device type.

        `cpu`: the machine that comes as `cpu`, all ranks on one of its hosts, through whose memory they exchange, and
        share it (`LOCAL_WORLD_SIZE` of them where a launcher set it, else all but the axis called `host`). Others: H100
        boxes of 8, one 50 GB/s network card per GPU; an axis that stays inside 8 consecutive ranks, or lies inside an
        axis called `host`, is NVLink. Their memory is what this process's own device has, where the mesh is a real one,
        and 80 GB offline; that an accelerator is none of CUDA's is said once. `calibrate` measures another.

        Raises:
            ValueError: no device type that torch knows.
        """
        if env.device_type == "cpu":
            hosts = dict(zip(env.names, env.shape, strict=True)).get("host", 1)
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, env.size // hosts)
            box = _cpu_box()
            inside: dict[str, Any] = {name: getattr(box, name)[-1] for name in _PER_AXIS_FIGURES}
            memory_bytes = host_memory_bytes() / local_ranks
            return replace(box, memory_bytes=memory_bytes, **inside, ranks_per_host=None, name="", sources={})
        fast = [_is_inside_host(env, i, _CUDA_RANKS_PER_HOST) for i in range(len(env.shape))]
        return cls(
            memory_bytes=_device_memory_bytes(env),
            memory_bandwidth=2.5e12,
            flops=6e13,
            link_bandwidth=tuple(450e9 if f else 50e9 for f in fast),
            link_latency=tuple(1e-5 if f else 2.5e-5 for f in fast),
            product_flops_16=4e14,
        )

    @cached_property
    def of_collectives(self) -> Topology:
        """The machine whose links are as fast as collectives of dense weights find them."""
        bandwidth, latency = self.collective_bandwidth, self.collective_latency
        return replace(
            self,
            link_bandwidth=self.link_bandwidth if bandwidth is None else bandwidth,
            link_latency=self.link_latency if latency is None else latency,
        )

    @property
    def usable_bytes(self) -> float:
        """Memory of a rank that tables and their buffers may take."""
        return self.memory_bytes * (1 - self.reserved_fraction)

    @property
    def reserved_bytes(self) -> float:
        """The rest of its memory."""
        return self.memory_bytes * self.reserved_fraction

    def product_flops(self, item_bytes: int) -> float:
        """Per second, in matrix products of numbers of so many bytes."""
        return self.product_flops_16 if item_bytes <= 2 and self.product_flops_16 is not None else self.flops

    @cached_property
    def speeds_of_parts(self) -> Speeds:
        """`speeds`, or what follows from the memory's bandwidth."""
        return self.speeds or Speeds.of_memory(self.memory_bandwidth, self.flops)

    def links(self, env: ShardingEnv) -> dict[str, Link]:
        """Link along each axis of the env's mesh, outer first.

        Raises:
            ValueError: figures, those of collectives too, for another number of axes, or for other names.
        """
        given = {name: values for name in _PER_AXIS_FIGURES if (values := getattr(self, name)) is not None}
        figures = {name: self._per_axis(name, values, env) for name, values in given.items()}
        links = zip(env.names, figures["link_bandwidth"], figures["link_latency"], strict=True)
        return {name: Link(bandwidth, latency) for name, bandwidth, latency in links}

    def _per_axis(self, name: str, values: PerAxis, env: ShardingEnv) -> list[float]:
        if isinstance(values, (int, float)):
            return [float(values)] * len(env.names)
        if isinstance(values, Mapping):
            if set(values) != set(env.names):
                raise ValueError(f"Topology.{name} names the axes {shown(list(values))}; the mesh has {env.names}")
            return [float(values[axis]) for axis in env.names]
        if self.ranks_per_host is not None:
            return [float(values[_is_inside_host(env, i, self.ranks_per_host)]) for i in range(len(env.names))]
        if len(values) != len(env.names):
            raise ValueError(
                f"Topology.{name} has {len(values)} figures; the mesh has {len(env.names)} axes {env.names}"
            )
        return [float(v) for v in values]


def check_topology(topology: Any) -> None:
    """Raise `ValueError` unless it is a `Topology`."""
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology must be a planner.Topology, as Topology.load('h100') gives one; got {shown(topology)}"
        )


@cache
def _cpu_box() -> Topology:
    return Topology.load(topology_file.machine("cpu"))


def _check_figure(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise `ValueError` unless it is a figure that sums and quotients can be made of."""
    positive(f"Topology.{name}", value, or_zero=or_zero)
    if not (_LEAST <= value <= _MOST or (or_zero and value == 0)):
        raise ValueError(f"Topology.{name} must be from {_LEAST:g} to {_MOST:g}; got {shown(value)}")


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


def _device_memory_bytes(env: ShardingEnv) -> float:
    """Memory that this rank's accelerator has, or that an H100 has where there is none to ask, as offline."""
    try:
        torch.device(env.device_type)
    except RuntimeError as error:
        raise ValueError(
            f"no default topology for device type {env.device_type!r}, which torch does not know; "
            "pass ShardingPlanner(topology=Topology(...)) with its figures"
        ) from error
    if env.device_type != "cuda":
        _say_borrowed(env.device_type)
    if env.mesh is None and env.size > 1:
        return _H100_BYTES
    try:
        return float(torch.accelerator.get_memory_info(env.device)[1]) or _H100_BYTES
    except (AttributeError, RuntimeError, ValueError):  # an older torch, a device that does not tell, or none at all
        return _H100_BYTES


@cache
def _say_borrowed(device_type: str) -> None:
    _log.warning(
        "no figures are known of %s devices: plans are made with an H100's speeds; `Topology.load` or "
        "`ShardingPlanner(topology=Topology(...))` gives others",
        device_type,
    )


def _is_inside_host(env: ShardingEnv, axis: int, ranks_per_host: int) -> bool:
    if env.names[axis] == "host":
        return False
    return "host" in env.names[:axis] or prod(env.shape[axis:]) <= ranks_per_host
