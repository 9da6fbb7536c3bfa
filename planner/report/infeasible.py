"""The error for a model that fits no plan: what is short where, how full the ranks are, and what would help."""

from __future__ import annotations

from collections.abc import Callable

from dmp import PlanError, shown_bytes
from planner.candidates.changes import changes
from planner.candidates.request import NoPlan
from planner.candidates.shortage import Shortage
from planner.costs.protocol import BYTES

_RANKS_SHOWN = 16


def plan_error(found: NoPlan, out_of_time: Callable[[], bool]) -> PlanError:
    """The error to raise where there is no plan.

    Args:
        out_of_time: asked before anything is tried that might help.
    """
    error, names = found.cause, found.names
    whom = repr(names[0]) + (f" and what must lie with it, {list(names[1:])}," if names[1:] else "")
    helping = changes(found, out_of_time)
    advice = "\nAny of these would make it fit:\n" + "\n".join(f"  {change}" for change in helping) if helping else ""
    if error.rank is None:
        constraints = {name: found.candidates.constraints[name] for name in names}
        return PlanError(
            f"no rank is left for {whom}: its constraints (ranks, spread, colocate) or its layouts need more different "
            f"ranks than the {len(found.problem.capacity)} table ranks offer; {constraints}{advice}",
            table=names[0],
        )
    if isinstance(error, Shortage) and error.is_total:
        return _too_much(found, error, advice)
    short = f"{error.bytes_short} bytes ({shown_bytes(error.bytes_short)}) short"
    return PlanError(
        f"{whom} does not fit: {_needed(found, short)}.\nRanks when it came to it "
        f"({found.request.costs.topology.reserved_fraction:.0%} of the memory is reserved):\n{_picture(found)}{advice}",
        table=names[0],
        rank=error.rank,
        bytes_short=error.bytes_short,
    )


def _too_much(found: NoPlan, error: Shortage, advice: str) -> PlanError:
    """All tables together are more than all ranks hold."""
    count, num_ranks = len(found.candidates.class_of), len(found.problem.capacity)
    reserved = found.request.costs.topology.reserved_fraction
    return PlanError(
        f"the {count} tables do not fit: wherever they are placed, they and their buffers take at least "
        f"{shown_bytes(error.needed)}, and the {num_ranks} ranks have {shown_bytes(error.free)} for them "
        f"({reserved:.0%} of the memory is reserved): {error.bytes_short} bytes ({shown_bytes(error.bytes_short)}) "
        f"short together. The largest is {found.names[0]!r}{advice}",
        table=found.names[0],
        rank=error.rank,
        bytes_short=error.bytes_short,
    )


def _needed(found: NoPlan, short: str) -> str:
    """Where how much is missing."""
    error, candidates = found.cause, found.candidates
    if error.option is None:
        pinned = found.request.pinned[found.names[0]]
        return f"with it pinned as {pinned}, and what else is pinned there, rank {error.rank} is {short}"
    row = candidates.table_rows[candidates.item_class[error.item]][error.option]
    layout, family = candidates.example(row.rows[0]), row.family
    if family.pieces == 1 and error.rank is not None:  # there, not on the first ranks
        layout = candidates.layout(found.names[0], family, row.rows[0], [error.rank // family.size])
    needed = float(candidates.costed.wholes(len(found.problem.capacity))[0][list(row.rows), BYTES].sum())
    return (
        f"with the nearest layout, {layout}, rank {error.rank} is {short} of {shown_bytes(needed)} when it comes to it"
    )


def _picture(found: NoPlan) -> str:
    """The ranks' memory, line by line."""
    used, capacity = found.cause.load[:, BYTES], found.problem.capacity
    lines = [
        f"  rank {rank}: {shown_bytes(used[rank])} of {shown_bytes(capacity[rank])} used"
        for rank in range(min(len(used), _RANKS_SHOWN))
    ]
    return "\n".join([*lines, *[f"  and {len(used) - _RANKS_SHOWN} more ranks"] * (len(used) > _RANKS_SHOWN)])
