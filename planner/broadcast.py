"""A plan made on one rank and given to all, with its error where there is one."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from typing import Any

from dmp import CheckpointError, PlanError, ShardingEnv, ShardingPlan, ranks
from planner.report.report import PlanReport


def from_first_rank(
    make: Callable[[], tuple[ShardingPlan, PlanReport]], env: ShardingEnv
) -> tuple[ShardingPlan, PlanReport]:
    """Call `make` on rank 0 of the env; every rank gets its result, or raises its error as a `PlanError`.

    The other ranks wait as long as it takes, inside no collective (see `ranks.from_first`). The plan's JSON is
    broadcast with its digest and report; then all ranks say whether what they read has that digest.
    """
    group = env.group()
    if group is None or env.size == 1:
        return make()
    cause: list[Exception] = []

    def made() -> dict[str, Any]:
        try:
            plan, report = make()
        except Exception as error:  # of any kind: the other ranks wait for it
            cause.append(error)
            return {"error": _as_fields(error)}
        return {"plan": plan.to_json(), "digest": plan.digest, "report": zlib.compress(pickle.dumps(report), 1)}

    received = ranks.from_first(made, group, "planning")
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


def _as_fields(error: Exception) -> dict[str, Any]:
    if isinstance(error, PlanError):
        return {"message": str(error), "table": error.table, "rank": error.rank, "bytes_short": error.bytes_short}
    return {"message": f"rank 0 could not plan: {type(error).__name__}: {error}"}
