"""A plan made on one rank and given to all, with its error where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dmp import PlanError, ShardingEnv, ShardingPlan
from planner.report import PlanReport


def from_first_rank(
    make: Callable[[], tuple[ShardingPlan, PlanReport]], env: ShardingEnv
) -> tuple[ShardingPlan, PlanReport]:
    """Call `make` on rank 0 of the env; every rank gets its result, or raises its error as a `PlanError`.

    Two collectives over the env's ranks: a broadcast of the plan's JSON with its digest and report, and a minimum over
    ranks of whether what was read has that digest.
    """
    group = env.group()
    if group is None or env.size == 1:
        return make()
    sent: list[Any] = [None]
    cause: Exception | None = None
    if env.rank == 0:
        try:
            plan, report = make()
            sent = [{"plan": plan.to_json(), "digest": plan.digest, "report": report}]
        except Exception as error:  # of any kind: the other ranks wait for it
            cause = error
            sent = [{"error": _as_fields(error)}]
    dist.broadcast_object_list(sent, group=group, group_src=0, device=env.device)
    received = sent[0]
    if "error" in received:
        raise PlanError(**received["error"]) from cause
    read, problem = ShardingPlan(), ""
    try:
        read = ShardingPlan.from_json(received["plan"])
        if read.digest != received["digest"]:
            problem = f"its digest is {read.digest}, rank 0 sent {received['digest']}"
    except PlanError as error:
        problem = str(error)
    agrees = torch.tensor([int(not problem)], device=env.device)
    dist.all_reduce(agrees, op=dist.ReduceOp.MIN, group=group)
    if not int(agrees):
        raise PlanError(
            f"rank {env.rank} read {'the same plan as' if not problem else 'another plan than'} rank 0 sent, but not "
            f"all ranks did{': ' * bool(problem)}{problem}; do all ranks run the same version?"
        )
    return read, received["report"]


def _as_fields(error: Exception) -> dict[str, Any]:
    if isinstance(error, PlanError):
        return {"message": str(error), "table": error.table, "rank": error.rank, "bytes_short": error.bytes_short}
    return {"message": f"rank 0 could not plan: {type(error).__name__}: {error}"}
