"""What wrapping costs for each table, in calls of functions: the same for each further one, and not creeping up.

Seconds depend on the machine; a step that looks at all tables for each of them, or at each once more, shows here.
"""

from __future__ import annotations

import warnings
from cProfile import Profile
from pstats import Stats
from typing import Any

import pytest
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, row_wise
from tests.bench.workload import Workload, make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    import torch.distributed.optim  # noqa: F401
    import torchrec.optim  # noqa: F401  # which models are made with

MOST = {"collection": 2200, "plain": 3100}
"""Calls for a table; 1,880 and 2,640 when this was written. More is worth a reason: a thousand tables are usual."""


def _make(kind: str, number: int) -> nn.Module:
    if kind == "collection":
        return make_model(Workload((10,) * number, 4, 1), "meta")
    return nn.ModuleList([nn.EmbeddingBag(10, 4, mode="sum", device="meta") for _ in range(number)])


def _calls(kind: str, number: int) -> int:
    module = _make(kind, number)
    plan = {name: row_wise() for name, _ in module.named_parameters()}
    profile = Profile()
    profile.runcall(DistributedModelParallel, module, ShardingEnv.single(), plan=plan)
    stats: Any = Stats(profile)
    return int(stats.total_calls)


@pytest.mark.parametrize("kind", MOST)
def test_each_further_table_costs_the_same(kind: str) -> None:
    _calls(kind, 1)  # what is made or imported at the first wrap
    few, more, most = (_calls(kind, number) for number in (40, 80, 160))
    assert (most - more) / 80 < 1.02 * (more - few) / 40
    assert (most - more) / 80 < MOST[kind]
