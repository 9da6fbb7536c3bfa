"""Casts, moves and replaced parameters after wrapping: right from the next forward on, or an error that names them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, InputError, ShardError, ShardingEnv, full_state_dict
from dmp.wrap.making import ddp_watch
from tests.equality import attach
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import Net, batch, loss_of, mixed, wrap

Module = Any


def parts(module: Module) -> None:
    for part in (module.users, module.items, module.more, module.over, module.out):
        part.double()


def replaced(module: Module) -> None:
    weight = module.over.weight.detach()
    module.over.weight = nn.Parameter(weight.clone())


def late(module: Module) -> None:
    module.requires_grad_(False)
    module(batch(0))
    module.requires_grad_(True)


CHANGES: dict[str, Callable[[Module], Any]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(dtype=torch.float64),
    "cpu": lambda model: model.cpu(),
    "of a parent": lambda model: nn.Sequential(model).double(),
    "of the module": lambda model: getattr(model, "module", model).double(),
    "of parts": lambda model: parts(getattr(model, "module", model)),
    "to_empty": lambda model: model.load_state_dict(kept(model)),
    "replaced": replaced,
    "frozen for a while": late,
}


def kept(model: Module) -> dict[str, Any]:
    state = full_state_dict(model)
    model.to_empty(device="cpu")
    return state


def steps(model: Module, data_size: int, data_rank: int | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(data_size) if data_rank is None else [data_rank]:
            (loss_of(model, batch(rank, step)) / (data_size if data_rank is None else 1)).backward()
        optimizer.step()


def changed(shape: tuple[int, ...], names: tuple[str, ...], what: str) -> dict[str, Any]:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model = DistributedModelParallel(Net(), env, plan=mixed())
    loss_of(model, batch(env.data_rank)).backward()  # DDP has run before
    model.zero_grad()
    CHANGES[what](model)
    steps(model, env.data_size, env.data_rank)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in model.copy().parameters()}
    return full_state_dict(model)


CASTS = ("double", "bfloat16", "to", "of a parent", "of the module", "of parts")


@pytest.mark.parametrize("what", CASTS)
@pytest.mark.sampled(2)
def test_fsdp2_that_has_run_refuses_casts(what: str) -> None:
    for error in run_ranks(2, changed, (2,), ("shard",), what, expect=ShardError):
        assert "'over.weight' was cast from torch.float32" in str(error) and "mixed_precision" in str(error)


def test_shared_memory_of_dtensors_is_refused() -> None:
    run_ranks(2, shared)


def shared() -> None:
    wrap(ShardingEnv.from_mesh(mesh((2,), ("dp",)))).share_memory()
    with pytest.raises(ShardError, match=r"DTensors.*to_unsharded"):
        wrap(ShardingEnv.from_mesh(mesh((2,), ("shard",)))).share_memory()


ONCE = [(names, what) for what in ("cpu", "to_empty", "frozen for a while") for names in ("dp", "shard", "tp")]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        *ONCE,
        *(("dp", what) for what in (*CASTS, "replaced")),
        ("replicate", "double"),
        ("tp", "to"),
        ("tp", "of parts"),
    ],
)
@pytest.mark.sampled(10)
def test_trains_as_one_process_does(names: str, what: str) -> None:
    module = Net()
    CHANGES[what](module)
    steps(module, 1 if names == "tp" else 2, None)
    wanted = module.state_dict()
    tolerance = 3e-2 if what == "bfloat16" else 1e-5
    for got in run_ranks(2, changed, (2,), (names,), what):
        for name, value in wanted.items():
            torch.testing.assert_close(
                got[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


# ---- a table's parameter ----


def given_data() -> None:
    model = wrap()
    whole = full_state_dict(model)
    rank = model.env.rank
    users, items, more = model.users.weight, model.items.weight, model.more.weight
    users.data = users.data * 2  # its part
    items.data = whole["items.weight"] * 3  # the whole table
    model(batch(rank))
    for name, factor in (("users", 2), ("items", 3), ("more", 1)):
        torch.testing.assert_close(full_state_dict(model)[f"{name}.weight"], whole[f"{name}.weight"] * factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    plain = Net()
    with torch.no_grad():
        plain.users.weight.mul_(2)
        plain.items.weight.mul_(3)
    steps_of = torch.optim.SGD(plain.parameters(), lr=0.1)
    for other in range(2):
        (loss_of(plain, batch(other)) / 2).backward()
    steps_of.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full_state_dict(model)[name], value)
    more.data = more.data.double()
    with pytest.raises(ShardError, match=r"table 'weight' of more was replaced by \(30, 4\) torch\.float64; expected"):
        model(batch(rank))
    model(batch(rank))  # it is what it was before


def given_data_and_no_forward() -> None:
    """As weights averaged over steps are put in place for a save: state is read, loaded, copied and cast as given."""
    model = wrap()
    whole = full_state_dict(model)
    names = ["users.weight", "items.weight", "more.weight"]
    ways: list[Callable[[], nn.Module]] = [lambda: model, lambda: copy.deepcopy(model), lambda: model.double()]
    for times, way in enumerate(ways, 2):
        for name in names:
            table = model.module.get_parameter(name)
            table.data = table.data / (times - 1) * times
        state = full_state_dict(way())
        for name in names:
            torch.testing.assert_close(state[name].float(), whole[name] * times)
    for name in names:
        model.module.get_parameter(name).data = torch.ones_like(model.module.get_parameter(name))
    model.load_state_dict(whole)
    model(batch(model.env.rank))
    for name in names:
        torch.testing.assert_close(full_state_dict(model)[name].float(), whole[name])


def given_data_and_put_back() -> None:
    """As averaged weights are tried, and those that are trained put back: what was in a table's place is kept."""
    model, other = wrap(), wrap()
    whole = full_state_dict(model)
    names = ["users.weight", "items.weight", "more.weight"]
    kept = [model.module.get_parameter(name).data for name in names]
    for name in names:
        model.module.get_parameter(name).data = model.module.get_parameter(name).data * 2
    model(batch(model.env.rank))
    _are_tables_times(model, whole, 2, names)
    for name, values in zip(names, kept, strict=True):
        model.module.get_parameter(name).data = values
    model(batch(model.env.rank))
    _are_tables_times(model, whole, 1, names)
    for name in names:  # two models change their tables
        a, b = (m.module.get_parameter(name) for m in (model, other))
        with torch.no_grad():
            b.mul_(3)
        a.data, b.data = b.data, a.data
    for m, times in ((model, 3), (other, 1)):
        m(batch(model.env.rank))
        _are_tables_times(m, whole, times, names)


def given_data_again_and_again() -> None:
    """As rows are made of length 1 after each step: where nobody keeps what was there, tables stay where they are."""
    model = wrap()
    model(batch(model.env.rank))
    places = {name: p.data_ptr() for name, p in model.module.named_parameters()}
    for _ in range(3):
        table = model.module.get_parameter("users.weight")
        table.data = table.data * 0.5
        model(batch(model.env.rank))
    assert {name: p.data_ptr() for name, p in model.module.named_parameters()} == places


def _are_tables_times(model: Module, whole: dict[str, torch.Tensor], times: float, names: list[str]) -> None:
    state = full_state_dict(model)
    for name in names:
        torch.testing.assert_close(state[name], whole[name] * times)


def replaced_table() -> None:
    model = wrap()
    table = model.users.weight
    model.users.weight = nn.Parameter(table.detach().clone())
    with pytest.raises(ShardError, match=r"table 'weight' of users was replaced by a Parameter.*load_state_dict"):
        model(batch(model.env.rank))
    model.users.weight = table
    model(batch(model.env.rank))
    if model.env.rank:  # the others are told
        with pytest.raises(ShardError, match="cannot be taken away"):
            del model.users.weight
        del model.users._parameters["weight"]
    with pytest.raises((ShardError, InputError), match=r"replaced by nothing|cannot be read"):
        model(batch(model.env.rank))


def test_data_put_in_a_tables_place_is_taken_over() -> None:
    run_ranks(2, given_data)
    run_ranks(2, given_data_and_no_forward)
    run_ranks(2, given_data_and_put_back)
    run_ranks(2, given_data_again_and_again)


def test_a_tables_parameter_cannot_be_replaced() -> None:
    run_ranks(2, replaced_table)


def _asked(has_dense: bool) -> tuple[int, int]:
    """Nodes that a forward asks torch for, to see that dense weights are held still, and signatures that are read."""
    module: nn.Module = nn.Linear(2, 2) if has_dense else nn.EmbeddingBag(8, 4, mode="sum")
    if not has_dense:
        attach(module, "sgd")
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    given = torch.ones(3, 2) if has_dense else torch.ones(3, 2, dtype=torch.int64)
    model(given).sum().backward()
    asked, read = 0, 0
    apply, signature_of = ddp_watch._Together.apply, inspect._signature_from_function  # type: ignore[attr-defined]

    def counted(*parameters: Any) -> Any:
        nonlocal asked
        asked += 1
        return apply(*parameters)

    def read_anew(*arguments: Any, **options: Any) -> Any:
        nonlocal read
        read += 1
        return signature_of(*arguments, **options)

    with (
        mock.patch.object(ddp_watch._Together, "apply", counted),
        mock.patch.object(inspect, "_signature_from_function", read_anew),
    ):
        model(given).sum().backward()
    return asked, read


def test_what_each_forward_asks_of_torch() -> None:
    assert run_ranks(2, _asked, True) == [(1, 0)] * 2
    assert run_ranks(2, _asked, False) == [(0, 0)] * 2, "there is nothing to see"


class Halves(torch.autograd.Function):
    """Whose backward is wrong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[:1]


def reshaped() -> None:
    with pytest.raises(RuntimeError, match="returned an invalid gradient") as of_torch:
        Halves.apply(torch.ones(3, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert not isinstance(of_torch.value, ShardError)
    model = DistributedModelParallel(nn.Linear(4, 3), ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters():
        p.data = torch.cat([p.data, p.data])
    with pytest.raises(
        ShardError, match=r"'weight' from \(3, 4\) to \(6, 4\): .*Resize the model before it is wrapped"
    ):
        model(torch.ones(2, 4)).sum().backward()


def test_a_weight_of_another_shape_is_named() -> None:
    """It ended in the name of a function of torch's, and two shapes."""
    run_ranks(2, reshaped)
