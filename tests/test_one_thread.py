"""NumPy's matrix products run on one thread while a plan is made, and as before after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from dmp import PlanError, ShardingEnv
from planner import ShardingPlanner, Topology
from planner import planner as planning
from planner.one_thread import on_one_thread, openblas
from sharders import default_sharders

ENV = ShardingEnv.abstract((4,), ("dp",))


@pytest.fixture
def threads() -> Iterator[Any]:
    """How many there are, read."""
    found = openblas()
    if found is None:
        pytest.skip("NumPy brings no OpenBLAS of its own")
    get, put = found
    before = get()
    put(3)
    yield get
    put(before)


def test_while_a_plan_is_made(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, true = [], planning.answer
    monkeypatch.setattr(planning, "answer", lambda *a, **kw: (seen.append(threads()), true(*a, **kw))[1])
    module = nn.ModuleDict({"table": nn.EmbeddingBag(100, 8)})
    ShardingPlanner().plan(module, default_sharders(), ENV)
    assert (seen, threads()) == ([1], 3)
    with pytest.raises(PlanError):
        ShardingPlanner(replace(Topology.of(ENV), memory_bytes=10.0)).plan(module, default_sharders(), ENV)
    assert (seen, threads()) == ([1, 1], 3)


def test_within_each_other(threads: Any) -> None:
    with on_one_thread():
        with on_one_thread():
            assert threads() == 1
        assert threads() == 1
    assert threads() == 3
