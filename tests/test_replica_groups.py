"""Advice on a mesh that is given: what the same ranks would do in replica groups, told where it saves much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dmp import ShardingEnv
from planner import PlanReport, ShardingPlanner, Topology
from planner.replica_groups import group_advice, worth_asking
from tests.planner_bags import BagSharder, bags, hosts

MACHINE = Topology(80e9, 2e12, 6e13, (5e9, 4.5e11), (2e-5, 1e-5), ranks_per_host=8)
BY_AXIS = replace(MACHINE, ranks_per_host=None, link_bandwidth=(5e9,), link_latency={"dp": 2e-5})
ENV = ShardingEnv.abstract((128,), ("dp",))


def planned(env: ShardingEnv, topology: Topology | None, advises: bool | None, **options: Any) -> PlanReport:
    module, sharder = bags((4_000_000, 128), (1000, 16)), BagSharder(only=("table_wise",))
    sharder.features = {id(m): (1.0,) * 20 for m in module.values()}
    planner = ShardingPlanner(topology, batch_size=2048, advises=advises, **options)
    report = planner.plan(module, [sharder], env).report
    assert isinstance(report, PlanReport)
    return report


@pytest.mark.parametrize(
    "topology", [MACHINE, replace(MACHINE, ranks_per_host=None, link_bandwidth=(5e9,), link_latency={"dp": 2e-5})]
)
def test_a_table_that_one_rank_sends_to_all_is_better_copied(topology: Topology) -> None:
    report = planned(ENV, topology, None)
    (advice,) = report.notes
    assert "groups of" in advice and "replicate=" in advice and "instead of" in advice
    axes = dict(pair.split("=") for pair in advice.partition("axes ")[2].partition(")")[0].split(", "))
    mesh = ShardingEnv.abstract(tuple(map(int, axes.values())), tuple(axes))
    assert mesh.size == 128 and mesh.table_size < 128
    there = planned(mesh, MACHINE, False)
    assert there.step_seconds < 0.8 * report.step_seconds
    assert f"{report.step_seconds * 1e3:.3g}" in advice
    if topology is MACHINE:
        assert f"take {there.step_seconds * 1e3:.3g} ms" in advice
    assert planned(ENV, topology, False).notes == ()


def test_nothing_is_said_where_ranks_are_equally_loaded_or_copies_do_not_fit() -> None:
    even = ShardingPlanner().plan(bags(*[(100_000, 64)] * 32), [BagSharder()], hosts(8, 8)).report
    assert even.notes == () and not worth_asking(even, hosts(8, 8))
    report = planned(ENV, MACHINE, False)
    assert worth_asking(report, ENV)
    asked: list[ShardingEnv] = []

    def on_mesh(env: ShardingEnv, _: Topology) -> PlanReport:
        asked.append(env)
        return report

    assert group_advice(replace(report, usable_bytes=1), ENV, MACHINE, on_mesh) == () and not asked
    tensor = ShardingEnv.abstract((8,), ("tp",))
    assert group_advice(report, tensor, MACHINE, on_mesh) == () and not asked
    assert group_advice(report, ENV, MACHINE, on_mesh) == () and len(asked) == 1  # no better: no further
    more = ShardingEnv.abstract((2, 16, 8), ("replicate", "host", "local"))
    asked.clear()
    group_advice(report, more, MACHINE, on_mesh)
    assert [(each.shape, each.names) for each in asked] == [((8, 4, 8), ("replicate", "host", "local"))]
