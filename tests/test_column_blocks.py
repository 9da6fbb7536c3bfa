"""Row-wise Adagrad's state between plans that cut columns and plans that do not: `fused_optimizer.load_state_dict`."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    Layout,
    Shard,
    ShardingEnv,
    column_wise,
    full_optimizer_state_dict,
    load_checkpoint,
    rectangles,
    save_checkpoint,
    table_wise,
)
from dmp.state.find_wrapped import env_of
from dmp.wrap.optimizers.column_blocks import between_blocks, merge_blocks
from dmp.wrap.values.whole import gather
from tests import state_jobs
from tests.equality import attach
from tests.ranks import run_ranks
from tests.state_jobs import TABLES

KIND = "rowwise_adagrad"
LAYOUTS = ("row_wise", "column_wise", "uneven", "grid", "mixed")


def sums(model: Any) -> dict[str, torch.Tensor]:
    return {name: full_optimizer_state_dict(model)["state"][name]["sum"] for name in TABLES}


def between_plans(layouts: list[tuple[str, str]]) -> None:
    for saved, loaded in layouts:
        one = state_jobs.build(saved, KIND, (2,), None)
        state_jobs.train(one, state_jobs.dense_optimizer(one, KIND), range(2), one.env)
        expected = sums(one)
        live = one.fused_optimizer.state_dict()
        flat = {f"{n}|{k}": v for n, values in live["state"].items() for k, v in values.items()}
        whole: dict[str, Any] = {name: {} for name in TABLES}
        for key, value in gather(flat, env_of(one)).items():
            whole[key.partition("|")[0]][key.partition("|")[2]] = value
        for given in (full_optimizer_state_dict(one), {**live, "state": whole}):
            two = state_jobs.build(loaded, KIND, (2,), None, seed=1)
            state_jobs.train(two, state_jobs.dense_optimizer(two, KIND), range(1), two.env)
            two.fused_optimizer.load_state_dict(copy.deepcopy(given))
            for name, value in sums(two).items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-6, atol=1e-9, msg=f"{saved} to {loaded}: {name}"
                )
            if saved == loaded and given["state"] is whole:  # to the bit, block by block
                again = two.fused_optimizer.state_dict()["state"]
                for name in TABLES:
                    assert torch.equal(gather({"x": again[name]["sum"]}, two.env)["x"], whole[name]["sum"])
            state_jobs.train(two, state_jobs.dense_optimizer(two, KIND), range(1), two.env)


def test_between_plans() -> None:
    run_ranks(2, between_plans, [("column_wise", "row_wise"), ("row_wise", "column_wise"), ("uneven", "uneven")])


@pytest.mark.slow
def test_between_all_plans() -> None:
    run_ranks(2, between_plans, list(product(LAYOUTS, LAYOUTS)), timeout=300)


@pytest.mark.parametrize("kind", ["adagrad", "adam", "lamb", "rowwise_adagrad"])
def test_widths_are_given_where_state_has_blocks(kind: str) -> None:
    """Other state has one form and one set of names on every plan: torch's checkpoint of one would not load."""
    module = nn.EmbeddingBag(7, 8)
    attach(module, kind)
    model = DistributedModelParallel(module, ShardingEnv.single(), plan={"weight": column_wise([0, 0])})
    assert ("column_widths" in model.fused_optimizer.state_dict()) == (kind == "rowwise_adagrad")


def test_blocks_in_torchs_checkpoint(tmp_path: Path) -> None:
    """Which torch itself loads on the same plan alone."""

    def made(layout: Layout) -> DistributedModelParallel:
        module = nn.EmbeddingBag(7, 8)
        attach(module, KIND)
        return DistributedModelParallel(module, ShardingEnv.single(), plan={"weight": layout})

    saved, loaded = made(column_wise([0, 0])), made(table_wise(0))
    saved(torch.tensor([[1, 2]])).square().sum().backward()
    state = {"model": saved.state_dict(), "optimizer": saved.fused_optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no process group
        dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    load_checkpoint(tmp_path / "saved", loaded)
    ours, theirs = (full_optimizer_state_dict(model)["state"]["weight"]["sum"] for model in (loaded, saved))
    torch.testing.assert_close(ours, theirs)


def refused() -> list[str]:
    """Nothing is changed by what does not fit, and it is said by name."""
    model = state_jobs.build("column_wise", KIND, (2,), None)
    state_jobs.train(model, state_jobs.dense_optimizer(model, KIND), range(1), model.env)
    optimizer, before = model.fused_optimizer, sums(model)
    good = full_optimizer_state_dict(model)["state"]
    name, rows = TABLES[0], len(good[TABLES[0]]["sum"])

    def changed(value: Any) -> dict[str, Any]:
        return {"state": {**good, name: {**good[name], "sum": value}}}

    said = []
    for given in (
        None,
        {},
        {"state": []},
        {"state": {name: 3}},
        {"state": {name: good[name]}},
        {"state": {**good, "x": {}}},
        {"state": {**good, name: {}}},
        {"state": {**good, name: {**good[name], "exp_avg": good[name]["sum"]}}},
        {"state": good, "param_groups": [{"lr": 1}]},
        {"state": good, "column_widths": {name: "x"}},
        changed(None),
        changed([1.0]),
        changed(torch.zeros(rows + 1)),
        changed(torch.zeros(rows, 4)),
        {**changed(torch.zeros(rows, 4)), "column_widths": {name: [4, 4, 4, 4]}, "param_groups": None},
    ):
        try:
            optimizer.load_state_dict(given)
            assert sums(model)[name].tolist() == [0.0] * rows
            said.append("nothing")
        except CheckpointError as error:
            said.append(str(error))
            assert all(torch.equal(value, before[n]) for n, value in sums(model).items())
    return said


def test_what_does_not_fit_is_named() -> None:
    said = run_ranks(2, refused)[0]
    expected = [
        *["got NoneType without a dict of state"],
        *["got dict without a dict of state"] * 2,
        "is a int",
        "no state for",
        "unknown parameter 'x'",
        "has no state 'sum'",
        "has an unknown state 'exp_avg'",
        "has no list of params",
        "expected column_widths as lists of numbers",
        "is a NoneType; expected a tensor",
        "is a list; expected a tensor",
        "has shape (11,), expected (10, 2)",
        "with the column_widths that state_dict() gives",
        "nothing",
    ]
    assert [text for text, words in zip(said, expected, strict=True) if words not in text] == []


def test_forms() -> None:
    blocks = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    rows = merge_blocks(blocks, (4, 12))
    assert rows.tolist() == [2.5, 2.0]
    like = torch.zeros(2, 3)
    assert torch.equal(between_blocks(rows, None, like, (4, 4, 8)), torch.tensor([[2.5] * 3, [2.0] * 3]))  # type: ignore[arg-type]
    assert torch.equal(between_blocks(blocks, (4, 12), rows, None), rows)  # type: ignore[arg-type]
    assert torch.equal(between_blocks(blocks, (4, 12), blocks, (8, 8)), rows.unsqueeze(1).expand(2, 2))  # type: ignore[arg-type]
    assert between_blocks(blocks, (4, 12), blocks, (4, 12)) is blocks
    assert between_blocks(blocks, None, rows, None) is None


def test_blocks_of_several_lengths_that_begin_at_one_row(tmp_path: Path) -> None:
    """A checkpoint of one block into rectangles of one rank, two of which begin at row 0 and end at different rows."""
    cuts = [Shard((0, 0), (2, 1), 0), Shard((2, 0), (4, 1), 0), Shard((0, 1), (6, 3), 0)]
    models = []
    for layout in (table_wise(0), rectangles(cuts)):
        bag = nn.EmbeddingBag(6, 4, mode="sum")
        attach(bag, KIND)
        models.append(DistributedModelParallel(bag, ShardingEnv.single(), plan={"weight": layout}))
    models[0](torch.arange(6).view(3, 2)).square().sum().backward()
    save_checkpoint(tmp_path / "one", models[0])
    load_checkpoint(tmp_path / "one", models[1])
    one, two = (full_optimizer_state_dict(model)["state"]["weight"]["sum"] for model in models)
    torch.testing.assert_close(two, one)
    assert one.all()
