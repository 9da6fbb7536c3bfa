"""TorchRec's constraints, topologies and reservations as ours. What has no meaning here is said once.

TorchRec counts bytes, and bytes per millisecond; ours are bytes, and bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from dmp import ShardingEnv, is_torchrecs, ranks, type_name
from planner.candidates.constraints import Constraint
from planner.costs.topology import Topology, check_topology

_MS = 1000  # in a second
_OUR_NAME = {"table_column_wise": "column_wise", "grid_shard": "grid"}  # where it is another than TorchRec's
_KERNELS = ("fused", "dense")
_NO_MEANING = (
    *("num_poolings", "batch_sizes", "is_weighted", "cache_params", "enforce_hbm"),
    *("stochastic_rounding", "bounds_check_mode", "output_dtype", "device_group", "key_value_params"),
    "use_virtual_table",
)


def constraint_of(theirs: Any, env: ShardingEnv | None = None) -> Constraint:
    """Ours for a `ParameterConstraints`, or ours as it is.

    Args:
        env: the mesh; on one without hosts `table_row_wise` is `row_wise`, as on one host.
    """
    if not is_torchrecs(theirs, "ParameterConstraints"):
        return theirs  # type: ignore[no-any-return]
    unread = [name for name in _NO_MEANING if getattr(theirs, name, None) not in (None, False)]
    if unread:
        ranks.say_once(f"ParameterConstraints: {unread} mean nothing to this planner, and are passed over")
    is_flat = env is not None and len(env.table_shape) < 2
    kinds = [str(getattr(kind, "value", kind)) for kind in theirs.sharding_types or ()]
    layouts = [_OUR_NAME.get(kind, kind) for kind in kinds]
    layouts = [name.replace("table_row", "row") if is_flat else name for name in layouts]
    factors = list(theirs.pooling_factors or ())
    kernels = {str(getattr(kernel, "value", kernel)) for kernel in theirs.compute_kernels or ()}
    if kernels - set(_KERNELS):
        ranks.say_once(f"ParameterConstraints: of compute_kernels {sorted(kernels)} only {list(_KERNELS)} are here")
    own = [kernel for kernel in _KERNELS if kernel in kernels]
    return Constraint(
        layouts=list(dict.fromkeys(layouts)) or None,
        kernel=own[0] if len(own) == 1 else None,
        min_columns=theirs.min_partition,
        pooling_factor=None if factors in ([], [1.0]) else factors[0] if len(factors) == 1 else factors,
    )


def constraints_of_torchrec(constraints: Mapping[str, Any], env: ShardingEnv | None = None) -> dict[str, Constraint]:
    """Each as ours, see `constraint_of`."""
    return {name: constraint_of(theirs, env) for name, theirs in constraints.items()}


def topology_of(theirs: Any, env: ShardingEnv, reservation: Any = None) -> Topology:
    """Ours for a `Topology` of TorchRec's, or ours as it is.

    Speed of arithmetic and latencies, which theirs lacks, are those of `Topology.of`. A mesh axis that stays inside one
    host has the host's bandwidth, any other that between hosts.

    Args:
        reservation: what is kept of the memory, see `reserved_of`.

    Raises:
        ValueError: no topology, or one of other axes, another number of ranks, or kind of device, than the mesh's.
    """
    if not is_torchrecs(theirs, "Topology"):
        check_topology(theirs)
        theirs.links(env)  # it fits the mesh
        return theirs  # type: ignore[no-any-return]
    if (theirs.world_size, theirs.compute_device) != (env.size, env.device_type):
        raise ValueError(
            f"{type_name(theirs)} is of {theirs.world_size} ranks on {theirs.compute_device!r}; the mesh is of "
            f"{env.size} on {env.device_type!r}"
        )
    has_own = env.device_type != "cpu"
    memory = min(device.storage.hbm if has_own else device.storage.ddr for device in theirs.devices)
    inside = [prod(env.shape[axis:]) <= theirs.intra_group_size for axis in range(len(env.shape))]
    usual = Topology.of(env)
    return replace(
        usual,
        memory_bytes=memory,
        memory_bandwidth=(theirs.hbm_mem_bw if has_own else theirs.ddr_mem_bw) * _MS,
        link_bandwidth=tuple((theirs.intra_host_bw if is_in else theirs.inter_host_bw) * _MS for is_in in inside),
        reserved_fraction=reserved_of(reservation, memory) if reservation is not None else usual.reserved_fraction,
    )


def reserved_of(reservation: Any, memory_bytes: float) -> float:
    """The part of the memory that a storage reservation of TorchRec's keeps.

    A percentage is that part; an absolute one, and an estimate for dense tensors, are bytes of it. This planner counts
    dense parameters itself, so that a heuristic one is its percentage.

    Raises:
        ValueError: another class.
    """
    if is_torchrecs(reservation, "FixedAbsoluteStorageReservation"):
        return float(reservation._hbm_reserved_bytes / memory_bytes)
    if is_torchrecs(reservation, "HeuristicalStorageReservation"):
        return float(reservation._percentage + (reservation._dense_tensor_estimate or 0) / memory_bytes)
    if is_torchrecs(reservation, "FixedPercentageStorageReservation"):
        return float(reservation._percentage)
    raise ValueError(
        f"expected a FixedPercentage-, FixedAbsolute- or HeuristicalStorageReservation; got {type_name(reservation)}. "
        "Topology(reserved_fraction=...) says it here"
    )
