"""Rank 0 plans for longer than any collective may take: the others wait; where it dies meanwhile, they are told."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, ShardingPlan
from planner import ShardingPlanner
from tests.ranks import run_apart
from tests.test_parting import TOLD_S
from tests.test_survival import mortal_ranks


class Slow(ShardingPlanner):
    """Takes its time, and may not come back."""

    def __init__(self, seconds: float, is_mortal: bool) -> None:
        super().__init__()
        self.seconds, self.is_mortal = seconds, is_mortal

    def plan(self, *arguments: Any, **options: Any) -> ShardingPlan:
        time.sleep(self.seconds)
        if self.is_mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().plan(*arguments, **options)


def wrap_slowly(timeout_s: float, plan_s: float, is_mortal: bool, late_s: float) -> tuple[str, float]:
    """Wrap under a group's timeout, and groups made meanwhile too; what came, and after how long.

    Args:
        late_s: after which the other ranks come.
    """
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(range(dist.get_world_size()), timeout=timedelta(seconds=timeout_s))
    env = ShardingEnv.from_process_group(group)
    if env.rank:
        time.sleep(late_s)
    started = time.monotonic()
    try:
        model = DistributedModelParallel(nn.EmbeddingBag(100, 8), env, planner=Slow(plan_s, is_mortal))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return model.plan.digest, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "plan_s"), [(5.0, 12.0), (1.0, 3.0)])
def test_planning_is_inside_no_timeout(timeout_s: float, plan_s: float) -> None:
    first, second = run_apart(2, wrap_slowly, timeout_s, plan_s, False, 0.0)
    assert first[0] == second[0], (first, second)
    assert min(first[1], second[1]) >= plan_s


@pytest.mark.slow
@pytest.mark.parametrize(("size", "late_s"), [(2, 0.0), (4, 0.0), (4, 6.0)])
def test_rank_0_dies_while_it_plans(size: int, late_s: float) -> None:
    """The store is another process's: nothing but the silence tells. Late ranks come when it is gone already."""
    died, *others = mortal_ranks(size, wrap_slowly, 30.0, 3.0, True, late_s)
    assert f"exit code {-signal.SIGKILL:d}" in died
    for message, seconds in others:
        assert message.startswith("PeerLost: ") and "rank 0 is gone" in message, message
        assert seconds < 3.0 + TOLD_S
