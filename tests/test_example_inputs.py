"""Plans of models whose inputs nobody can guess, proved with inputs that are given."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks

TP = ShardingEnv.abstract((2,), ("tp",))
PLAN = {"up": "colwise", "down": "rowwise"}


class Pages(nn.Module):
    """Takes a dict with the ids of a page, how many there are, and what each weighs."""

    def __init__(self, on_parts: bool) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(40, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.on_parts = nn.Parameter(torch.ones(1)), on_parts

    def forward(self, page: dict[str, Any], *, count: int) -> dict[str, torch.Tensor]:
        if int(page["length"].max()) > 5:
            raise ValueError("a page is shorter")
        x = self.table(page["ids"][:, : int(page["length"][0])])[:, :count] * page["weight"][..., None]
        hidden = self.up(x).relu()
        out = self.down(hidden * self.scale) if self.on_parts else self.down(hidden) * self.scale
        return {"out": out}


def example(**changes: Any) -> dict[str, Any]:
    page = {"ids": torch.arange(12).reshape(2, 6), "length": torch.tensor([3, 4]), "weight": torch.ones(2, 1)}
    return {"page": page, "count": 3} | changes


def test_a_plan_is_proved_with_what_the_model_takes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dmp"):
        found = TensorParallelSharder(PLAN, example_inputs=example()).place(Pages(False), {}, TP)
        assert any(note.startswith("proved: outputs and gradients on 2") for note in found.notes)
        assert not caplog.records
        TensorParallelSharder(PLAN).place(Pages(False), {}, TP)
    assert any("not proved" in record.message and "example_inputs=" in record.message for record in caplog.records)


def test_a_plan_that_is_wrong_is_told_before_anything_is_split() -> None:
    with pytest.raises(PlanError, match="the gradient of 'scale' on rank 0 differs"):
        TensorParallelSharder(PLAN, example_inputs=example()).place(Pages(True), {}, TP)


def test_what_was_given_is_as_it_was() -> None:
    given = example()
    kept = {name: value.clone() for name, value in given["page"].items()}
    TensorParallelSharder(PLAN, example_inputs=given).place(Pages(False), {}, TP)
    torch.testing.assert_close(given["page"], kept)
    assert given["page"]["weight"].grad is None


def test_examples_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match=r"Pages.forward takes no 1 arguments and keywords \[\]; expected what"):
        TensorParallelSharder(PLAN, example_inputs=torch.ones(2, 8)).place(Pages(False), {}, TP)
    page = example()["page"] | {"length": torch.tensor([9, 9])}
    found = TensorParallelSharder(PLAN, example_inputs=example(page=page)).place(Pages(False), {}, TP)
    assert any("not proved" in note and "ValueError: a page is shorter" in note for note in found.notes)


@pytest.mark.parametrize("given", [torch.ones(3, 8), (torch.ones(3, 8),), {"input": torch.ones(3, 8)}])
def test_ways_to_give_them(given: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    sharder = TensorParallelSharder({"0": "colwise", "1": "rowwise"}, example_inputs=given)
    assert any(note.startswith("proved") for note in sharder.place(model, {}, TP).notes)


def other_by_rank() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    plan = PLAN if env.rank else {}
    placement = TensorParallelSharder(plan, example_inputs=example()).place(Pages(False), {}, env)
    with pytest.raises(PlanError, match="ranks 0 and 1 along mesh axis 'tp' would split the model in different ways"):
        placement.apply(Pages(False))


def unproved_by_rank() -> None:
    """The other rank takes part in comparing gradients."""
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    given = example() if env.rank else None
    sharder = TensorParallelSharder(PLAN, example_inputs=given)
    model = DistributedModelParallel(Pages(False), env, sharders=[sharder])
    page = example()
    model(page["page"], count=page["count"])["out"].sum().backward()


@pytest.mark.parametrize("job", [other_by_rank, unproved_by_rank])
def test_examples_that_differ_by_rank(job: Any) -> None:
    """Groups would be split in different ways, or one rank wait for the other."""
    run_ranks(2, job)
