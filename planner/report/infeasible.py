"""The error for a model that fits no plan: what is short where, how full the ranks are, and what would help."""

from __future__ import annotations

from dataclasses import replace

from dmp import PlanError, shown_bytes
from planner.candidates.candidates import Candidates
from planner.costs.protocol import BYTES
from planner.costs.topology import Topology
from planner.search.placement import Placement
from planner.search.problem import Infeasible, Item, Problem
from planner.search.tight import in_family

_RANKS_SHOWN = 16


def plan_error(error: Infeasible, candidates: Candidates, problem: Problem, topology: Topology) -> PlanError:
    """The error to raise for a search that found no placement."""
    group = candidates.groups[error.item]
    name = group.members[0]
    whom = repr(name) + (f" and what must lie with it, {list(group.members[1:])}," if group.members[1:] else "")
    if error.rank is None or error.option is None:
        constraints = {m: candidates.constraints[m] for m in group.members}
        return PlanError(
            f"no rank is left for {whom}: its constraints (ranks, spread, colocate) or its layouts need more different "
            f"ranks than the {len(problem.capacity)} table ranks offer; {constraints}",
            table=name,
        )
    layout = group.rows[error.option][0].movable.layout
    used = error.load[:, BYTES]
    needed = sum(float(r.max()) for r in group.item.options[error.option].loads[..., BYTES])
    picture = [
        f"  rank {rank}: {shown_bytes(used[rank])} of {shown_bytes(problem.capacity[rank])} used"
        for rank in range(min(len(used), _RANKS_SHOWN))
    ]
    picture += [f"  and {len(used) - _RANKS_SHOWN} more ranks"] * (len(used) > _RANKS_SHOWN)
    memory = (float(problem.capacity[error.rank]) + error.bytes_short) / (1 - topology.reserved_fraction)
    more_memory = f"{memory:.0f} per rank ({shown_bytes(memory)}; now {shown_bytes(topology.memory_bytes)})"
    changes = [*_other_layouts(error, candidates, problem), f"  memory_bytes of {more_memory}"]
    return PlanError(
        f"{whom} does not fit: with the nearest layout, {layout}, rank {error.rank} is {error.bytes_short} bytes "
        f"({shown_bytes(error.bytes_short)}) short of {shown_bytes(needed)} when it comes to it.\n"
        f"Ranks when it came to it ({topology.reserved_fraction:.0%} of the memory is reserved):\n"
        + "\n".join(picture)
        + "\nAny of these would make it fit:\n"
        + "\n".join(changes),
        table=name,
        rank=error.rank,
        bytes_short=error.bytes_short,
    )


def _other_layouts(error: Infeasible, candidates: Candidates, problem: Problem) -> list[str]:
    """Layouts that the sharder offers, and that would fit what is left, but that may not be chosen; smallest first."""
    group = candidates.groups[error.item]
    if len(group.members) > 1:
        return []
    rejected = candidates.offered[group.members[0]].rejected
    item = Item(tuple(layout.option for layout in rejected), None, group.item.spread)
    placement = Placement(replace(problem, items=(item,), base=error.load))
    fitting = []
    for index, layout in enumerate(rejected):
        if in_family(placement, 0, index) is not None:
            text = f"  layout {layout.movable.layout}, now ruled out ({layout.objection})"
            fitting.append((float(layout.option.loads[..., BYTES].max()), text))
    return [text for _, text in sorted(fitting)[:3]]
