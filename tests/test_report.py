"""The planner's report: one screen of text, why each parameter is where it is, what changes, stored and sent."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from dmp import PlanError, ShardingPlan, default_sharders, row_wise, table_wise
from planner import Constraint, PlanReport, ShardingPlanner
from planner.report.words import apart
from tests.planner_bags import BagSharder, bags, hosts, mlperf_on_four_hosts, one_axis, small_memory, workload


def report_of(planner: ShardingPlanner) -> PlanReport:
    assert planner.report is not None
    return planner.report


@pytest.fixture(scope="module")
def mlperf() -> tuple[ShardingPlan, PlanReport]:
    plan = mlperf_on_four_hosts()
    return plan, plan.report


def test_report(mlperf: tuple[ShardingPlan, PlanReport]) -> None:
    plan, report = mlperf
    assert isinstance(report, PlanReport)
    assert len(report.rank_bytes) == len(report.rank_seconds) == 32
    assert 0 < report.lower_bound <= report.step_seconds
    assert {p.name: p.layout for p in report.parameters} == {n: e.layout for n, e in plan.items()}
    assert all(p.alternatives for p in report.parameters)
    slowest = report.rank_seconds.max(0) + np.array(report.setup_seconds)
    assert (
        slowest <= np.array(report.phase_seconds) * 1.0001
    ).all()  # two stages of one exchange: each has its slowest
    held = np.zeros(32)
    for first, size, of in zip(*(getattr(report.planned.pieces, n) for n in ("first", "size", "bytes")), strict=True):
        held[first : first + size] += of
    assert (held <= report.rank_bytes * 1.0001).all()


def test_text_is_one_screen(mlperf: tuple[ShardingPlan, PlanReport]) -> None:
    plan, report = mlperf
    for text in (str(report), str(plan)):
        lines = text.splitlines()
        assert len(lines) <= 42
        assert max(map(len, lines)) <= 100
    text = str(report)
    for said in ("gap", "samples/s", "mesh 4 x 8 (host, local)", "lookup bwd", "imbalance", "40,000,000 x 128"):
        assert said in text
    assert "40,000,000 x 128" in str(plan) and " ms" in str(plan) and " GB" in str(plan)
    assert str(plan).index("t2.weight") < str(plan).index("t10.weight")


def test_long_plans_are_cut() -> None:
    module = bags(*((1000 + i, 16) for i in range(60)))
    plan = ShardingPlanner().plan(module, [BagSharder()], one_axis(2))
    assert "more: plan[name]" in str(plan)
    assert str(ShardingPlan(plan)).endswith("and 20 more: plan[name]")


def test_explains_by_table_and_pattern(mlperf: tuple[ShardingPlan, PlanReport]) -> None:
    _, report = mlperf
    text = report.explain("t20")
    assert text == report.explain("t20.weight")
    assert "longer than all tables together now" in text
    assert report.explain("t2?").count(" got ") == 6
    with pytest.raises(KeyError, match=r"'nobody'.*there are"):
        report.explain("nobody")


def test_explains_constraints_pins_and_memory() -> None:
    planner = ShardingPlanner(small_memory(9.6e5), {"t0": Constraint(forbid="row_wise")})
    planner.plan(bags((10_000, 16), (100, 16)), [BagSharder()], one_axis(4), {"t1.weight": table_wise(1)})
    text = report_of(planner).explain("t0")
    assert "forbidden by constraint: forbid=['row_wise']" in text
    assert "on a rank that has 960.00 KB" in text
    assert "pinned table_wise(1)" in report_of(planner).explain("t1") and "(pinned)" in str(planner.report)
    assert "nothing else was offered" in report_of(planner).explain("t1")


def test_difference() -> None:
    module, env = bags((10_000, 16), (1000, 16), (100, 16)), hosts(2, 2)
    plans = [
        ShardingPlanner().plan(module, [BagSharder()], env, {"t0.weight": at}) for at in (table_wise(1), row_wise())
    ]
    before, after = (plan.report for plan in plans)
    changed = before.diff(plans[1])
    assert changed.seconds == pytest.approx(after.step_seconds - before.step_seconds)
    assert "t0.weight" in [change.name for change in changed.changes]
    assert "table_wise(1)" in str(changed) and "row_wise()" in str(changed) and "of 3 parameters change" in str(changed)
    assert "0 of 3 parameters change" in str(before.diff(before))
    with pytest.raises(PlanError, match="without a report"):
        before.diff(ShardingPlan(plans[0]))


def test_stored_and_sent(mlperf: tuple[ShardingPlan, PlanReport], tmp_path: Path) -> None:
    _, report = mlperf
    report.save(tmp_path / "report.json")
    for copy in (PlanReport.load(tmp_path / "report.json"), pickle.loads(pickle.dumps(report))):
        assert str(copy) == str(report)
        assert copy.explain("t*") == report.explain("t*")
        assert not copy.diff(report).changes
        assert copy.to_json() == report.to_json()
    for wrong in ("{}", "[1]", "x", '{"version": 1, "report": {}}', '{"version": 9, "report": {}}'):
        with pytest.raises(PlanError, match="report"):
            PlanReport.from_json(wrong)


def test_time_budget_only_cuts_it_short() -> None:
    module, sharder = workload("nv_small")
    planner = ShardingPlanner(batch_size=2048, time_budget_s=1e-6)
    planner.plan(module, [sharder], one_axis(16)).validate(module, one_axis(16), [sharder])
    assert report_of(planner).is_cut_short
    assert "cut short" in str(planner.report)


@pytest.mark.slow
def test_more_effort_finds_a_better_plan() -> None:
    module, sharder = workload("nv_small")
    found = []
    for effort in (0.1, 1.0):
        planner = ShardingPlanner(batch_size=2048, time_budget_s=100.0, effort=effort)
        planner.plan(module, [sharder], one_axis(64))
        assert not report_of(planner).is_cut_short
        found.append(report_of(planner).step_seconds)
    assert found[0] > found[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("shows", "stream", "says"), [(True, Terminal, True), (None, Terminal, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_progress(
    monkeypatch: pytest.MonkeyPatch, shows: bool | None, stream: type[io.StringIO], says: bool, fails: bool
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := stream())
    monkeypatch.setattr("planner.report.progress._EVERY_S", 0.0)
    monkeypatch.setattr("planner.report.progress._AFTER_S", 1e6)
    planner = ShardingPlanner(small_memory(1e3 if fails else 1e9), progress=shows)
    with pytest.raises(PlanError) if fails else contextlib.nullcontext():
        planner.plan(bags((100, 16), (1000, 16)), [BagSharder()], one_axis(4))
    lines = terminal.getvalue().split("\r")
    assert bool(terminal.getvalue()) == says
    assert not says or ("search" in terminal.getvalue() and not lines[-1] and lines[-2].isspace())
    assert (
        fails or not says or ("best step of the tables" in terminal.getvalue() and "gap at most" in terminal.getvalue())
    )


def test_no_progress_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", written := io.StringIO())
    ShardingPlanner(progress=True).plan(bags((100, 16)), [BagSharder()], one_axis(4))
    assert not written.getvalue()


def test_nothing_to_plan() -> None:
    planner = ShardingPlanner()
    assert len(planner.plan(nn.Linear(3, 3), [BagSharder()], one_axis(2))) == 0
    assert str(planner.report).startswith("step 0.")
    with pytest.raises(ValueError, match="batch_size"):
        ShardingPlanner(batch_size=0)


def test_long_names_are_told_by_what_they_differ_in() -> None:
    module = nn.ModuleDict({"sparse_features": nn.ModuleDict({"embedding_bags": bags((1000, 64), (2000, 64))})})
    planner = ShardingPlanner()
    plan = planner.plan(module, default_sharders(), hosts(1, 4))
    for text in (str(plan), str(planner.report)):
        assert "\nt1 " in text and "names: sparse_features.embedding_bags.*.weight" in text
    assert apart(["a.weight", "b.weight"], 8) == (["a.weight", "b.weight"], "")
    assert apart(["a.weight", "a.b.weight"], 4) == (["a", "a.b"], "*.weight")
    assert apart(["tables.one", "tables.two", "top"], 4) == (["tables.one", "tables.two", "top"], "")
