"""`ShardingEnv`: a device mesh whose axes have roles.

[Note: axes and roles]
An *axis* is a dimension of the mesh. Its *role* says what differs along it: `shard` axes hold different samples and
different shards of the tables; `replicate` axes hold different samples and copies of the shards; `tensor` axes hold the
same samples and different shards. *Table ranks* count, row-major in mesh order, over shard and tensor axes together.

[Note: groups] Making a process group is collective, so all that an env can be asked for are made with it, on all ranks
in one order: one for each set of roles, for each axis, and for the outer table axes together. Asking only looks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmp.foreign import is_torchrecs, type_name
from dmp.ranks import entry, is_alive, watchdog

_log = logging.getLogger("dmp")
ROLES = ("replicate", "shard", "tensor")
_NAMES_OF_ROLE = {
    "replicate": ("replicate", "dp_replicate"),
    "shard": ("dp", "data", "shard", "dp_shard", "fsdp", "host", "local"),
    "tensor": ("tp", "tensor"),
}
_ROLE_OF_NAME = {name: role for role, names in _NAMES_OF_ROLE.items() for name in names}
# Shard axes along which dense parameters are copies; along others, and those of a name we do not know, they are split.
_DENSE_COPIES = ("dp", "data", "host", "local")
_UNSUPPORTED = ("pp", "pipe", "pipeline", "stage", "cp", "context", "sp", "sequence", "ep", "expert", "etp")
Axes = str | Sequence[str] | None


@dataclass(frozen=True)
class ShardingEnv:
    """Where a model runs: mesh, roles of its axes, and this process's place. Build it with the class methods.

    Args:
        mesh: the device mesh; None for `single` and `abstract`.
        device_type: `"cpu"`, `"cuda"`, ...
        names: axis names, outer first.
        shape: axis sizes, outer first.
        roles: role of each axis, one of `ROLES`.
        coordinate: this process's index along each axis.
    """

    mesh: DeviceMesh | None
    device_type: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    roles: tuple[str, ...]
    coordinate: tuple[int, ...]
    _groups: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, compare=False, repr=False)

    def __new__(cls, *args: Any, **fields: Any) -> ShardingEnv:
        """What is copied or unpickled comes without arguments.

        Raises:
            ValueError: some of the fields, as of who passes a mesh, or a world size and a rank as to TorchRec's.
        """
        if 0 < len(args) + len(fields) < 6:
            raise ValueError(
                "a ShardingEnv is made by ShardingEnv.from_mesh(mesh), ShardingEnv.from_process_group(group), or, to "
                "plan for ranks that are not here, ShardingEnv.abstract((8,), ('dp',))"
            )
        return super().__new__(cls)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, *, replicate: Axes = None, shard: Axes = None, tensor: Axes = None
    ) -> ShardingEnv:
        """Env of a mesh; the keywords name the axes of a role, and other axes have the role of their name.

        Collective over the mesh: its process groups are made here, see [Note: groups].

        Raises:
            ValueError: not a DeviceMesh, an axis without a role, two roles claiming one axis, a name that is not an
                axis, ranks out of order, or a mesh that this process is not part of.
        """
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"expected a torch DeviceMesh (see init_device_mesh); got {type_name(mesh)}: {mesh!r}")
        names = mesh.mesh_dim_names
        if names is None:
            if mesh.ndim != 1:
                raise ValueError(f"a mesh of {mesh.ndim} dims needs mesh_dim_names, so that each axis has a role")
            names = ("dp",)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this process (rank {dist.get_rank()}) is not part of the mesh {mesh}")
        order = mesh.mesh.flatten().tolist()
        if order != sorted(order):
            raise ValueError(
                f"{mesh} has its ranks in the order {str(order)[:60]}: places in torch's groups go by rank, and would "
                "be others than in the mesh. Make it with ranks in ascending order, as init_device_mesh does"
            )
        names, shape = tuple(names), tuple(mesh.shape)
        roles = _roles(names, replicate, shard, tensor)
        watchdog.start()
        groups = {axes: _group(mesh, axes) for axes in _sets_of_axes(names, roles)}
        return cls(mesh, mesh.device_type, names, shape, roles, tuple(coordinate), groups)

    @classmethod
    def from_process_group(cls, group: dist.ProcessGroup) -> ShardingEnv:
        """Env of one shard axis over the ranks of `group`, whichever they are.

        It is on the accelerator for which the group has a backend that is not gloo, else on CPUs.
        """
        if not isinstance(group, dist.ProcessGroup):
            is_left_out = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
            why = ": this process is not in the group" if is_left_out else ""
            raise ValueError(f"expected a torch.distributed ProcessGroup; got {type_name(group)}: {group!r}{why}")
        return _of_group(group)

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> ShardingEnv:
        """Env of this process alone; no process group is needed."""
        try:
            device_type = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"expected a device such as 'cpu' or 'cuda'; got {device!r}") from error
        return cls(None, device_type, ("dp",), (1,), ("shard",), (0,))

    @classmethod
    def abstract(
        cls,
        shape: Sequence[int],
        names: Sequence[str],
        device_type: str = "cuda",
        *,
        replicate: Axes = None,
        shard: Axes = None,
        tensor: Axes = None,
    ) -> ShardingEnv:
        """Env of a mesh that is not here, for planning; it has sizes but no groups."""
        shape, names = tuple(shape), tuple(names)
        if len(shape) != len(names) or not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ValueError(f"expected one positive size for each axis name; got {shape=}, {names=}")
        roles = _roles(names, replicate, shard, tensor)
        return cls(None, device_type, names, shape, roles, (0,) * len(shape))

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """As TorchRec's, of one process: `single()`.

        Raises:
            ValueError: several ranks, which need a process group to train.
        """
        if (world_size, rank) == (1, 0):
            return cls.single()
        raise ValueError(
            f"an env of {world_size} ranks without a process group (rank {rank}) runs inference on one host in "
            "TorchRec; here ranks exchange through a group: ShardingEnv.from_process_group(group). To plan alone: "
            f"ShardingEnv.abstract(({world_size},), ('dp',))"
        )

    @cached_property
    def size(self) -> int:
        """Number of processes."""
        return prod(self.shape)

    @property
    def world_size(self) -> int:
        """`size`, as TorchRec's users read it."""
        return self.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Of all ranks of the mesh, as TorchRec's users read it; None without process groups."""
        return self.group()

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """`mesh`, as TorchRec's users read it."""
        return self.mesh

    @property
    def rank(self) -> int:
        """This process's place, row-major over all axes: 0..size-1."""
        return _flatten(self.coordinate, self.shape)

    @property
    def device(self) -> torch.device:
        """Device of this process: the current accelerator of `device_type`, or the CPU."""
        if self.device_type in ("cpu", "meta"):
            return torch.device(self.device_type)
        if not torch.accelerator.is_available():
            raise ValueError(f"{self} is on {self.device_type!r}, and this process has no accelerator")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    @cached_property
    def data_size(self) -> int:
        """Number of different batches in a step: the size of the replicate and shard axes."""
        return prod(n for n, role in zip(self.shape, self.roles, strict=True) if role != "tensor")

    @cached_property
    def data_rank(self) -> int:
        """Which of the `data_size` batches this process has: what a sampler's rank must be. Equal along tensor axes."""
        return self.place_of(self.rank, "replicate", "shard")

    @cached_property
    def fully_sharded_axes(self) -> tuple[str, ...]:
        """Shard axes along which dense parameters are split too (`shard`, `dp_shard`, `fsdp`), outer first."""
        return tuple(axis for axis in self.axes("shard") if axis not in _DENSE_COPIES)

    @cached_property
    def tensor_size(self) -> int:
        """Number of ranks that hold the same samples: the size of the tensor axes."""
        return self.size // self.data_size

    @cached_property
    def table_shape(self) -> tuple[int, ...]:
        """Sizes of the shard and tensor axes, outer first; `(1,)` when there are none."""
        return tuple(self.shape[i] for i in self._indices("shard", "tensor")) or (1,)

    @cached_property
    def table_size(self) -> int:
        """Number of table ranks."""
        return prod(self.table_shape)

    @cached_property
    def table_rank(self) -> int:
        """This process's table rank."""
        return self.table_rank_of(self.rank)

    @property
    def table_group(self) -> dist.ProcessGroup | None:
        """Process group of the table ranks of one copy (no replicas); None without process groups."""
        return self.group("shard", "tensor")

    def axes(self, *roles: str) -> tuple[str, ...]:
        """Names of the axes that have one of these roles, outer first."""
        return tuple(self.names[i] for i in self._indices(*roles))

    def table_rank_of(self, rank: int) -> int:
        """Table rank of the process at `rank`."""
        return self.place_of(rank, "shard", "tensor")

    def replica_of(self, rank: int) -> int:
        """Index of the copy of the tables that the process at `rank` belongs to."""
        return self.place_of(rank, "replicate")

    def place_of(self, rank: int, *roles: str) -> int:
        """Place of the process at `rank` along the axes with these roles together, row-major."""
        coordinate = _unflatten(rank, self.shape)
        indices = self._indices(*roles)
        return _flatten([coordinate[i] for i in indices], [self.shape[i] for i in indices])

    def submesh(self, *roles: str) -> DeviceMesh | None:
        """Sub-mesh of the axes with these roles, or None when there is no mesh or no such axis."""
        axes = self.axes(*roles)
        if self.mesh is None or not axes:
            return None
        return self.mesh if len(axes) == len(self.names) else self.mesh[axes]

    def group(self, *roles: str) -> dist.ProcessGroup | None:
        """Process group over the axes with these roles, all of them by default.

        Returns:
            None when there is no mesh, or no axis has one of the roles.
        """
        return self.axis_group(*self.axes(*(roles or ROLES)))

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """Process group of all ranks; None where this is the only one: it has nobody to exchange anything with."""
        return self.group() if self.size > 1 else None

    def axis_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Process group along these axes together.

        Raises:
            ValueError: no axes of the mesh, or axes together for which no group was made, see [Note: groups].
        """
        for axis in axes:
            if axis not in self.names:
                raise ValueError(f"the mesh has axes {self.names}; there is no {axis!r}")
        if self.mesh is None or not axes:
            return None
        if axes not in self._groups:
            raise ValueError(f"there is no group along {axes}: groups go along {[*self._groups]}")
        return self._groups[axes]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingEnv:
        """Copies of a model share its process groups."""
        return self

    def __str__(self) -> str:
        axes = ", ".join(f"{n}={s} ({r})" for n, s, r in zip(self.names, self.shape, self.roles, strict=True))
        return f"ShardingEnv({axes}; {self.device_type}, rank {self.rank} of {self.size})"

    def _indices(self, *roles: str) -> list[int]:
        unknown = [r for r in roles if r not in ROLES]
        if unknown:
            raise ValueError(f"a role is one of {ROLES}; got {unknown[0]!r}")
        return [i for i, role in enumerate(self.roles) if role in roles]


def has_role(axis: str) -> bool:
    """Whether an axis of that name has a role without being given one."""
    return axis in _ROLE_OF_NAME


def env_of_torchrec(theirs: Any, device_type: str | None = None) -> ShardingEnv:
    """Ours for an env of TorchRec's: its process group as one axis, or one process. Collective, as `from_mesh` is.

    Raises:
        ValueError: several ranks without a group, or replicas (`ShardingEnv2D`).
    """
    if is_torchrecs(theirs, "ShardingEnv2D"):
        raise ValueError(
            f"{type_name(theirs)} is made for TorchRec's DMPCollection; here a mesh says it: ShardingEnv.from_mesh("
            "init_device_mesh(device, (replicas, ranks), mesh_dim_names=('replicate', 'dp')))"
        )
    if getattr(theirs, "output_dtensor", False):
        _log.warning(
            "output_dtensor=True of TorchRec's env has no meaning here: tables are ChunkedTensors in state dicts"
        )
    if theirs.process_group is not None:
        return _of_group(theirs.process_group, device_type)
    if (theirs.world_size, theirs.rank) == (1, 0):
        return ShardingEnv.single(device_type or "cpu")
    return ShardingEnv.from_local(theirs.world_size, theirs.rank)


def default_env(device_type: str | None = None) -> ShardingEnv:
    """The default process group as one axis, or this process alone when none is initialised."""
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        return _of_group(group, device_type)
    return ShardingEnv.single(device_type or "cpu")


def _of_group(group: dist.ProcessGroup, device_type: str | None = None) -> ShardingEnv:
    """One shard axis; on CPUs where these are asked for and the group has a backend for them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    is_there = accelerator is not None and backends.get(accelerator.type, "gloo") != "gloo"
    on_cpu = not is_there or (device_type == "cpu" and "cpu" in backends)
    kind = "cpu" if on_cpu or accelerator is None else accelerator.type
    return ShardingEnv.from_mesh(DeviceMesh.from_group(group, kind, mesh_dim_names=("dp",)))


def _sets_of_axes(names: tuple[str, ...], roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each set of axes that a group goes along, see [Note: groups]."""

    def having(*some: str) -> tuple[str, ...]:
        return tuple(name for name, role in zip(names, roles, strict=True) if role in some)

    of_roles = [having(*some) for count in (1, 2, 3) for some in combinations(ROLES, count)]
    found = [*((name,) for name in names), *of_roles, having("shard", "tensor")[:-1]]
    return [axes for axes in dict.fromkeys(found) if axes]


_kept: dict[tuple[DeviceMesh, tuple[str, ...]], dist.ProcessGroup] = {}
"""Mesh and axes -> group: each flattening makes a new communicator. Meshes are equal by content."""


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """Group along `axes`; of an earlier mesh of the same ranks where that has not been destroyed."""
    if mesh.ndim == 1:
        return mesh.get_group()  # maybe one that the program gave, not another of the same ranks
    for key in [key for key, group in _kept.items() if not is_alive(group)]:
        del _kept[key]
    if (mesh, axes) not in _kept:
        _kept[mesh, axes] = _make_group(mesh, axes)
    return _kept[mesh, axes]


def _make_group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    # Axes of one rank change nothing: without them most sets need no communicator of their own.
    long = tuple(axis for axis in axes if mesh[axis].size() > 1) or axes[:1]
    is_world = world is not None and mesh.size() == world.size() and _is_world(mesh)
    if world is not None and is_world and mesh[long].size() == mesh.size():
        return world
    if len(long) > 1 and (dog := watchdog.start()) is not None:
        with entry("ShardingEnv.from_mesh", world if is_world else None):  # in torch nobody could tell it who is absent
            dog.wait_in_store(f"dmp/mesh/{mesh.mesh.tolist()}/{long}", mesh.size())
    return mesh[long].get_group() if len(long) == 1 else mesh[long]._flatten("dmp_" + "_".join(long)).get_group()


def _is_world(mesh: DeviceMesh) -> bool:
    return bool(torch.equal(mesh.mesh.flatten().cpu(), torch.arange(mesh.size(), dtype=mesh.mesh.dtype)))


def _roles(names: tuple[str, ...], replicate: Axes, shard: Axes, tensor: Axes) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError(f"axis names must differ; got {names}")
    given: dict[str, str] = {}
    for role, axes in (("replicate", replicate), ("shard", shard), ("tensor", tensor)):
        many = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
        for axis in many if axes is not None else ():
            if axis not in names:
                raise ValueError(f"{role}={axis!r} is not an axis of the mesh; its axes are {names}")
            if axis in given:
                raise ValueError(f"axis {axis!r} is claimed by both {given[axis]!r} and {role!r}; it has one role")
            given[axis] = role
    roles: list[str] = []
    for name in names:
        known = given.get(name) or _ROLE_OF_NAME.get(name)
        if known is None and name.removesuffix("_size") in _UNSUPPORTED:
            raise ValueError(
                f"mesh axis {name!r}: pipeline (pp), context (cp) and expert (ep) axes are not supported yet; make the "
                f"mesh without it, or give the rest of it, as mesh['dp'], for a stage of torch's pipelining. Supported "
                f"are axes of samples and of weights: {sorted(_ROLE_OF_NAME)}"
            )
        if known is None:
            raise ValueError(
                f"mesh axis {name!r} has no role; known names are {sorted(_ROLE_OF_NAME)}, "
                f"or say it: ShardingEnv.from_mesh(mesh, shard={name!r})"
            )
        roles.append(known)
    return tuple(roles)


def _flatten(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for i, n in zip(coordinate, shape, strict=True):
        index = index * n + i
    return index


def _unflatten(index: int, shape: Sequence[int]) -> list[int]:
    coordinate = []
    for n in reversed(shape):
        index, i = divmod(index, n)
        coordinate.append(i)
    return coordinate[::-1]
