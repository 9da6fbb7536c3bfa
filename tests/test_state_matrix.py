"""Checkpoints of every layout on every world, loaded at every other: equal to the bit, and the training goes on.

The whole matrix is 36 places squared for each of four optimizers (and for tables without one of their own); the sample
has every layout, world and optimizer as a source and as a target.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    full_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
    table_wise,
)
from tests.ranks import run_ranks
from tests.state_jobs import (
    DIM,
    OPTIMIZERS,
    PLANS,
    ROWS,
    STEPS,
    TABLES,
    WORLDS,
    Found,
    Place,
    Run,
    Saves,
    State,
    assert_none_wrong,
    assert_same,
    batch,
    dense_optimizer,
    each,
    load_into,
    make,
    options,
    save_from,
)

MORE = 3  # steps after the save
KINDS = [*OPTIMIZERS, "none"]


def possible(place: Place) -> bool:
    """`table_row_wise` needs two shard axes: a host, and ranks inside it."""
    return place.layout != "table_row_wise" or place.world == "hosts"


PLACES = [place for pair in product(PLANS, WORLDS) if possible(place := Place(*pair))]

SAMPLE: list[tuple[str, Place, Place]] = [
    # kind, from, to
    ("adagrad", Place("table_wise", "2"), Place("row_wise", "4")),
    ("adagrad", Place("mixed", "4"), Place("uneven", "2")),
    ("rowwise_adagrad", Place("row_wise", "2"), Place("table_wise", "4")),
    ("rowwise_adagrad", Place("uneven", "2x2"), Place("column_wise", "4")),
    ("rowwise_adagrad", Place("table_row_wise", "hosts"), Place("grid", "hosts")),
    ("adam", Place("column_wise", "4"), Place("mixed", "2")),
    ("adam", Place("data_parallel", "2"), Place("table_row_wise", "hosts")),
    ("sgd", Place("grid", "2x2"), Place("column_wise", "2")),
    ("sgd", Place("row_wise", "1"), Place("data_parallel", "2x2")),
    ("none", Place("uneven", "2"), Place("mixed", "1")),
    ("none", Place("table_wise", "2x2"), Place("grid", "4")),
    ("rowwise_adagrad", Place("mixed", "hosts"), Place("mixed", "hosts")),
]


# ---- in the workers ----


def check_load(loaded: Run, saved: Run, source: Place, target: Place, more: int) -> None:
    """The loaded state is the saved one to the bit, and goes on as the run that was not interrupted.

    Row-wise Adagrad between different column blocks is documented to go on from the mean over the blocks (see
    optimizer_state.py): what is expected there is worked out by hand.
    """
    assert_same(loaded.at, saved.at)
    before, after = column_cuts(source), column_cuts(target)
    sums = {
        name: blocks if before[name] == after[name] else spread(saved.at[1]["state"][name]["sum"], after[name])
        for name, blocks in saved.blocks.items()
    }
    assert loaded.blocks.keys() == sums.keys()
    for name, blocks in saved.blocks.items():
        torch.testing.assert_close(saved.at[1]["state"][name]["sum"], mean(blocks, before[name]), rtol=1e-6, atol=0)
    assert all(torch.equal(loaded.blocks[name], blocks) for name, blocks in sums.items()), "sums of column blocks"
    if sums and before != after:
        assert_same(loaded.later, by_hand(saved.at, sums, after, more), exact=False)
    else:
        assert_same(loaded.later, saved.later, exact=source == target)


def mean(blocks: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """(rows, column blocks) -> (rows,), weighted by the blocks' widths."""
    return blocks @ (torch.tensor([b - a for a, b in pairwise(cuts)]) / cuts[-1])


def spread(sums: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """(rows,) -> (rows, column blocks)"""
    return sums.unsqueeze(1).repeat(1, len(cuts) - 1)


def column_cuts(place: Place) -> dict[str, list[int]]:
    """Where each table's column blocks begin, and its width."""
    shape, names = WORLDS[place.world]
    env = ShardingEnv.abstract(shape, names or ("dp",), "cpu")
    layouts = PLANS[place.layout](env.table_size)
    return {
        name: [*sorted({s.offsets[1] for s in layout.shards((rows, DIM), env)}), DIM]
        for name, rows, layout in zip(TABLES, ROWS, layouts, strict=True)
    }


def by_hand(state: State, sums: dict[str, torch.Tensor], cuts: dict[str, list[int]], more: int) -> State:
    """`more` steps of the unsharded model from `state`, with row-wise Adagrad for each column block."""
    module = make("none")
    module.load_state_dict(state[0])
    named, dense = dict(module.named_parameters()), dense_optimizer(module, "rowwise_adagrad")
    dense.param_groups[0].update(options(state)["out.weight"])
    others = named.keys() - set(TABLES)
    for name in others:
        dense.state[named[name]] = {key: value.clone() for key, value in state[1]["state"][name].items()}
    sums = {name: value.clone() for name, value in sums.items()}
    for step in range(STEPS, STEPS + more):
        module.zero_grad()
        module(batch(step)).square().mean().backward()
        dense.step()
        for name in TABLES:
            grad, lr = named[name].grad, options(state)[name]["lr"]
            assert grad is not None
            for i, (a, b) in enumerate(pairwise(cuts[name])):
                sums[name][:, i] += grad[:, a:b].square().mean(1)
                named[name].data[:, a:b] -= lr * grad[:, a:b] / (sums[name][:, i : i + 1].sqrt() + 1e-10)
    after: dict[str, Any] = {name: dict(dense.state[named[name]]) for name in others}
    for name in TABLES:
        after[name] = {"sum": mean(sums[name], cuts[name]), "step": state[1]["state"][name]["step"] + more}
    return module.state_dict(), {"state": after, "param_groups": state[1]["param_groups"]}


def load_all(sources: dict[Place, str], target: Place, kind: str, more: int) -> Found:
    """Load every checkpoint at `target`, train on, compare with the runs that saved them."""

    def load(source: Place, path: str) -> Run:
        return load_into(path, target.layout, kind, *WORLDS[target.world], more, before=int(source == target))

    def check(loaded: Run, saved: Run, source: Place) -> None:
        check_load(loaded, saved, source, target, more)

    return each(sources, load, check, lambda source: source.world == target.world)


def of_what_is_here(owner: int, wanted: str = "") -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """An optimizer of this rank's parts alone, as `if p.numel()` gives, and Lightning's BaseFinetuning, for which one
    empty part is as good as another."""
    module = nn.ModuleDict({"table": nn.Embedding(6, 4), "top": nn.Linear(4, 1)})
    model = DistributedModelParallel(module, plan={"table.weight": table_wise(owner)})
    held = [p for name, p in model.named_parameters() if p.numel() and name.startswith(wanted)]
    return model, torch.optim.Adagrad(held, lr=0.1)


def saved_and_loaded(path: str, owner: int, other: int) -> None:
    model, optimizer = of_what_is_here(owner)
    model.module["top"](model.module["table"](torch.tensor([0, 3]))).square().mean().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    again, restored = of_what_is_here(other)
    load_checkpoint(path, again, restored)
    want, got = (full_optimizer_state_dict(*each)["state"] for each in ((model, optimizer), (again, restored)))
    assert all(torch.equal(got[name]["sum"], state["sum"]) for name, state in want.items()) and len(got) == 3
    with pytest.raises(CheckpointError, match=f"rank {other}: .*'table.weight' was saved, but no optimizer here has"):
        load_checkpoint(path, *of_what_is_here(other, "top"))


# ---- in the parent ----


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saved"))


def check(saves: Saves, sources: list[Place], target: Place, kind: str) -> None:
    paths = {s: saves.path(f"{kind}-{s}", s.size, save_from, s.layout, kind, *WORLDS[s.world], MORE) for s in sources}
    results = run_ranks(target.size, load_all, paths, target, kind, MORE, timeout=600.0)
    assert_none_wrong(f"{kind} into {target}", results, list(range(target.size)))


@pytest.mark.parametrize(("kind", "source", "target"), SAMPLE, ids=str)
@pytest.mark.sampled(8)
def test_save_here_load_there(kind: str, source: Place, target: Place, saves: Saves) -> None:
    check(saves, [source], target, kind)


def test_the_sample_covers() -> None:
    kinds, *ends = zip(*SAMPLE, strict=True)
    assert set(kinds) == set(KINDS)
    for places in ends:
        assert {place.layout for place in places} == set(PLANS)
        assert {place.world for place in places} == set(WORLDS)
        assert set(places) <= set(PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("target", PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_loads_every_other(kind: str, target: Place, saves: Saves) -> None:
    check(saves, PLACES, target, kind)


@pytest.mark.parametrize(("owner", "other"), [(0, 1), (1, 0)])
def test_an_optimizer_may_lack_a_table_of_which_its_rank_has_nothing(owner: int, other: int, tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, str(tmp_path / "saved"), owner, other)
