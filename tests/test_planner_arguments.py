"""What the planner is given by somebody who mistook it: refused in words, before anything is planned."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from dmp import ShardingEnv
from planner import Constraint, CostModel, ShardingPlanner, Topology, propose_mesh
from sharders import default_sharders
from tests.planner_bags import bags

ENV = ShardingEnv.abstract((4,), ("dp",))
USUAL: dict[str, Any] = {
    "memory_bytes": 8e10,
    "memory_bandwidth": 2e12,
    "flops": 6e13,
    "link_bandwidth": 5e10,
    "link_latency": 1e-5,
}


def _plan(module: Any = None, **options: Any) -> Any:
    return ShardingPlanner(**options).plan(bags((100, 32)) if module is None else module, default_sharders(), ENV)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: _plan(nn.Linear), "expected module to be an nn.Module; got <class 'torch.nn.*Linear'>: call it"),
        (lambda: ShardingPlanner().plan(bags((9, 8)), None, ENV), "expected a list of sharders, .*; got None"),  # type: ignore[arg-type]
        (lambda: _plan(3), "expected module to be an nn.Module; got 3"),
        (lambda: propose_mesh(None, 4), "expected module to be an nn.Module; got None"),  # type: ignore[arg-type]
        (lambda: _plan(topology="h100"), "topology must be a planner.Topology, .*; got 'h100'"),
        (lambda: propose_mesh(bags((9, 8)), 4, topology="h100"), "topology must be a planner.Topology"),  # type: ignore[arg-type]
        (lambda: _plan(advises="yes"), "advises must be True, False or None; got 'yes'"),
        (lambda: _plan(batch_size=inf), "batch_size must be a finite number; got inf"),
        (lambda: _plan(sequence_length=inf), "sequence_length must be a finite number; got inf"),
        (lambda: propose_mesh(bags((9, 8)), 4, batch_size=inf), "batch_size must be a finite number; got inf"),
        (lambda: propose_mesh(bags((9, 8)), 4, constraints=[1]), "constraints must be a dict of parameter name"),  # type: ignore[arg-type]
        (lambda: _plan(topology=Topology(**USUAL, collective_bandwidth=(1, 2))), "collective_bandwidth has 2 figures"),
        (lambda: Topology(**USUAL, ranks_per_host=inf), "ranks_per_host must be a whole number; got inf"),  # type: ignore[arg-type]
        (lambda: Topology(**USUAL, speeds={"foo": 1}), "speeds has 'foo'; expected some of lookup_row, "),  # type: ignore[arg-type]
    ],
)
def test_refused_in_words(asked: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asked()


class _Model(CostModel):
    def __init__(self, spoil: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._spoil = spoil

    def costs(self, *arguments: Any) -> Any:
        return self._spoil(*super().costs(*arguments))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda local, everywhere: (local * np.nan, everywhere), "finite seconds and bytes, none below 0"),
        (lambda local, everywhere: (-local, everywhere), "finite seconds and bytes, none below 0"),
        (lambda local, everywhere: (local[:, :-1], everywhere), r"two arrays of shape \(\d+, 9\); got \[\(\d+, 8\), "),
        (lambda local, everywhere: 3, "two arrays of shape .*; got 3"),
    ],
    ids=["nan", "negative", "narrow", "a number"],
)
def test_costs_that_are_none_are_refused_in_words(spoil: Callable[[Any, Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"_Model.*costs must return {words}"):
        _plan(cost_model=_Model(spoil))


def test_speeds_of_nothing_are_not_infinite(tmp_path: Path) -> None:
    """A file with an empty `speeds` says nothing of them; as speeds, they would cost nothing in any plan."""
    assert Topology(**USUAL, speeds={}) == Topology(**USUAL)  # type: ignore[arg-type]
    Topology(**USUAL).save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text("utf-8")
    (tmp_path / "t.json").write_text(re.sub(r"\n}", ',\n"speeds": {}\n}', text), "utf-8")
    assert Topology.load(tmp_path / "t.json").speeds_of_parts == Topology(**USUAL).speeds_of_parts


def test_numbers_of_numpy_are_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Constraint(pooling_factor=np.float32(3)).pooling_factor == 3.0
        assert Topology(**{**USUAL, "flops": np.float32(6e13)}).flops > 0
    with pytest.raises(ValueError, match=r"pooling_factor must be mean ids"):
        Constraint(pooling_factor=np.float16("nan"))
