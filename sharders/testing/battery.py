"""`check_sharder`: the battery that every sharder must pass, ours and a stranger's. For tests; nothing here imports it.

Terms. The *plain* module is the unsharded one, the oracle. A *case* is one plan of the module. A *check* is a generator
of problems in words; `check_x` is named `x` in the error. A *piece* is (offset, values) of a tensor on this rank.

Every rank runs every check, and after each one the ranks tell each other what they found, so that all raise the same
error. They do so in a group of their own, and not through `dmp.ranks`, which would tell that ranks have parted ways: a
sharder that raises on one rank alone, before an exchange, leaves the others in it until the process group's timeout,
and then what that one rank raised is the error. Checks that need no exchange come first, for all plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import ModuleSharder, ShardingEnv
from sharders.testing.checks import LAST, LOCAL, ONCE, PER_PLAN, Check
from sharders.testing.subject import Case, Subject, plans_of

__all__ = ["SharderCheckError", "check_sharder"]
_SHOWN = 3
_PATIENCE = timedelta(hours=2)
_TOGETHER_S = 5.0


class SharderCheckError(AssertionError):
    """A sharder that fails a check; `.check` is the check's name."""

    check: str = ""


def check_sharder(
    sharder: ModuleSharder,
    make_module: Callable[[], nn.Module],
    make_batch: Callable[[int, int], Sequence[Any]],
    env: ShardingEnv | None = None,
) -> None:
    """Run every check on every layout that `sharder` offers; all ranks of `env` call it.

    Parameters may carry an in-backward optimizer with torch's numbers (SGD, Adagrad); without one, all are checked with
    SGD. Modules and batches should be small: some fifty models are made.

    Args:
        sharder: to be checked.
        make_module: builds the unsharded module, or a model around it, with the same values at every call and rank.
        make_batch: (data rank, step) -> the arguments of that rank's forward, the same at every call and rank.
        env: where to run; the default process group, or one process when there is none.

    Raises:
        SharderCheckError: on every rank: the check, the plan, the parameter, what was expected, what came.

    Example:
        >>> check_sharder(EmbeddingSharder(), lambda: nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=False),
        ...     lambda rank, step: (torch.arange(3) + rank + step,))
    """
    if env is None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        env = ShardingEnv.single() if world is None else ShardingEnv.from_process_group(world)
    subject = Subject(sharder, make_module, make_batch, env)
    group = _patient(env.group()) if env.size > 1 else None
    for check in ONCE:
        _run(check, subject, Case(), group)
    plans = list(plans_of(subject))
    cases = [Case(plan, plans[(i + 1) % len(plans)]) for i, plan in enumerate(plans)]
    for checks in (LOCAL, PER_PLAN):
        for case in cases:
            for check in checks:
                _run(check, subject, case, group)
    for check in LAST:
        _run(check, subject, cases[0], group)


@lru_cache(maxsize=64)
def _patient(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks that waits longer than theirs does.

    Made once: a second group of the same ranks would meet at the first one's address.
    """
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, _PATIENCE, backend="gloo", use_local_synchronization=True)
    return made


def _run(check: Check, subject: Subject, case: Case, group: dist.ProcessGroup | None) -> None:
    """Run a check on every rank, and raise on every rank what the first of them found."""
    cause: Exception | None = None
    try:
        with torch.random.fork_rng(devices=[]):
            problems = list(check(subject, case))
    except Exception as error:
        cause, problems = error, [f"raised {type(error).__name__}: {error}"]
    found = [(problems, time.time())]
    if group is not None:
        found = [([], 0.0)] * subject.env.size
        dist.all_gather_object(found, (problems, time.time()), group=group)
    failed = [(at, rank) for rank, (texts, at) in enumerate(found) if texts]
    if not failed:
        return
    rank = next(rank for at, rank in failed if at < min(failed)[0] + _TOGETHER_S)  # the others only waited for it
    texts = found[rank][0]
    shown = "; ".join(texts[:_SHOWN]) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
    name = check.__name__.removeprefix("check_")
    raised = SharderCheckError(
        f"{type(subject.sharder).__name__} fails check {name!r}{case} on rank {rank} of {len(found)}: {shown}. "
        f"{(check.__doc__ or '').splitlines()[0]}"
    )
    raised.check = name
    raise raised from cause
