"""What copied tables cost depends on what else is copied: costs are settled for a plan, and the search told them."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from torch import nn

from dmp import Layout, ShardingEnv, data_parallel, table_wise
from planner import Constraint, CostModel, ShardingPlanner
from planner.candidates.candidates import Candidates
from planner.costs.cost_model import BACKWARD, FORWARD, GRADIENT, SYNC
from planner.costs.protocol import ShardTable
from planner.costs.speeds import Speeds
from planner.costs.step import Placed, phase_seconds, whole
from sharders import default_sharders
from tests.planner_bags import MEASURED, hosts, one_axis
from tests.test_cost_model import ENVS, by_name, info


@pytest.mark.parametrize("env", ENVS, ids=str)
def test_a_rank_sends_the_rows_of_a_copy_that_its_own_ids_name(env: ShardingEnv) -> None:
    of_table = whole(info(100_000, 64), 8.0, 2000.0)
    for is_copied in (True, False):
        known = [of_table._replace(replicated=is_copied, named_rows_of_rank=rows) for rows in (0.0, 2000.0, 500.0)]
        as_all, the_same, fewer = CostModel().costs(ShardTable.of(known), env, MEASURED, 64)[0]
        assert np.array_equal(as_all, the_same)
        less = fewer < as_all * (1 - 1e-9)
        assert less[BACKWARD] == (less[GRADIENT] or less[SYNC]) == is_copied and not less[FORWARD]
        assert (fewer <= as_all).all()


def test_what_a_copy_costs_is_settled_by_all_of_them() -> None:
    """Each of these would go by rows if it were alone; together they are too many, and an all-reduce is fewer bytes."""
    env = one_axis(8)

    def phases(tables: int, samples: int, *others: Layout) -> dict[str, float]:
        layouts = [data_parallel()] * tables + list(others)
        placed = [Placed(info(20_000, 64), layout, 10.0) for layout in layouts]
        return by_name(phase_seconds(CostModel(), placed, env, MEASURED, samples))

    one, many = phases(1, 4096), phases(40, 4096)
    assert one["grad a2a"] > 0 and one["replica sync"] == 0
    all_reduce = 2 * 7 / 8 * 40 * 20_000 * 65 * 4 / MEASURED.links(env)["dp"].bandwidth
    assert many["replica sync"] == pytest.approx(all_reduce, rel=0.3)
    assert many["grad a2a"] < one["grad a2a"]
    few = phases(40, 16)
    assert few["grad a2a"] + few["replica sync"] < many["replica sync"] / 10, "few rows are named"


def test_rows_of_copies_that_come_among_other_gradients_are_copied() -> None:
    """All that there is room for; those that have an exchange to themselves are read where they come."""
    topology = replace(MEASURED, speeds=Speeds(fetch=1e-9), link_latency=0.0, link_bandwidth=1e30)

    def seconds(*others: Layout) -> float:
        placed = [Placed(info(1000, 64), layout, 1.0) for layout in (data_parallel(), *others)]
        return float(phase_seconds(CostModel(), placed, ENVS[0], topology, 512).sum())

    assert seconds() == pytest.approx(7 * 512 * (64 * 4 + 8) * 1e-9)
    assert seconds(table_wise(0)) == seconds()
    assert seconds(*[table_wise(i) for i in range(8)]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("env", [one_axis(8), hosts(2, 4)], ids=str)
@pytest.mark.parametrize("is_guessed", [True, False])
def test_planned_costs_what_it_costs_pinned_however_copies_travel(env: ShardingEnv, is_guessed: bool) -> None:
    """Also where it was first taken for another plan."""
    found = set()
    for rows, tables, samples in ((300, 6, 64), (20_000, 30, 2048), (200_000, 6, 512)):
        module = nn.ModuleDict({f"t{i}": nn.EmbeddingBag(rows, 64, mode="sum", device="meta") for i in range(tables)})
        planner = ShardingPlanner(batch_size=samples, constraints={"*": Constraint(pooling_factor=20)})
        likely = Candidates.likely if is_guessed else lambda self: self
        with mock.patch.object(Candidates, "likely", likely):
            plan = planner.plan(module, default_sharders(), env)
        pinned = planner.plan(module, default_sharders(), env, pinned=plan)
        assert pinned.report.step_seconds == pytest.approx(plan.report.step_seconds, rel=1e-9)
        assert plan.report.lower_bound <= pinned.report.step_seconds * (1 + 1e-9)
        assert pinned.report.phase_seconds == pytest.approx(plan.report.phase_seconds, rel=1e-6)
        assert (pinned.report.rank_bytes == plan.report.rank_bytes).all()
        found.add(any(entry.layout.is_copied for entry in plan.values()))
    assert found == {False, True}
