"""`model.reshard(plan)`: from every layout to every other, against a checkpoint loaded into a new model of that plan.

That one is compared with the unsharded module elsewhere (test_state_matrix.py); here once more, for a few.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dmp import load_checkpoint, save_checkpoint
from tests.ranks import run_ranks
from tests.state_jobs import (
    OPTIMIZERS,
    PLANS,
    STEPS,
    TABLES,
    WORLDS,
    assert_same,
    build,
    dense_optimizer,
    table_plan,
    train,
    whole,
)

MORE = 2
KINDS = [*OPTIMIZERS, "none"]
HOSTS_ONLY = "table_row_wise"

SAMPLE: list[tuple[str, str, list[tuple[str, str]]]] = [
    # world, kind, layouts from and to
    ("2", "adagrad", [("table_wise", "row_wise"), ("data_parallel", "column_wise")]),
    ("2", "none", [("row_wise", "uneven"), ("mixed", "data_parallel")]),
    ("2", "rowwise_adagrad", [("column_wise", "row_wise"), ("uneven", "column_wise"), ("grid", "grid")]),
    ("4", "adam", [("uneven", "mixed"), ("grid", "table_wise")]),
    ("2x2", "rowwise_adagrad", [("mixed", "uneven")]),
    ("hosts", "sgd", [("table_row_wise", "column_wise")]),
]


def reshard_all(world: str, kind: str, pairs: list[tuple[str, str]], folder: str) -> list[str]:
    """What goes wrong, for each pair, on this rank."""
    wrong = []
    for old, new in pairs:
        try:
            check_pair(world, kind, old, new, f"{folder}/{old}-{new}")
        except AssertionError as error:
            wrong.append(f"{world} {kind} {old} -> {new}: {str(error)[:300]}")
    return wrong


def check_pair(world: str, kind: str, old: str, new: str, path: str) -> None:
    """Train, reshard, train on; a second model is given the checkpoint from in between."""
    shape, names = WORLDS[world]
    model = build(old, kind, shape, names)
    env, optimizer = model.env, dense_optimizer(model, kind)
    train(model, optimizer, range(STEPS), env)
    for group in model.fused_optimizer.param_groups:
        group["lr"] *= 0.5
    fused, groups = model.fused_optimizer, [*model.fused_optimizer.param_groups]
    before = whole(model, optimizer)
    save_checkpoint(path, model, optimizer)
    done = model.reshard(table_plan(new, env), optimizer)
    assert model.fused_optimizer is fused and all(a is b for a, b in zip(fused.param_groups, groups, strict=True))
    assert done.plan == model.plan and sum(done.sent_bytes) >= 0
    assert {name: model.plan[name].layout for name in TABLES} == table_plan(new, env)
    assert_same(whole(model, optimizer), before)
    twin = build(new, kind, shape, names, seed=1)
    twins = dense_optimizer(twin, kind, lr=1.0)
    train(twin, twins, range(1), env)  # DDP sums in another order after its first backward
    load_checkpoint(path, twin, twins)
    steps = range(STEPS, STEPS + MORE)
    train(model, optimizer, steps, env)
    train(twin, twins, steps, env)
    assert_same(whole(model, optimizer), whole(twin, twins))


def check(world: str, kind: str, pairs: list[tuple[str, str]], folder: Path) -> None:
    size = 1
    for n in WORLDS[world][0]:
        size *= n
    for wrong in run_ranks(size, reshard_all, world, kind, pairs, str(folder), timeout=500.0):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("world", "kind", "pairs"), SAMPLE, ids=lambda x: str(x)[:20])
@pytest.mark.sampled(6)
def test_goes_on_as_from_a_checkpoint(world: str, kind: str, pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    check(world, kind, pairs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["1", "2", "4", "2x2", "hosts"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_to_every_other(world: str, kind: str, tmp_path: Path) -> None:
    layouts = [name for name in PLANS if name != HOSTS_ONLY or world == "hosts"]
    check(world, kind, list(product(layouts, layouts)), tmp_path)
