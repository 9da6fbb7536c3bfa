"""Optimizers made before wrapping train what wrapping has put in place of their parameters, or are refused by name."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_optimizer_state_dict, full_state_dict
from tests.beside_plain import trains
from tests.equality import attach
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import TABLES, Net, batch, loss_of, mixed

KINDS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


def groups(module: nn.Module, named: bool) -> list[dict[str, Any]]:
    """Tables and the rest with rates of their own."""
    rest = [(name, p) for name, p in module.named_parameters() if name not in TABLES]
    both = [[(name, p) for name, p in module.named_parameters() if name in TABLES], rest]
    return [
        {"params": part if named else [p for _, p in part], "lr": lr}
        for part, lr in zip(both, (0.1, 0.05), strict=True)
    ]


def trained(kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None, on_meta: bool = False) -> dict[str, Any]:
    module = Net()
    if on_meta:
        module = module.to("meta")
        module.scale = torch.full((1,), 0.5)
    optimizer = KINDS[kind](groups(module, named=kind == "AdamW"), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    env = ShardingEnv.single() if names is None else ShardingEnv.from_mesh(mesh(shape, names))
    model = DistributedModelParallel(module, env, plan=mixed())
    if on_meta:
        model.load_state_dict(Net().state_dict())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(env.data_rank, step)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}
    assert set(full_optimizer_state_dict(model, optimizer)["state"]) == set(full_state_dict(model)) - {"scale"} or (
        kind == "SGD"
    )
    return full_state_dict(model)


def expected(kind: str, data_size: int) -> dict[str, Any]:
    module = Net()
    optimizer = KINDS[kind](groups(module, named=False), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(data_size):
            (loss_of(module, batch(rank, step)) / data_size).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("kind", "shape", "names", "on_meta"),
    [
        ("AdamW", (1,), None, False),
        ("AdamW", (2,), ("dp",), False),
        ("Adagrad", (2,), ("dp",), False),
        ("SGD", (2,), ("shard",), False),
        ("AdamW", (2,), ("shard",), True),
        ("AdamW", (2,), ("dp",), True),
        ("Adagrad", (2,), ("replicate",), False),
        ("SGD", (2, 2), ("shard", "tp"), False),
    ],
)
@pytest.mark.sampled(4)
def test_groups_follow_at_the_first_step(kind: str, shape: Any, names: Any, on_meta: bool) -> None:
    size = shape[0]
    wanted = expected(kind, size)
    for got in run_ranks(size * (shape[1] if len(shape) > 1 else 1), trained, kind, shape, names, on_meta):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def refused() -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss_of(module, batch(0)).backward()
    optimizer.step()
    captured = torch.optim.LBFGS(module.parameters())
    model = DistributedModelParallel(module, plan=mixed())
    before = full_state_dict(model)
    loss_of(model, batch(0)).backward()
    for each, words in ((optimizer, "has state for them"), (captured, "its attribute '_params'")):
        said = rf"{type(each).__name__} was made before .*'users.weight'.*{words}.*Make the optimizer after wrapping"
        with pytest.raises(ShardError, match=said):
            each.step(lambda: torch.ones(()))  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())


def test_state_from_before_wrapping_is_refused() -> None:
    run_ranks(2, refused)


def updated_in_backward() -> int:
    module = Net()
    for name in TABLES:
        attach(module.get_submodule(name.removesuffix(".weight")), "adagrad")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    old = module.users.weight
    model = DistributedModelParallel(module, plan=mixed())
    loss_of(model, batch(model.env.rank)).backward()
    optimizer.step()
    torch.save(old, io.BytesIO())  # the mark does not travel
    return sum(value.numel() for state in optimizer.state.values() for value in state.values())


def test_tables_that_are_updated_in_the_backward_pass_get_no_second_state() -> None:
    dense = sum(p.numel() for name, p in Net().named_parameters() if name not in TABLES)
    assert run_ranks(2, updated_in_backward) == [2 * dense + 4] * 2


class OneLayer(nn.Module):
    """Dense weights alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def with_computed_values() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model, whole = DistributedModelParallel(OneLayer(), env), OneLayer()
    computed = {name: 2 * p for name, p in model.named_parameters()}
    with pytest.raises(ShardError, match=r"place of parameter 'layer.weight' is the result.*functional_call"):
        torch.func.functional_call(model, computed, (torch.ones(1, 4),))
    trains(model, whole, env, lambda g: torch.rand(2, 3, 4, generator=g))


def test_computed_values_are_refused_and_gradients_averaged_afterwards() -> None:
    """torch spoke of leaf variables, and what was trained after that was each rank's own."""
    run_ranks(2, with_computed_values)
