"""What the same ranks would do in other replica groups: each group has the tables to itself, and keeps its copy equal.

In one group of all ranks a table that cannot be cut further makes a few ranks work for all; in groups it works for
fewer samples, at the price of memory and of a sync between the copies. The mesh says what is done; this is advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from dmp import PlanError, ShardingEnv, shown_bytes
from planner.costs.topology import PerAxis, Topology
from planner.report.report import PlanReport

_SAVES = 0.2
"""Part of the step that must be saved for a word;"""
_WAITED = 0.25
"""for it to be looked for unasked, ranks wait for so much of it, as not all waiting is saved."""
_FEW_TABLES, _MANY_RANKS, _VERY_MANY_RANKS, _SMALLEST_GROUP = 32, 64, 1024, 8
_COPIES = (4, 16, 64, 256)
OnMesh = Callable[[ShardingEnv, Topology], PlanReport]


def worth_asking(report: PlanReport, env: ShardingEnv) -> bool:
    """Whether groups may save much, and are quickly planned: few tables, on many ranks that wait for each other."""
    if report.is_cut_short or env.table_size < _MANY_RANKS or not 0 < len(report.planned.names) <= _FEW_TABLES:
        return False
    waited = report.table_seconds - sum(report.mean_phase_seconds())
    return waited > _WAITED * report.step_seconds


def group_advice(
    report: PlanReport, env: ShardingEnv, topology: Topology, on_mesh: OnMesh, *, thorough: bool = True
) -> tuple[str, ...]:
    """A sentence on the best replica groups, where they save much; else nothing.

    Args:
        report: of the plan for `env`.
        on_mesh: the report of the same model on another mesh.
        thorough: as long as smaller groups are better; else one number of copies alone.
    """
    best: tuple[float, ShardingEnv, PlanReport] | None = None
    some = _COPIES if thorough else _COPIES[env.table_size >= _VERY_MANY_RANKS :][:1]
    for other, figures in _groups(report, env, topology, some):
        try:
            there = on_mesh(other, figures)
        except PlanError:  # does not fit: smaller groups fit less
            break
        if there.step_seconds >= (report.step_seconds if best is None else best[0]):
            break  # smaller groups sync more
        best = there.step_seconds, other, there
    if best is None or best[0] > (1 - _SAVES) * report.step_seconds:
        return ()
    seconds, other, there = best
    axes = ", ".join(f"{name}={size}" for name, size in zip(other.names, other.shape, strict=True))
    return (
        f"in {other.size // other.table_size} groups of {other.table_size} ranks (axes {axes}), each with a copy of "
        f"the tables, a step would take {seconds * 1e3:.3g} ms instead of {report.step_seconds * 1e3:.3g}; tables "
        f"would take {_tables(there)} on the fullest rank instead of {_tables(report)}",
    )


def _groups(
    report: PlanReport, env: ShardingEnv, topology: Topology, some: Sequence[int]
) -> Iterator[tuple[ShardingEnv, Topology]]:
    """Meshes with more copies, larger groups first, as far as tables and memory allow."""
    total = float(report.rank_bytes.sum())
    axes = env.axes("shard")
    if not axes or ("replicate" in env.names and "replicate" not in env.axes("replicate")):
        return
    outer, size = axes[0], dict(zip(env.names, env.shape, strict=True))[axes[0]]
    for copies in some:
        group = env.table_size // copies
        if size % copies or group < _SMALLEST_GROUP or total / group > report.usable_bytes:
            return
        other = _copied(env, outer, copies)
        yield other, _figures(topology, env, outer, other)


def _copied(env: ShardingEnv, axis: str, copies: int) -> ShardingEnv:
    """The same ranks with `copies` times the copies, each of a part of the axis."""
    sizes, roles = dict(zip(env.names, env.shape, strict=True)), dict(zip(env.names, env.roles, strict=True))
    sizes[axis] //= copies
    sizes = {"replicate": sizes.pop("replicate", 1) * copies, **sizes}
    roles["replicate"] = "replicate"
    names = tuple(name for name in sizes if sizes[name] > 1)
    shape = tuple(sizes[name] for name in names)
    assert prod(shape) == env.size
    where = (0,) * len(names)
    kept = tuple(roles[name] for name in names)
    return replace(env, mesh=None, names=names, shape=shape, roles=kept, coordinate=where, _groups={})


def _figures(topology: Topology, env: ShardingEnv, axis: str, other: ShardingEnv) -> Topology:
    """The machine for the mesh of copies, whose axis is as fast as the one that it is a part of."""

    def named(values: PerAxis | None, of: Mapping[str, float]) -> object:
        if values is None:
            return None
        pair = topology.ranks_per_host is not None and not isinstance(values, Mapping)
        if pair or isinstance(values, (int, float)):
            return values
        return {name: of.get(name, of[axis]) for name in other.names}

    found: dict[str, Any] = {}
    for kind, machine in (("link", topology), ("collective", topology.of_collectives)):
        links = machine.links(env)
        of = getattr(topology, f"{kind}_bandwidth"), getattr(topology, f"{kind}_latency")
        found[f"{kind}_bandwidth"] = named(of[0], {name: link.bandwidth for name, link in links.items()})
        found[f"{kind}_latency"] = named(of[1], {name: link.latency for name, link in links.items()})
    return replace(topology, **found)


def _tables(report: PlanReport) -> str:
    return shown_bytes(int(report.rank_bytes.max(initial=0)))
