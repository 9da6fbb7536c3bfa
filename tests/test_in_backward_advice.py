"""A report says what tables without an optimizer in the backward pass would gain by one."""

from __future__ import annotations

import pytest

from dmp import ShardingEnv
from planner import Constraint, ShardingPlanner
from planner.report.report import PlanReport
from tests.planner_bags import BagSharder, bags

ENV = ShardingEnv.abstract((2, 4), ("host", "local"))
SHAPES = (4_000_000, 64), (1_000_000, 64), (1000, 16)


def planned(
    optimizer: str | None, kernel: str | None = None, samples: int = 512, *, frozen: bool = False
) -> PlanReport:
    planner = ShardingPlanner(batch_size=samples, constraints={"*": Constraint(kernel=kernel)})
    module = bags(*SHAPES).requires_grad_(not frozen)
    report = planner.plan(module, [BagSharder(optimizer, ("row_wise",))], ENV).report
    assert isinstance(report, PlanReport)
    return report


def test_it_is_what_the_same_layouts_take_with_one() -> None:
    without, there = planned(None), planned("adam")
    (advice,) = without.notes
    assert "3 tables have no optimizer in the backward pass" in advice and "'t0.weight'" in advice
    assert f"take {there.step_seconds * 1e3:.3g} ms instead of {without.step_seconds * 1e3:.3g}" in advice
    assert there.step_seconds < 0.8 * without.step_seconds and there.rank_bytes.max() < without.rank_bytes.max()
    assert there.notes == ()


@pytest.mark.parametrize("samples", [512, 1 << 22])
def test_nothing_is_said_where_it_is_asked_for_or_saves_little(samples: int) -> None:
    said = planned(None, samples=samples).notes
    assert any("optimizer in the backward" in note for note in said) == (samples == 512)
    assert not any("optimizer in the backward" in note for note in planned(None, "dense", samples).notes)
    (said,) = planned(None, samples=samples, frozen=True).notes
    assert said == "3 tables are frozen, and planned without gradients and optimizer state"
