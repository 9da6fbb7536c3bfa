"""`propose_mesh`: which mesh a model would do best on. No process group, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dmp import ModelSharder, ModuleSharder, PlanError, ShardingEnv, default_sharders
from planner.arguments import check_constraints, check_module, whole
from planner.candidates.constraints import Constraint
from planner.costs.protocol import CostProtocol
from planner.costs.topology import Topology, check_topology
from planner.meshes.proposal import MeshProposal, MeshProposals
from planner.meshes.shapes import shapes
from planner.meshes.study import Part, PlannerOptions, Study

_ALIKE = 1.02  # steps that differ by less are as good: the mesh with fewer axes is better
_PLANNED, _OF_MANY = 12, 6  # meshes whose tables are placed, at most; on many devices, and half of it of many tables
_MANY_DEVICES, _MANY_TABLES = 1024, 200


def propose_mesh(
    module: nn.Module,
    num_devices: int,
    *,
    batch_size: int | None = None,
    topology: Topology | None = None,
    device_type: str = "cuda",
    ranks_per_host: int = 8,
    memory_bytes: float | None = None,
    sharders: Iterable[ModuleSharder | ModelSharder] | None = None,
    constraints: Mapping[str, Constraint] | None = None,
    cost_model: CostProtocol | None = None,
    sequence_length: int | None = None,
    compute_dtype: torch.dtype | None = None,
    top: int = 8,
) -> MeshProposals:
    """Meshes of `num_devices` for a module, real or on meta, best first: axes of copies, of shards, and a tensor axis.

    Tables are placed by `ShardingPlanner`'s search, dense weights by what the axes say. Of a large number of tables
    not all meshes are searched, but those with the least dense seconds, and the groups of copies that are smallest.

    Args:
        batch_size: samples of a step, of all devices together, so that meshes do the same work; by default 512 for each
            device, or of sequences as many as have 2,048 tokens for each.
        topology: link figures as one number, or a pair (between hosts, inside one); by default usual ones of the type.
        ranks_per_host: devices of a host, where the topology does not say.
        memory_bytes: of a device, in the place of the topology's.
        sharders: by default every registered one.
        constraints, cost_model, sequence_length, compute_dtype: as of `ShardingPlanner`.
        top: how many that fit are returned.

    Raises:
        PlanError: no mesh fits, with the reason of the nearest.

    Example:
        >>> print(propose_mesh(module, 64, batch_size=64))  # doctest: +SKIP
    """
    check_module(module)
    check_constraints(constraints)
    for name, value in (("num_devices", num_devices), ("ranks_per_host", ranks_per_host), ("top", top)):
        whole(name, value)
    machine = _machine(topology, device_type, ranks_per_host, num_devices, memory_bytes)
    given = default_sharders() if sharders is None else tuple(sharders)
    options = PlannerOptions(constraints, cost_model, sequence_length, compute_dtype)
    study = Study.of(module, given, machine, device_type, num_devices, options, batch_size)
    of_host = min(machine.ranks_per_host or 1, num_devices)
    looked_at = [study.dense_part(each) for each in shapes(num_devices, of_host, [*study.splits], study.has_tables)]
    found = [*_planned(study, looked_at)]
    fitting = _ordered([each for each in found if each.fits])
    rejected = sorted((each for each in found if not each.fits), key=lambda each: each.rank_bytes or float("inf"))
    if not fitting:
        raise PlanError(
            f"no mesh of {num_devices} devices fits at {study.batch_size:g} samples of a step; the nearest, "
            f"{rejected[0]}: {rejected[0].why}"
        )
    return MeshProposals(tuple(fitting[:top]), tuple(rejected), study.said())


def _planned(study: Study, looked_at: Sequence[Part]) -> Iterator[MeshProposal]:
    """Each mesh with its tables, where there are any and it is worth it."""
    yield from (study.proposal(part) for part in looked_at if not part.tables or part.objection)
    with_tables = [part for part in looked_at if part.tables and not part.objection]
    most = max((part.tables for part in with_tables), default=0)
    count = (_OF_MANY if study.num_devices >= _MANY_DEVICES else _PLANNED) // (1 + (most > _MANY_TABLES))
    for part in sorted(with_tables, key=lambda part: part.promise)[:count]:
        yield study.planned(part)


def _ordered(proposals: Sequence[MeshProposal]) -> list[MeshProposal]:
    """The fastest first; of those nearly as fast, the plainest: fewest axes, dense weights whole, most memory left."""
    by_time = sorted(proposals, key=_seconds)
    if not by_time:
        return []
    limit = _seconds(by_time[0]) * _ALIKE
    alike = [each for each in by_time if _seconds(each) <= limit]
    alike.sort(key=lambda each: (len(each.axes), each.recomputes, "shard" in each.axes, each.rank_bytes or 0))
    return [*alike, *by_time[len(alike) :]]


def _seconds(proposal: MeshProposal) -> float:
    assert proposal.step_seconds is not None
    return proposal.step_seconds


def _machine(
    topology: Topology | None, device_type: str, ranks_per_host: int, num_devices: int, memory_bytes: float | None
) -> Topology:
    """Figures that say what is inside a host whatever the mesh."""
    if topology is None:
        local = min(ranks_per_host, num_devices)
        two = ShardingEnv.abstract((max(2, -(-num_devices // local)), local), ("host", "local"), device_type)
        topology = Topology.of(two)
    check_topology(topology)
    if isinstance(topology.link_bandwidth, Mapping) or isinstance(topology.link_latency, Mapping):
        raise ValueError(
            "propose_mesh looks at many meshes: give link figures as one number, or as a pair (between hosts, inside "
            f"one), not by axis name; got {topology.link_bandwidth}, {topology.link_latency}"
        )
    if topology.ranks_per_host is None:
        topology = replace(topology, ranks_per_host=ranks_per_host)
    return topology if memory_bytes is None else replace(topology, memory_bytes=memory_bytes)
