"""A plan made on one rank and given to all, with its error where there is one."""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from dmp import CheckpointError, PlanError, ShardingEnv, ShardingPlan, ranks
from planner.report.report import PlanReport

_log = logging.getLogger("dmp")
_ADDRESS = " at 0x"
"""In the text of an object that says nothing of its content."""
_SHOWN = 300


def from_first_rank(
    make: Callable[[], tuple[ShardingPlan, PlanReport]], env: ShardingEnv, asked: Mapping[str, object]
) -> tuple[ShardingPlan, PlanReport]:
    """Call `make` on rank 0 of the env; every rank gets its result, or raises its error as a `PlanError`.

    The other ranks wait as long as it takes, inside no collective (see `ranks.from_first`). The plan's JSON is
    broadcast with its digest and report; then all ranks say whether what they read has that digest.

    Args:
        asked: what the plan is made for, by name; a rank that came with something else than rank 0 logs it.
    """
    group = env.group()
    if group is None or env.size == 1:
        return make()
    cause: list[Exception] = []
    texts = {name: repr(value) for name, value in asked.items()}

    def made() -> dict[str, Any]:
        try:
            plan, report = make()
        except Exception as error:  # of any kind: the other ranks wait for it
            cause.append(error)
            return {"error": _as_fields(error), "asked": texts}
        return {
            "asked": texts,
            "plan": plan.to_json(),
            "digest": plan.digest,
            "report": zlib.compress(pickle.dumps(report), 1),
        }

    received = ranks.from_first(made, group, "planning")
    for name, text in texts.items():
        theirs = received["asked"].get(name)
        if text != theirs and _ADDRESS not in text:
            _log.warning(
                "rank %d comes to planning with %s %s, rank 0 with %s: the plan is made with rank 0's",
                *(env.rank, name, _short(text), _short(str(theirs))),
            )
    if "error" in received:
        raise PlanError(**received["error"]) from (cause[0] if cause else None)

    def read() -> ShardingPlan:
        plan = ShardingPlan.from_json(received["plan"])
        if plan.digest != received["digest"]:
            raise PlanError(f"its digest is {plan.digest}, rank 0 sent {received['digest']}")
        return plan

    report: PlanReport = pickle.loads(zlib.decompress(received["report"]))
    try:
        return ranks.fail_together(read, group, "reading the plan that rank 0 sent"), report
    except ranks.RanksError:
        raise
    except CheckpointError as error:
        raise PlanError(f"{error}; do all ranks run the same version?") from error


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _as_fields(error: Exception) -> dict[str, Any]:
    if isinstance(error, PlanError):
        return {"message": str(error), "table": error.table, "rank": error.rank, "bytes_short": error.bytes_short}
    return {"message": f"rank 0 could not plan: {type(error).__name__}: {error}"}
