"""What an object of a contract may have beside its protocol's members: a double for each hook, and no other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    Calls,
    ChunkedTensor,
    DistributedModelParallel,
    Layout,
    ParameterInfo,
    PlanError,
    ShardError,
    ShardingEnv,
    contracts,
    data_parallel,
    table_wise,
    to_unsharded,
)
from dmp.contracts import HOOKS, VERSION, hook
from planner import ShardingPlanner


class Scale(nn.Module):
    """The module that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Held(Scale):
    """Has every hook of a `ShardedModule`."""

    module_path = ""
    calls: Calls | None = None

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        return {"weight": ChunkedTensor((4,), [self.weight], [(0,)])}

    def unsharded(self) -> nn.Module:
        with torch.device("meta"):
            return Scale()


class ScaleSharder:
    """Offers copies alone."""

    module_type = Scale

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        return {"weight": ParameterInfo((4,), torch.float32, "scale")}

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        return [data_parallel()]

    def shard(self, module: nn.Module, plan: Any, env: ShardingEnv, device: torch.device) -> nn.Module:
        new = Held()
        new.load_state_dict(module.state_dict())
        return new


class AcceptingSharder(ScaleSharder):
    """Runs more than it offers."""

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        return layout == table_wise(0)


class Notes:
    """A model sharder, and its own placement, that says what it leaves."""

    layouts: Mapping[str, Layout] = {}
    notes = ("'0' is left whole, for a reason",)

    def place(self, model: nn.Module, given: Mapping[str, Layout], env: ShardingEnv) -> Notes:
        return self

    def apply(self, model: nn.Module) -> None: ...


class InPlace:
    """A data-parallel wrapper that takes parameters on meta, and checks beforehand what it is given."""

    refuses = False

    def shards_in_place(self, env: ShardingEnv, has_dtensors: bool) -> bool:
        return True

    def check(self, module: nn.Module, env: ShardingEnv, placed: Any, ignored: frozenset[str]) -> None:
        if self.refuses:
            raise ShardError(f"not with {sorted(ignored)}")

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        self.on_meta = {name for name, p in module.named_parameters() if p.is_meta}
        return module


def model() -> nn.Sequential:
    return nn.Sequential(Scale(), nn.Linear(4, 2))


def test_accepts() -> None:
    plan = {"0.weight": table_wise(0)}
    assert DistributedModelParallel(model(), plan=plan, sharders=[AcceptingSharder()]).plan["0.weight"].layout
    with pytest.raises(PlanError, match="ScaleSharder cannot run it"):
        DistributedModelParallel(model(), plan=plan, sharders=[ScaleSharder()])


def test_module_path_calls_and_unsharded() -> None:
    wrapped = DistributedModelParallel(model(), sharders=[ScaleSharder()])
    held = wrapped.module[0]  # type: ignore[index]
    assert held.module_path == "0" and isinstance(held.calls, Calls)
    assert [type(m) for m in to_unsharded(wrapped)] == [Scale, nn.Linear]  # type: ignore[attr-defined]


def test_notes() -> None:
    plan = ShardingPlanner().plan(model(), [Notes(), ScaleSharder()], ShardingEnv.abstract((2,), ("tp",)))
    assert "'0' is left whole, for a reason" in str(plan.report)


def test_shards_in_place_and_check() -> None:
    wrapper, module = InPlace(), model()
    with torch.device("meta"):
        module[1] = nn.Linear(4, 2)
    wrapper.refuses = True
    with pytest.raises(ShardError, match=r"not with \['0.weight'\]"):
        DistributedModelParallel(module, sharders=[ScaleSharder()], data_parallel_wrapper=wrapper)
    assert type(module[0]) is Scale
    wrapper.refuses = False
    wrapped = DistributedModelParallel(module, sharders=[ScaleSharder()], data_parallel_wrapper=wrapper)
    assert wrapper.on_meta == {"1.weight", "1.bias"} and not wrapped.module[1].weight.is_meta  # type: ignore[index]


def test_every_hook_is_listed_and_used() -> None:
    assert all(since <= VERSION for since in HOOKS.values())
    assert contracts.__doc__ is not None and set(re.findall(r"^- `(\w+)", contracts.__doc__, re.M)) == set(HOOKS)
    files = [p for package in ("dmp", "sharders", "planner") for p in Path(package).rglob("*.py")]
    used = {name for p in files for name in re.findall(r'hook\([^"\n]+, "(\w+)"', p.read_text())}
    assert used | {"found"} == set(HOOKS)  # that one is a keyword, see test_find.py
    with pytest.raises(AssertionError):
        hook(model(), "a name of nobody's")
