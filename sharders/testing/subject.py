"""What `check_sharder` checks: a sharder with its modules and batches, and the plans that it is checked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ModuleSharder,
    ParameterInfo,
    ParameterSharding,
    ShardError,
    ShardingEnv,
    join_name,
    plan_parameters,
    rectangles,
)

Plan = dict[str, Layout]


@dataclass(frozen=True)
class Subject:
    """What is checked: the arguments of `check_sharder`, and what they give."""

    sharder: ModuleSharder
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Sequence[Any]]
    env: ShardingEnv

    def infos(self) -> dict[str, ParameterInfo]:
        """Parameters that the sharder takes, by full name."""
        return {name: info for name, (_, info) in plan_parameters(self.make_module(), [self.sharder]).items()}

    def wrap(self, plan: Plan, module: nn.Module | None = None) -> DistributedModelParallel:
        """The module, a fresh one by default, on the mesh by `plan`."""
        module = self.make_module() if module is None else module
        return DistributedModelParallel(module, env=self.env, plan=plan, sharders=[self.sharder])

    def own_batch(self, step: int) -> tuple[Any, ...]:
        """This rank's arguments; ranks along tensor axes share them."""
        return tuple(self.make_batch(self.env.data_rank, step))

    def batches(self, step: int) -> list[tuple[Any, ...]]:
        """Every data rank's arguments."""
        return [tuple(self.make_batch(rank, step)) for rank in range(self.env.data_size)]


@dataclass(frozen=True)
class Case:
    """A plan, and the one that comes after it."""

    plan: Plan = field(default_factory=dict)
    other: Plan = field(default_factory=dict)

    def __str__(self) -> str:
        return " with " + ", ".join(f"{n} {layout}" for n, layout in list(self.plan.items())[:4]) if self.plan else ""


def plans_of(subject: Subject) -> Iterator[Plan]:
    """Each kind of layout for all parameters, where it is offered and on other ranks; then all kinds mixed."""
    env, seen = subject.env, set()
    offers: dict[str, list[Layout]] = {}
    for name, info in subject.infos().items():
        offered = list(subject.sharder.layouts(info, env))
        shifted = [_shifted(layout, info, env) for layout in offered]
        extra = [_uneven(info, env)] if hasattr(subject.sharder, "accepts") else []
        accepted = [x for x in [*shifted, *extra] if x is not None and accepts(subject.sharder, info, x, env)]
        offers[name] = list(dict.fromkeys([*offered, *accepted]))
    for i in range(max(len(choices) for choices in offers.values())):
        for step in (0, 1):
            plan = {name: choices[(i + step * k) % len(choices)] for k, (name, choices) in enumerate(offers.items())}
            key = tuple(plan.values())
            if key not in seen and (step == 0 or i == 0):
                seen.add(key)
                yield plan


def _shifted(layout: Layout, info: ParameterInfo, env: ShardingEnv) -> Layout | None:
    """The same kind of layout with every rank (or host) one further; None where it cannot be."""
    size, inner = env.table_size, env.table_size // env.table_shape[0]
    try:
        spelled = moved = layout.over(range(size))
        for step in (1, inner):  # a host moves by all its ranks
            if moved == spelled:
                moved = spelled.relocated({rank: (rank + step) % size for rank in range(size)}, env)
        moved.shards(info.shape, env)
    except (ShardError, TypeError, KeyError):
        return None
    return moved


def _uneven(info: ParameterInfo, env: ShardingEnv) -> Layout | None:
    """The first row alone on the last rank, the rest on the first."""
    shape = tuple(info.shape)
    if not shape or shape[0] < 2:
        return None
    rest = (shape[0] - 1, *shape[1:])
    zeros = (0,) * (len(shape) - 1)
    return rectangles([((0, *zeros), (1, *shape[1:]), env.table_size - 1), ((1, *zeros), rest, 0)])


def accepts(sharder: Any, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
    """What the sharder's `accepts` says; everything that fits, where it has none."""
    return bool(sharder.accepts(info, layout, env)) if hasattr(sharder, "accepts") else True


def without_processes(env: ShardingEnv) -> ShardingEnv:
    """The same mesh, abstract."""
    roles = {role: env.axes(role) for role in ("replicate", "shard", "tensor")}
    return ShardingEnv.abstract(env.shape, env.names, env.device_type, **roles)


def sites(subject: Subject, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module that the sharder takes."""
    for path, child in module.named_modules():
        if isinstance(child, subject.sharder.module_type):
            yield path, child


def sharded_sites(subject: Subject, case: Case) -> Iterator[tuple[str, nn.Module, nn.Module, dict[str, Layout]]]:
    """(path, plain module, sharded one, its part of the plan with relative names) of all modules the sharder takes."""
    plain, env = subject.make_module(), subject.env
    for path, site in list(sites(subject, subject.make_module())):
        names = {name: join_name(path, name) for name in subject.sharder.parameters(site)}
        if names and case.plan.keys() >= set(names.values()):
            plan = {name: case.plan[full] for name, full in names.items()}
            entries = {name: ParameterSharding(layout) for name, layout in plan.items()}
            yield path, plain.get_submodule(path), subject.sharder.shard(site, entries, env, env.device), plan


def with_other_values(module: nn.Module) -> nn.Module:
    """The module with other values, the same on every rank."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(torch.linspace(-1, 1 + i, parameter.numel()).view(parameter.shape).to(parameter))
    return module
