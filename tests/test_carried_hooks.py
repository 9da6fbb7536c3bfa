"""Users' hooks on parameters and on state dicts of what wrapping replaces: called, and with the same effect; and
attributes of parameters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from dmp import DistributedModelParallel, ShardingEnv, data_parallel, full_state_dict, row_wise, table_wise
from tests.beside_plain import trains
from tests.oracle import LR, attach
from tests.ranks import mesh, run_ranks

MESHES = {"dp": ((2,), ("dp",)), "shard": ((2,), ("shard",)), "hsdp": ((2, 2), ("replicate", "shard"))}


class Net(nn.Module):
    """A table into two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.over, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.over(self.rows(ids)).relu())
        return out


def hook_gradients(module: Any) -> list[RemovableHandle]:
    """Each parameter's gradient is changed by a factor of its own."""
    handles = []
    for factor, p in enumerate((module.rows.weight, module.over.weight), 2):

        def change(p: torch.Tensor, factor: int = factor) -> None:
            assert p.grad is not None
            p.grad.mul_(factor)

        handles += [p.register_hook(lambda g, f=factor: f * g), p.register_post_accumulate_grad_hook(change)]
    return handles


def ids(g: torch.Generator, env: ShardingEnv) -> torch.Tensor:
    return torch.randint(0, 20, (env.data_size, 4, 3), generator=g)


def changes_gradients(on: str, when: str) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    for layout in (row_wise(), data_parallel()):
        module, whole = Net(), Net()
        handles = hook_gradients(module) if when != "after" else []
        model = DistributedModelParallel(module, env, plan={"rows.weight": layout})
        if when == "after":
            hook_gradients(model.module)
        for handle in handles if when == "removed" else ():
            handle.remove()
        if when != "removed":
            hook_gradients(whole)
        trains(model, whole, env, lambda g: ids(g, env))
        if when == "before" and layout == row_wise():
            model.reshard({"rows.weight": table_wise(0)})
            trains(model, whole, env, lambda g: ids(g, env), steps=1)


@pytest.mark.parametrize("when", ["before", "after", "removed"])
@pytest.mark.parametrize("on", ["dp", "shard", "hsdp"])
@pytest.mark.sampled(4)
def test_hooks_on_gradients(on: str, when: str) -> None:
    size = 4 if on == "hsdp" else 2
    if size == 2 or when == "before":
        run_ranks(size, changes_gradients, on, when)


def of_a_table_without_gradients() -> None:
    module = Net()
    attach(module.rows, "sgd")
    hook_gradients(module)
    DistributedModelParallel(module)


def test_hooks_that_nothing_calls_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    of_a_table_without_gradients()
    assert "hooks on the gradients of 'rows.weight' are not called" in caplog.text


def hook_states(module: Any, log: list[str]) -> None:
    """A note is put beside a table's weight, which is stored negated."""

    def give(m: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        log.append(f"given {prefix}")
        state[f"{prefix}note"], state[f"{prefix}weight"] = torch.ones(2), -state[f"{prefix}weight"]

    def take(m: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        log.append(f"taken {prefix} by {m is module.rows}")
        assert state.pop(f"{prefix}note").eq(1).all()
        state[f"{prefix}weight"] = -state[f"{prefix}weight"]

    module.rows.register_state_dict_pre_hook(lambda m, prefix, _: log.append(f"giving {prefix}"))
    module.rows.register_state_dict_post_hook(give)
    module.rows.register_load_state_dict_pre_hook(take)
    module.rows.register_load_state_dict_post_hook(lambda m, keys: log.append(f"took {keys.unexpected_keys}"))


def changes_states(axis: str) -> None:
    module, whole = Net(), Net()
    logs: tuple[list[str], list[str]] = ([], [])
    for each, log in zip((module, whole), logs, strict=True):
        hook_states(each, log)
    model = DistributedModelParallel(
        module, ShardingEnv.from_mesh(mesh((2,), (axis,))), plan={"rows.weight": row_wise()}
    )
    given, wanted = full_state_dict(model), whole.state_dict()
    assert set(given) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(given[name], value)
    for log in logs:
        log.clear()
    for each in (model, whole):
        each.load_state_dict({name: 2 * value if name != "rows.note" else value for name, value in wanted.items()})
    own, others = ([line for line in log if line.startswith("t")] for log in logs)
    assert own == others and len(own) == 2
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full_state_dict(model)[name], value)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_hooks_on_state_dicts(axis: str) -> None:
    run_ranks(2, changes_states, axis)


def attributes(axis: str) -> None:
    module = Net()
    whole = torch.ones(20)
    for p in module.parameters():
        p._no_weight_decay, p.of_whole = True, whole  # type: ignore[attr-defined]
    model = DistributedModelParallel(
        module, ShardingEnv.from_mesh(mesh((2,), (axis,))), plan={"rows.weight": row_wise()}
    )
    assert all(getattr(p, "_no_weight_decay", False) for p in model.parameters())
    assert not hasattr(model.module.rows.weight, "of_whole"), "a rank keeps what is as large as all of its parameter"


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_attributes_of_parameters_stay(axis: str) -> None:
    """State-space models' loops make groups by one: without it their weights had another weight decay, in silence."""
    run_ranks(2, attributes, axis)


def tables_from_before_wrapping() -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES["dp"]))
    module = Net()
    attach(module.rows, "sgd")
    freed = weakref.ref(module.rows.weight)
    model = DistributedModelParallel(module, env, plan={"rows.weight": row_wise()})
    gc.collect()
    assert freed() is None, "every rank keeps all rows for as long as it lives"
    assert model.module.rows is module.rows

    module, other = Net(), Net()
    attach(module.rows, "sgd")
    other.rows.weight, before = module.rows.weight, module.rows.weight.detach().clone().requires_grad_()
    model = DistributedModelParallel(module, env, plan={"rows.weight": row_wise()})
    other(torch.arange(5)).sum().backward()
    (expected,) = torch.autograd.grad(functional_call(other, {"rows.weight": before}, torch.arange(5)).sum(), before)
    torch.testing.assert_close(other.rows.weight.detach(), before - LR * expected)
    assert other.rows.weight.grad is None


def test_tables_from_before_wrapping_are_freed() -> None:
    """torch's map of optimizers in the backward pass kept them; who else has one trains it as before."""
    run_ranks(2, tables_from_before_wrapping)


def tables_from_before_a_reshard() -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES["dp"]))
    module = Net()
    attach(module.rows, "adagrad")
    model = DistributedModelParallel(module, env, plan={"rows.weight": row_wise()})
    for _ in range(2):
        model(torch.arange(4)).sum().backward()
        model.fused_optimizer.state_dict()
        freed = weakref.ref(model.module.rows.weight), weakref.ref(model.module.rows._engine.store)  # type: ignore[attr-defined]
        model.reshard({"rows.weight": table_wise(1)})
        gc.collect()
        assert [ref() for ref in freed] == [None, None], "a rank holds a table twice"
        model.reshard({"rows.weight": row_wise()})


def test_tables_from_before_a_reshard_are_freed() -> None:
    """A table updated in the backward pass was kept, with its optimizer's state, beside the one in its place."""
    run_ranks(2, tables_from_before_a_reshard)
