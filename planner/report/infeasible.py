"""The error for a model that fits no plan: what is short where, how full the ranks are, and what would help."""

from __future__ import annotations

from dmp import PlanError, shown_bytes
from planner.candidates.candidates import Candidates
from planner.candidates.request import NoPlan
from planner.costs.protocol import BYTES
from planner.costs.topology import Topology
from planner.search.problem import Infeasible, Problem

_RANKS_SHOWN = 16


def plan_error(found: NoPlan, topology: Topology) -> PlanError:
    """The error to raise where there is no plan."""
    candidates, problem, error = found.candidates, found.problem, found.cause
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
    layout = candidates.example(candidates.table_rows[candidates.item_class[error.item]][error.option].rows[0])
    used = error.load[:, BYTES]
    of_item = candidates.table_rows[candidates.item_class[error.item]][error.option]
    needed = float(candidates.costed.wholes(len(problem.capacity))[0][list(of_item.rows), BYTES].sum())
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
    fitting = []
    whole_bytes = candidates.costed.wholes(len(problem.capacity))[0][:, BYTES]
    free = float((problem.capacity - error.load[:, BYTES]).max())
    for row in candidates.offers_of(group.members[0]):
        objection, size = candidates.costed.offers[row].objection, float(whole_bytes[row])
        if objection and size <= free:
            fitting.append((size, f"  layout {candidates.example(row)}, now ruled out ({objection})"))
    return [text for _, text in sorted(fitting)[:3]]
