"""The machines that come with the planner: each figure has its source, and is of the right size."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import planner
from dmp import ShardingEnv
from planner import Topology

MACHINES = sorted(path.stem for path in (Path(planner.__file__).parent / "costs" / "machines").glob("*.json"))


def test_common_machines_are_there() -> None:
    assert {"a100_40gb", "a100_80gb", "b200", "cpu", "h100", "h200", "l40s"} <= set(MACHINES)
    with pytest.raises(ValueError, match=r"a100_40gb.*h100"):
        Topology.load("h1000")


@pytest.mark.parametrize("name", MACHINES)
def test_each_figure_has_its_source(name: str) -> None:
    machine = Topology.load(name)
    assert machine.name
    figures = {"memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "link_latency", "product_flops_16"}
    assert figures <= machine.sources.keys()
    assert all(len(words.split()) > 1 for words in machine.sources.values())
    device = "cpu" if name == "cpu" else "cuda"
    links = machine.links(ShardingEnv.abstract((512, 8), ("host", "local"), device))
    assert links["host"].bandwidth < links["local"].bandwidth
    assert links["host"].latency >= links["local"].latency
    usual = Topology.of(ShardingEnv.abstract((512, 8), ("host", "local"), device))
    for figure in ("memory_bandwidth", "flops"):  # a slip of a power of ten
        assert 0.2 < getattr(machine, figure) / getattr(usual, figure) < 5


def test_what_was_not_measured_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dmp")
    Topology.load("cpu").save(tmp_path / "machine.json")
    Topology.load(tmp_path / "machine.json")
    assert not caplog.records
    figures = json.loads((tmp_path / "machine.json").read_text())
    del figures["speeds"]["copies"]
    (tmp_path / "older.json").write_text(json.dumps(figures))
    assert Topology.load(tmp_path / "older.json").speeds_of_parts.copies == 0
    assert "older.json has no speeds of copies, which" in caplog.text
