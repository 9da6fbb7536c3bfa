"""`model.reshard(plan)` in every kind of module, on meshes of every role: three steps, each in another plan.

The oracle is the unsharded module on the global batch, as in equality.py: outputs, gradients of the batch's weights,
weights and optimizer state after each step.
"""

from __future__ import annotations

import random

import pytest
import torch

import dmp
from dmp import ShardingEnv
from tests.equality import (
    KINDS,
    LR,
    MESHES,
    OPTIMIZERS,
    attach,
    compare_state,
    env_of,
    layouts_for,
    make_batch,
    make_module,
    unsharded,
    weights_of,
)
from tests.ranks import run_ranks
from tests.results import loss_of, same_empty_result, same_result

STEPS = 3
ONE_ACCUMULATOR = ("table_wise", "all_on_last", "row_wise", "data_parallel", "row_reversed", "table_row_wise")
"""Layouts in which row-wise Adagrad keeps one value per row, as the unsharded module does."""

SAMPLE = [
    ("dp2", "ebc", 3),
    ("dp2", "ec", 2),
    ("tp2", "ebc_weighted", 2),
    ("dp2", "embedding", 1),
    ("shard2xtp2", "ec", 1),
    ("replicate2xshard2", "bag_mean", 1),
]


def check_changes(kind: str, names: list[str], optimizer: str | None, env: ShardingEnv) -> None:
    """A step in each of the layouts; raises AssertionError."""
    module = make_module(kind)
    attach(module, optimizer)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    layouts = layouts_for(env)
    plans = [{n: layouts[name](i, s, env) for i, (n, s) in enumerate(shapes.items())} for name in names]
    model = dmp.DistributedModelParallel(module, env=env, plan=plans[0])
    ordinary = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else None
    shards = (
        None
        if optimizer != "rowwise_adagrad"
        else tuple((n, tuple(layout.shards(shapes[n], env))) for n, layout in plans[0].items())
    )
    _, *taken = unsharded(kind, optimizer, env.data_size, STEPS, shards)
    me = env.data_rank
    for step, (plan, expected) in enumerate(zip(plans, taken, strict=True)):
        if step:
            model.reshard(plan, ordinary)
        batch = make_batch(kind, me, step)
        weights = weights_of(batch)
        if weights is not None and step % 2 == 0:
            weights.requires_grad_()
        out = model(*batch)
        if expected.outs[me] is None:
            same_empty_result(out, make_module(kind))
        else:
            same_result(out, expected.outs[me])
        loss_of(out).backward()
        if ordinary is not None:
            ordinary.step()
            ordinary.zero_grad()
        compare_state(model, expected, {n: tuple(lay.shards(shapes[n], env)) for n, lay in plan.items()})


def run_some(mesh_name: str, kind: str, count: int) -> list[str]:
    """So many random chains of layouts; what failed, on every rank alike."""
    env, rng, failed = env_of(mesh_name), random.Random(f"{mesh_name} {kind}"), []
    for i in range(count):
        optimizer = OPTIMIZERS[(i + KINDS.index(kind)) % len(OPTIMIZERS)]
        known = [n for n in layouts_for(env) if optimizer != "rowwise_adagrad" or n in ONE_ACCUMULATOR]
        names = [rng.choice(known) for _ in range(STEPS)]
        try:
            check_changes(kind, names, optimizer, env)
        except AssertionError as error:
            failed.append(f"{kind} {mesh_name} {' -> '.join(names)} {optimizer}: {str(error)[:400]}")
    return failed


def size_of(mesh_name: str) -> int:
    size = 1
    for n in MESHES[mesh_name][0]:
        size *= n
    return size


@pytest.mark.parametrize(("mesh_name", "kind", "count"), SAMPLE)
@pytest.mark.sampled(4)
def test_a_step_in_each_plan(mesh_name: str, kind: str, count: int) -> None:
    for failed in run_ranks(size_of(mesh_name), run_some, mesh_name, kind, count):
        assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh_name", [name for name in MESHES if size_of(name) <= 4])
def test_more_chains(mesh_name: str, kind: str) -> None:
    for failed in run_ranks(size_of(mesh_name), run_some, mesh_name, kind, 10, timeout=300.0):
        assert not failed, "\n".join(failed)
