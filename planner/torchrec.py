"""`from_torchrec`: what TorchRec's planner is made of, and the planner itself, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmp import ShardingEnv, is_torchrecs, ranks, type_name
from planner.planner import ShardingPlanner
from planner.torchrec_parts import constraint_of, constraints_of_torchrec, reserved_of, topology_of


def from_torchrec(theirs: Any, env: ShardingEnv | None = None) -> Any:
    """Ours for an object of TorchRec's planner; what has no meaning here is said once, through `logging`.

    - an `EmbeddingShardingPlanner`: a `ShardingPlanner` with its topology, constraints, reservation and batch size; its
      enumerator, proposers, partitioner and models of cost are this planner's own
    - `ParameterConstraints`, or a dict of them: `Constraint`s
    - a `Topology`: a `Topology` for `env`, which it needs

    Raises:
        ValueError: another object, or one that does not fit the mesh.

    Example:
        >>> from torchrec.distributed.planner.types import ParameterConstraints
        >>> from_torchrec(ParameterConstraints(sharding_types=["row_wise"])).layouts
        ('row_wise',)
    """
    if is_torchrecs(theirs, "EmbeddingPlannerBase"):
        return _planner(theirs)
    if is_torchrecs(theirs, "ParameterConstraints"):
        return constraint_of(theirs, env)
    if isinstance(theirs, Mapping):
        return constraints_of_torchrec(theirs, env)
    if is_torchrecs(theirs, "Topology"):
        if env is None:
            raise ValueError("a Topology of TorchRec's becomes one of a mesh: from_torchrec(topology, env)")
        return topology_of(theirs, env)
    raise ValueError(f"expected a planner, a Topology or ParameterConstraints of TorchRec's; got {type_name(theirs)}")


def _planner(theirs: Any) -> ShardingPlanner:
    ranks.say_once(
        f"{type_name(theirs)}: its topology, constraints, storage reservation and batch size are taken; search, its "
        "options and what they cost are this planner's own"
    )
    reservation = theirs._storage_reservation
    reserved_of(reservation, 1.0)  # one of a class that is not known is refused here
    planner = ShardingPlanner(theirs._topology, theirs._constraints, batch_size=theirs._batch_size)
    planner.reservation = reservation
    return planner
