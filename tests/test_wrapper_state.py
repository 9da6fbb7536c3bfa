"""`DistributedModelParallel`: loading, copies and the fused optimizer, beside the unsharded model."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dmp import (
    CheckpointError,
    ChunkedTensor,
    DistributedModelParallel,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    ranks,
    row_wise,
    save_checkpoint,
    to_unsharded,
    verify,
)
from tests.equality import env_of
from tests.ranks import mesh, run_ranks
from tests.test_asked import Said
from tests.wrapped_net import LR, TABLES, Net, batch, loss_of, mixed, plan_for, same_values, wrap

# ---- loading ----


def untouched(given: dict[str, Any]) -> Any:
    """A check that a dict has the same keys, objects and values as now."""
    before = [(k, v, v.detach().clone() if isinstance(v, torch.Tensor) else v) for k, v in given.items()]

    def check() -> None:
        assert [k for k, _, _ in before] == list(given)
        assert all(given[k] is v and torch.equal(v, value) for k, v, value in before)

    return check


def _load() -> None:
    env = env_of("dp2")
    for seed in (None, 1, 2):
        model, source = wrap(env, plan_for(env, seed)), Net(seed=9)
        ids = {n: id(p) for n, p in model.named_parameters()}
        whole = dict(source.state_dict())
        check = untouched(whole)
        result = model.load_state_dict(whole)
        assert result.missing_keys == [] and result.unexpected_keys == []
        check()
        same_values(model, source)
        assert {n: id(p) for n, p in model.named_parameters()} == ids
        torch.testing.assert_close(model(batch(env.rank)), source(batch(env.rank)))

        model.load_state_dict(
            {"x." + k: v for k, v in Net(seed=8).state_dict().items()} | {"epoch": torch.ones(1)}, prefix="x."
        )
        same_values(model, Net(seed=8))

        snapshot = copy.deepcopy(model.state_dict())  # this plan's own pieces
        model.load_state_dict(whole)
        model.load_state_dict(snapshot)
        same_values(model, Net(seed=8))


def test_a_whole_state_dict_loads_into_every_plan() -> None:
    run_ranks(2, _load)


def test_strict_raises_with_full_names_and_changes_nothing() -> None:
    model = wrap()
    given = dict(Net(seed=9).state_dict())
    del given["over.bias"], given["users.weight"]
    given["over.extra"] = torch.ones(1)
    given["odd"] = torch.ones(1)
    check = untouched(given)
    with pytest.raises(
        CheckpointError,
        match=r"missing keys: \['users\.weight', 'over\.bias'\]; unexpected keys: \['over\.extra', 'odd'\]",
    ):
        model.load_state_dict(given)
    check()
    same_values(model, Net())
    result = model.load_state_dict(given, strict=False)
    check()
    assert result.missing_keys == ["users.weight", "over.bias"] and result.unexpected_keys == ["over.extra", "odd"]
    expected = Net(seed=9)
    expected.users, expected.over.bias = Net().users, Net().over.bias
    same_values(model, expected)
    with pytest.raises(
        CheckpointError, match=r"missing keys: \['p\.scale', 'p\.users\.weight'.*unexpected keys: \['p\.new'\]"
    ):
        model.load_state_dict({"p.new": torch.ones(1)}, prefix="p.")
    assert issubclass(CheckpointError, RuntimeError)


def test_one_prefix_more_or_less_is_said() -> None:
    model, given = wrap(), Net(seed=9).state_dict()
    with pytest.raises(CheckpointError, match=r"all names begin with 'module\.': give {k\.removeprefix"):
        model.load_state_dict({f"module.{name}": value for name, value in given.items()})
    with pytest.raises(CheckpointError, match=r"none of its names begins with '0\.': give {'0\.' \+ k"):
        DistributedModelParallel(nn.Sequential(nn.Linear(2, 1))).load_state_dict(nn.Linear(2, 1).state_dict())
    del given["out.weight"]
    with pytest.raises(CheckpointError) as error:
        model.load_state_dict({f"module.{name}": value for name, value in given.items()})
    assert "removeprefix" not in str(error.value)
    same_values(model, Net())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("out.weight", torch.ones(1, 5), ["'?out.weight'?", r"\(1, 5\)", r"\(1, 6\)"]),
        ("users.weight", torch.ones(11, 4), [r"users\.weight", r"\(11, 4\)", r"\(11, 8\)"]),
        ("users.weight", torch.ones(11, 8, device="meta"), [r"users\.weight is on meta", "no values"]),
        ("more.weight", torch.ones(30), [r"more\.weight", r"\(30,\)"]),
        (
            "items.weight",
            ChunkedTensor((7, 8), [torch.ones(3, 8)], [(0, 0)]),
            [r"items\.weight", "another plan", "full_state_dict"],
        ),
        ("items.weight", [1.0], [r"items\.weight", "list"]),
        ("scale", 3, ["scale", "int"]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_changes_nothing(name: str, value: Any, words: list[str], strict: bool) -> None:
    model = wrap()
    with pytest.raises(CheckpointError) as error:
        model.load_state_dict({**Net(seed=9).state_dict(), name: value}, strict=strict)
    assert all(re.search(word, str(error.value)) for word in words), str(error.value)
    same_values(model, Net())


def _of_what_is_inside(folder: str) -> None:
    model = wrap(env_of("dp2"), optimizer="rowwise_adagrad")
    whole, inside = full_state_dict(model), full_state_dict(model.module)
    assert inside.keys() == whole.keys() and all(torch.equal(value, whole[name]) for name, value in inside.items())
    same_values(to_unsharded(model.module), Net())
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    save_checkpoint(folder, model.module, dense)
    other = wrap(env_of("dp2"), optimizer="rowwise_adagrad")
    load_checkpoint(folder, other, torch.optim.SGD(other.module.over.parameters(), lr=0.1))


def test_the_module_inside_is_gathered_and_saved_like_the_model(tmp_path: Path) -> None:
    """Of a save it had no state of optimizers in the backward pass, which a load then missed."""
    run_ranks(2, _of_what_is_inside, str(tmp_path / "saved"))


def _kept_by_its_module(axis: str) -> None:
    model = wrap(ShardingEnv.from_mesh(mesh((2,), (axis,))), optimizer="rowwise_adagrad")
    whole, state, module = full_state_dict(model), full_optimizer_state_dict(model), model.module
    del model  # which has not been called
    gc.collect()
    torch.testing.assert_close(full_state_dict(module), whole)
    torch.testing.assert_close(full_optimizer_state_dict(module)["state"], state["state"])
    same_values(to_unsharded(module), Net())
    assert verify(module, Net(), batch(torch.distributed.get_rank()))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_model_that_its_module_alone_keeps(axis: str) -> None:
    """As after `fully_shard(module)`: it was of no wrapped model any more, and its optimizers had no state."""
    run_ranks(2, _kept_by_its_module, axis)


def _of_a_stage() -> None:
    """Stages of a pipeline have tables and blocks of one name, on ranks of their own."""
    stages = mesh((2, 2), ("pp", "dp"))
    seed = stages.get_local_rank("pp")
    model = DistributedModelParallel(
        Net(seed), ShardingEnv.from_mesh(stages["dp"]), plan=dict.fromkeys(TABLES, row_wise())
    )
    same_values(to_unsharded(model.module), Net(seed))
    assert torch.equal(full_state_dict(model.module.users)["weight"], Net(seed).users.weight)


def test_the_module_inside_is_gathered_over_the_models_ranks() -> None:
    run_ranks(4, _of_a_stage)


def _assign() -> None:
    env = env_of("dp2")
    model, oracle = wrap(env), Net(seed=9)
    given = dict(Net(seed=9).state_dict())
    model.load_state_dict(given, assign=True)
    same_values(model, oracle)
    assert model.module.over.weight.data_ptr() == given["over.weight"].data_ptr()
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, oracle)]
    for step in range(2):
        loss_of(model, batch(env.rank, step)).backward()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(2)])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_values(model, oracle)


def test_assigned_values_train() -> None:
    run_ranks(2, _assign)


def _inside_another() -> None:
    env = env_of("dp2")
    outer, source = nn.Sequential(wrap(env), nn.Identity()), Net(seed=9)
    outer.load_state_dict({"0." + k: v for k, v in source.state_dict().items()})
    same_values(outer[0], source)
    missing = outer.load_state_dict({"0.over.weight": source.over.weight, "0.new": torch.ones(1)}, strict=False)
    assert "0.users.weight" not in missing.unexpected_keys and len(missing.unexpected_keys) == 1


def test_loading_through_a_parent_module() -> None:
    run_ranks(2, _inside_another)
    outer = nn.Sequential(wrap())
    outer.load_state_dict({"0." + k: v for k, v in Net(seed=9).state_dict().items()})
    same_values(outer[0], Net(seed=9))


# ---- copies ----


def _copies(optimizer: str | None) -> None:
    env = env_of("dp2")
    model = wrap(env, None, optimizer)
    loss_of(model, batch(env.rank)).backward()
    for twin in (copy.deepcopy(model), model.copy("cpu"), model.copy()):
        assert type(twin) is DistributedModelParallel and twin.plan == model.plan and twin.env is model.env
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
        storages = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}
        assert not storages & {p.untyped_storage().data_ptr() for p in twin.parameters() if p.numel()}
        ids = batch(env.rank, 7)
        assert torch.equal(model(ids), twin(ids))
        before = [p.detach().clone() for p in model.parameters()]
        ordinary = torch.optim.SGD(list(twin.parameters()), lr=LR)
        for step in range(2):
            ordinary.zero_grad()
            loss_of(twin, batch(env.rank, step)).backward()
            ordinary.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))
        if optimizer:
            for group, old in zip(twin.fused_optimizer.param_groups, model.fused_optimizer.param_groups, strict=True):
                group["lr"] = 0.7
                assert old["lr"] == LR
            assert {id(p) for g in twin.fused_optimizer.param_groups for p in g["params"]} <= {
                id(p) for p in twin.parameters()
            }
    # The original trains on as if there had been no copy.
    oracle = wrap(env, None, optimizer)
    loss_of(oracle, batch(env.rank)).backward()
    for m in (model, oracle):
        m.zero_grad()
        loss_of(m, batch(env.rank, 1)).backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), oracle.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
@pytest.mark.sampled(2)
def test_copies_are_independent(optimizer: str | None) -> None:
    run_ranks(2, _copies, optimizer)


def _average() -> None:
    env = env_of("dp2")
    model, oracle = wrap(env, None, "sgd"), Net()
    ours, theirs = (AveragedModel(m, use_buffers=False) for m in (model, oracle))
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if n not in TABLES], lr=LR)
    whole = torch.optim.SGD(oracle.parameters(), lr=LR)
    for step in range(3):
        loss_of(model, batch(env.rank, step)).backward()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(2)])).backward()
        for optimizer in (dense, whole):
            optimizer.step()
            optimizer.zero_grad()
        ours.update_parameters(model)
        theirs.update_parameters(oracle)
    same_values(model, oracle)
    same_values(ours.module, theirs.module)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    saved = copy.deepcopy(ours.state_dict())
    again = AveragedModel(model, use_buffers=False)
    again.load_state_dict(saved)
    same_values(again.module, theirs.module)


def test_an_average_of_weights() -> None:
    run_ranks(2, _average)


def test_a_copy_keeps_what_users_put_on_the_wrapper() -> None:
    class Mine(DistributedModelParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.notes = ["a"]

    model = Mine(Net(), plan=mixed())
    model.register_forward_hook(lambda m, args, out: out + 1)
    twin = copy.deepcopy(model)
    assert type(twin) is Mine and twin.notes == ["a"] and twin.notes is not model.notes
    assert torch.equal(twin(batch(0)), model(batch(0)))


def test_pickling_is_refused_with_the_way_out() -> None:
    for refuse in (lambda m: pickle.dumps(m), lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"process groups.*save_checkpoint.*full_state_dict.*deepcopy"):
            refuse(wrap())


# ---- the fused optimizer ----


def test_fused_optimizer_state_has_the_unsharded_names_and_shapes() -> None:
    model = wrap(optimizer="adam")
    loss_of(model, batch(0)).backward()
    state = model.fused_optimizer.state_dict()
    assert set(state["state"]) == set(TABLES)
    for name, whole in ((n, dict(Net().named_parameters())[n]) for n in TABLES):
        shapes = {k: tuple(v.shape) for k, v in state["state"][name].items()}
        assert shapes == {"step": (), "exp_avg": tuple(whole.shape), "exp_avg_sq": tuple(whole.shape)}
    assert sorted(n for g in state["param_groups"] for n in g["params"]) == sorted(TABLES)
    assert {g["lr"] for g in state["param_groups"]} == {LR}
    other = wrap(optimizer="adam")
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(copy.deepcopy(state))
    for m in (model, other):
        loss_of(m, batch(0, 1)).backward()
    assert torch.equal(model.state_dict()["users.weight"], other.state_dict()["users.weight"])
    with pytest.raises(CheckpointError, match=r"no state for 'items\.weight'"):
        other.fused_optimizer.load_state_dict(
            {"state": {k: v for k, v in state["state"].items() if k != "items.weight"}}
        )


def _schedule() -> None:
    """A new learning rate is used at the next backward; torch's scheduler drives it."""
    env = env_of("dp2")
    model, oracle = wrap(env, None, "sgd"), Net()
    whole = torch.optim.SGD([p for n, p in oracle.named_parameters() if n in TABLES], lr=LR)
    optimizers = [model.fused_optimizer, whole]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    for step in range(4):
        loss_of(model, batch(env.rank, step)).backward()
        loss_of(oracle, torch.cat([batch(r, step) for r in range(2)])).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            if step == 2:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
        oracle.zero_grad()
        model.zero_grad()
    assert {g["lr"] for g in model.fused_optimizer.param_groups} == {0.0}
    same_values(model, oracle)


def test_a_schedule_takes_effect() -> None:
    run_ranks(2, _schedule)


def _saved(folder: str) -> list[list[int]]:
    """How much was said of a save that was made at each place of each step."""
    env, found = env_of("dp2"), []
    for of_tables in ("sgd", None):
        model = wrap(env, None, of_tables)
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if not of_tables or n not in TABLES], LR)
        counts, names = [], itertools.count()
        for step in range(2):
            loss = loss_of(model, batch(env.rank, step))
            for each in (optimizer.zero_grad, loss.backward, optimizer.step):
                each()
                ranks.say_once.cache_clear()
                with Said() as said:
                    save_checkpoint(f"{folder}/{next(names)}-{of_tables}", model)
                counts.append(sum("makes half of it twice" in text for text in said.texts))
        found.append(counts)
    return found


def test_a_save_before_the_step_says_that_it_has_half_of_it(tmp_path: Any) -> None:
    """Before the first step nobody knows whether the program makes any."""
    first, others = run_ranks(2, _saved, str(tmp_path))
    assert first == [[0, 0, 0, 0, 1, 0], [0] * 6] and others == [[0] * 6] * 2


def _taken_in_a_step(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    env = env_of("dp2")
    model = wrap(env, None, "sgd")
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n not in TABLES], LR)
    ways: list[Callable[[], Any]] = [
        lambda: full_state_dict(model),
        lambda: torch.save(model.module.state_dict(), io.BytesIO()),
        lambda: dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{is_in_a_step}"),
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        lambda: to_unsharded(model),
        lambda: dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{is_in_a_step}2").result(),
    ]
    loss_of(model, batch(env.rank, 0)).backward(), optimizer.step()
    for is_in_a_step in (False, True):
        if is_in_a_step:
            loss_of(model, batch(env.rank, 1)).backward()
        for i, take in enumerate(ways):
            ranks.say_once.cache_clear()
            with Said() as said:
                take()
            count = sum("makes half of it twice" in text for text in said.texts)
            assert count == (is_in_a_step and env.rank == 0), (i, is_in_a_step, said.texts)


def test_state_that_others_save_before_the_step_has_half_of_it(tmp_path: Any) -> None:
    """`save_checkpoint` alone said so."""
    run_ranks(2, _taken_in_a_step, str(tmp_path))
