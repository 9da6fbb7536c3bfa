"""Maps of raw ids in checkpoints, copies, other plans and other worlds; evicted rows; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import dmp
from sharders import ManagedCollisionEmbeddingBagCollectionSharder
from tests.ranks import run_ranks
from tests.torchrec_dropin import raw_ids

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def _saved(path: str, at: str, layout: str, **options: Any) -> None:
    """Trained to the end of an interval, then saved: as one process, and as the mesh."""
    pair = raw_ids.Pair(at, layout, **options)
    for step in range(4):
        pair.step(step)
    dmp.save_checkpoint(f"{path}/ours", pair.model)
    if pair.env.rank == 0:
        torch.save(pair.plain.state_dict(), f"{path}/plain.pt")


def _goes_on(path: str, at: str, layout: str, **options: Any) -> None:
    """A new process that loads what one process has saved, and a new mesh that loads either, go on alike."""
    for source in ("ours", "plain.pt"):
        plain = raw_ids.make(**options)
        plain.load_state_dict(torch.load(f"{path}/plain.pt"))
        pair = raw_ids.Pair(at, layout, plain=plain, **options)
        dmp.load_checkpoint(f"{path}/{source}", pair.model)
        pair.compare(4)
        for step in range(4, 9):
            pair.step(step)


def _checkpoint(path: Path, worlds: tuple[tuple[int, str, str], ...], **options: Any) -> None:
    (world, at, layout), *others = worlds
    run_ranks(world, _saved, str(path), at, layout, **options)
    for world, at, layout in others:
        run_ranks(world, _goes_on, str(path), at, layout, **options)


def test_a_checkpoint_goes_on_in_another_plan(tmp_path: Path) -> None:
    _checkpoint(tmp_path, ((2, "dp2", "row_wise"), (2, "dp2", "mixed")))


@pytest.mark.slow
@pytest.mark.parametrize("policy", raw_ids.POLICIES)
def test_a_checkpoint_goes_on_in_another_world(tmp_path: Path, policy: str) -> None:
    worlds = (
        (4, "dp4", "random"),
        (1, "single", "table_wise"),
        (2, "dp2", "uneven"),
        (4, "replicate2xshard2", "mixed"),
    )
    _checkpoint(tmp_path, worlds, policy=policy)


def _state_dicts(at: str) -> None:
    pair = raw_ids.Pair(at, "row_wise")
    for step in range(3):
        pair.step(step)
    whole = dmp.full_state_dict(pair.model)
    other = raw_ids.Pair(at, "mixed")
    other.model.load_state_dict(whole)  # whole tensors, of which each rank takes its entries
    other.plain.load_state_dict(whole)
    other.step(3)
    for each in (dmp.to_unsharded(pair.model), dmp.to_unsharded(copy.deepcopy(pair.model))):
        for name, value in each.state_dict().items():
            torch.testing.assert_close(value, whole[name], msg=name)
    both = copy.deepcopy(pair.plain), copy.deepcopy(pair.model)  # with the history of the step that has begun
    for step in range(3, 6):
        pair.step(step)
    copies = raw_ids.Pair(at, "row_wise", *both)
    for step in range(3, 6):
        copies.step(step)


def test_state_dicts_and_copies() -> None:
    run_ranks(2, _state_dicts, "dp2")


def _resharded(at: str, layouts: tuple[str, ...], **options: Any) -> None:
    pair = raw_ids.Pair(at, layouts[0], **options)
    for i in range(6):
        pair.step(2 * i)
        pair.model.reshard(pair.plan(layouts[i % len(layouts)]), pair.ordinary and pair.ordinary[1])
        pair.step(2 * i + 1)


@pytest.mark.parametrize(("at", "world"), [("dp2", 2), pytest.param("dp4", 4, marks=pytest.mark.slow)])
def test_a_running_model_changes_its_plan(at: str, world: int) -> None:
    """In the middle of intervals: maps and their histories go where the rows go."""
    run_ranks(world, _resharded, at, ("row_wise", "mixed", "all_on_last", "row_reversed"), interval=3)


def _wrapped_late(at: str, policy: str) -> None:
    """The module has seen batches before it is sharded, and is in the middle of an interval."""
    plain = raw_ids.make(policy=policy, interval=3)
    for step in range(4):
        raw_ids.loss_of(plain(raw_ids.batch(step, 0)), 1)
    pair = raw_ids.Pair(
        at, "row_wise", plain, dmp.DistributedModelParallel(copy.deepcopy(plain), env=raw_ids.env_of(at))
    )
    for step in range(4, 9):
        pair.step(step)


@pytest.mark.parametrize("policy", ["LFU", pytest.param("DistanceLFU", marks=pytest.mark.slow)])
def test_what_was_learned_before_wrapping_is_kept(policy: str) -> None:
    run_ranks(2, _wrapped_late, "dp2", policy)


def _filtered(at: str, name: str) -> None:
    from torchrec.modules import mc_modules

    options = {"threshold_filtering_func": getattr(mc_modules, f"{name}_threshold_filter")}
    for filled in raw_ids.check(at, "row_wise", **options), raw_ids.check(at, "mixed", kind="ec", **options):
        assert min(filled) > 2, filled


def test_filters_of_new_ids_see_the_counts_of_all_ranks() -> None:
    run_ranks(2, _filtered, "dp2", "average")


def _reset(at: str, layout: str) -> dict[str, torch.Tensor]:
    """Weights and optimizer state after a training in which evicted rows get new values."""
    from torchrec import KeyedJaggedTensor

    sharder = ManagedCollisionEmbeddingBagCollectionSharder(reset_evicted=True)
    options = {"optimizer": "adagrad", "policy": "LRU"}
    module, env = raw_ids.make(**options), raw_ids.env_of(at)
    plan = raw_ids.Pair(at, layout, **options).plan(layout)
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder])
    num = env.data_size
    for step in range(6):
        whole = raw_ids.joined([raw_ids.batch(step, r) for r in range(2)])
        parts = [raw_ids.batch(step, r) for r in range(2)] if num == 2 else [whole]
        assert isinstance(parts[0], KeyedJaggedTensor)
        raw_ids.loss_of(model(parts[env.place_of(env.rank, "replicate", "shard")]), 10 // num).backward()
    state = dmp.full_optimizer_state_dict(model)["state"]
    return {**dmp.full_state_dict(model), **{f"{name}.sum": of["sum"] for name, of in state.items()}}


def test_evicted_rows_are_reset_alike_on_every_plan() -> None:
    (expected,) = run_ranks(1, _reset, "single", "table_wise")
    for layout in ("row_wise", "mixed"):
        for got in run_ranks(2, _reset, "dp2", layout):
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    kept = raw_ids.make(optimizer="adagrad", policy="LRU")
    for step in range(6):
        raw_ids.loss_of(kept(raw_ids.joined([raw_ids.batch(step, r) for r in range(2)])), 10).backward()
    tables = [name for name, _ in kept.named_parameters()]
    assert all(not torch.allclose(kept.state_dict()[name], expected[name]) for name in tables)


def _bad(at: str, what: str) -> None:
    pair = raw_ids.Pair(at, "row_wise")
    pair.step(0)
    before = dmp.full_state_dict(pair.model)
    given: Any = raw_ids.batch(1, pair.env.rank)
    if pair.env.rank == 1:
        if what == "raw id":
            given.values()[3] = torch.iinfo(torch.int64).max
        else:
            given = "no batch"
    try:
        pair.model(given)
    finally:
        for name, value in dmp.full_state_dict(pair.model).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        pair.step(1)  # all go on


@pytest.mark.parametrize(("what", "text"), [("raw id", "raw id 9223372036854775807"), ("type", "not of the type")])
def test_a_bad_batch_is_an_error_on_all_ranks_before_maps_learn(what: str, text: str) -> None:
    for error in run_ranks(2, _bad, "dp2", what, expect=dmp.InputError):
        assert text in str(error), error
        assert "rank 1" in str(error)
