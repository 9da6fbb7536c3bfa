"""The planner's costs: a machine's figures, what follows from them for a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from dmp import ParameterInfo, ShardingEnv, row_wise, table_wise
from planner import Constraint, CostModel, PlanReport, ShardingPlanner, Topology
from planner.costs.cost_model import OUTPUT, OUTPUT_OUTER, distinct
from planner.costs.speeds import Speeds
from planner.costs.step import Placed, loads
from tests.planner_bags import BagSharder, bags, hosts, one_axis, small_memory

# Topology


def test_topology_of_env() -> None:
    cuda = Topology.of(hosts(2, 8)).links(hosts(2, 8))
    assert cuda["local"].bandwidth > cuda["host"].bandwidth
    assert cuda["local"].latency < cuda["host"].latency
    assert Topology.of(one_axis(16)).links(one_axis(16))["dp"].bandwidth == cuda["host"].bandwidth
    one, four = (Topology.of(one_axis(n, "cpu")).memory_bytes for n in (1, 4))
    assert one == 4 * four
    with pytest.raises(ValueError, match=r"'tpu'.*Topology\("):
        Topology.of(one_axis(2, "tpu"))


def test_topology_of_other_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert Topology.of(one_axis(8, "xpu")) == Topology.of(one_axis(8))
    assert caplog.text.count("no figures are known of xpu devices") == 1
    # A real mesh is planned for the memory that its devices have, not for an H100's.
    env = replace(one_axis(2, "xpu"), mesh=mock.Mock())
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_device_index", return_value=1),
        mock.patch("torch.accelerator.get_memory_info", create=True, return_value=(20e9, 24e9)) as asked,
    ):
        assert Topology.of(env).memory_bytes == 24e9
        asked.assert_called_once_with(torch.device("xpu", 1))
        assert Topology.of(ShardingEnv.single("cuda")).memory_bytes == 24e9
    assert Topology.of(ShardingEnv.single("cuda")).memory_bytes == 80e9, "offline"


def test_topology_figures_by_axis() -> None:
    env = hosts(2, 4)
    for links in ((1e9, 2e9), {"local": 2e9, "host": 1e9}):
        topology = Topology(1e9, 1e9, 1e9, links, 0.0)
        assert {n: link.bandwidth for n, link in topology.links(env).items()} == {"host": 1e9, "local": 2e9}
    with pytest.raises(ValueError, match=r"link_bandwidth has 3 figures; the mesh has 2 axes"):
        Topology(1e9, 1e9, 1e9, (1e9,) * 3, 0.0).links(env)
    with pytest.raises(ValueError, match=r"link_latency names the axes \['dp'\]"):
        Topology(1e9, 1e9, 1e9, 1e9, {"dp": 0.0}).links(env)
    for bad in ((0, 1, 1, 1, 0), (1, 1, 1, -1, 0), (1, 1, 1, "fast", 0), (1, 1, 1, 1, 0, 1.0)):
        with pytest.raises(ValueError, match=r"Topology\."):
            Topology(*bad)  # type: ignore[arg-type]


def test_topology_file(tmp_path: Path) -> None:
    whole = Topology(
        80e9, 2e12, 6e13, (5e10, 4.5e11), 1e-5, 0.1, ranks_per_host=4, name="box", sources={"flops": "a data sheet"}
    )
    named = Topology(1, 1, 1, {"dp": 1e9}, {"dp": 0.0})
    for topology in (whole, named, Topology.of(one_axis(2, "cpu"))):
        topology.save(tmp_path / "t.json")
        assert Topology.load(tmp_path / "t.json") == topology
    bandwidth = [link.bandwidth for link in whole.links(hosts(2, 8)).values()]
    assert bandwidth == [5e10, 4.5e11]
    assert whole.links(one_axis(4))["dp"].bandwidth == 4.5e11 > whole.links(one_axis(8))["dp"].bandwidth == 5e10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"t\.json is no topology: expected \{.format.: .dmp topology."),
        ("{", r"t\.json is no JSON"),
        ('{"format": "dmp topology", "version": 2}', r"has version 2; this version of dmp reads 1"),
        ('{"format": "dmp topology", "version": 1, "memory": 1}', r"has fields \['memory'\]; expected"),
        ('{"format": "dmp topology", "version": 1, "flops": 1}', r"lacks \['link_bandwidth', .*; expected"),
    ],
)
def test_a_file_that_is_no_topology(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.load(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"no topology 'pdp-11': expected a file .* or one of the machines"):
        Topology.load("pdp-11")
    with pytest.raises(ValueError, match=r"a pair \(between hosts, inside one\).* got \(1, 2, 3\)"):
        Topology(1, 1, 1, (1, 2, 3), 0, ranks_per_host=8)


# Cost


def by_phase(report: PlanReport) -> dict[str, float]:
    return dict(zip(report.phases, report.phase_seconds, strict=True))


def test_replicas_cost_ids_and_gradients() -> None:
    def phases(env: ShardingEnv) -> dict[str, float]:
        planner = ShardingPlanner(small_memory(1e10, 0.0))
        planner.plan(bags((1000, 16)), [BagSharder(only=("table_wise",))], env)
        assert planner.report is not None
        return by_phase(planner.report)

    alone, copied = phases(one_axis(4)), phases(ShardingEnv.abstract((3, 4), ("replicate", "shard")))
    assert copied["output a2a"] == alone["output a2a"]
    assert copied["grad a2a"] == alone["grad a2a"]
    assert copied["input a2a"] > 3 * alone["input a2a"]
    assert copied["replica sync"] > 2 * alone["grad a2a"] > 0 == alone["replica sync"]
    # Ids of one row are one update, of its weights and their state; each id's gradient is added up.
    ids = 4 * 512 * np.array([1, 3])
    updates = distinct(np.array(1000.0), ids) * 2 * (64 + 64) + ids * 64
    assert copied["lookup bwd"] == pytest.approx(updates[1] / updates[0] * alone["lookup bwd"], rel=1e-6)


def test_summing_inside_a_host_saves_the_slow_link() -> None:
    env, long_bags = hosts(4, 8), {"*": Constraint(pooling_factor=100)}
    figures = {}
    for only in ("row_wise", "table_row_wise"):
        planner = ShardingPlanner(batch_size=4096, constraints=long_bags)
        planner.plan(bags((100_000, 64)), [BagSharder(only=(only,))], env)
        assert planner.report is not None
        figures[only] = by_phase(planner.report)["output a2a"]
    flat = ShardingPlanner(batch_size=4096, constraints=long_bags)
    flat.plan(bags((100_000, 64)), [BagSharder(only=("row_wise",))], one_axis(32))
    assert flat.report is not None
    assert figures["row_wise"] < by_phase(flat.report)["output a2a"] / 3


@pytest.mark.parametrize(("ids", "part"), [(1, 1 / 8), (0.5, 1 / 16), (2, 1 - (7 / 8) ** 2), (20, 1.0)])
def test_row_blocks_send_the_bags_that_have_ids_there(ids: float, part: float) -> None:
    """Single rows of short bags; all bags where most have some; where there are hosts two stages add all up, and short
    bags go straight to the ranks of their samples."""
    of = {}
    for name, env in (("one", one_axis(8)), ("hosts", hosts(2, 4))):
        for layout in (row_wise(), table_wise(0)):
            info = ParameterInfo((800, 64), torch.float32, "table", "sgd", state_bytes=(0.0, 0.0))
            links = Topology(1e9, 1.0, 1.0, 1.0, 0.0, ranks_per_host=8, speeds=Speeds())
            found = loads(CostModel(), [Placed(info, layout, ids)], env, links, 64)
            of[name, layout.name] = found[:, [OUTPUT, OUTPUT_OUTER]].sum(0)
    assert of["one", "row_wise"][0] == pytest.approx(of["one", "table_wise"][0] * 8 * part)
    is_straight, (near, far) = ids <= 1, of["hosts", "table_wise"]
    assert of["hosts", "row_wise"] == pytest.approx(
        [
            near * 8 * (part / 2 if is_straight else 1),
            far * (8 * part if is_straight else 2),
        ]
    )


def test_cost_model_is_replaceable() -> None:
    narrow, wide = ShardingPlanner(cost_model=CostModel()), ShardingPlanner(cost_model=CostModel(id_bytes=8))
    module, sharders = bags((1000, 16)), [BagSharder(only=("table_wise",))]
    assert narrow.plan(module, sharders, one_axis(4)) == wide.plan(module, sharders, one_axis(4))
    assert narrow.report is not None
    assert wide.report is not None
    assert narrow.report.phase_seconds[0] < wide.report.phase_seconds[0]


def test_a_model_that_lacks_a_member_is_told_so() -> None:
    class Half:
        phases = ("all",)

    with pytest.raises(ValueError, match=r"phases, spans, costs, setups .* lacks spans, costs, setups"):
        ShardingPlanner(cost_model=Half())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is a class: call it"):
        ShardingPlanner(cost_model=CostModel)  # type: ignore[arg-type]
