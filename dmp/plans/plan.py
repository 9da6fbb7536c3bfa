"""`ShardingPlan`: which layout each parameter has. Immutable data that a person can read, change and compare."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from dmp.contracts import AnySharder
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.foreign import type_name
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.plans.check import check_plan
from dmp.plans.find import Found
from dmp.plans.torchrec_plan import Setting, entries_of_torchrec, torchrec_plan_of
from dmp.read_values import parse_json, shown

VERSION = 1
_LINES = 40
"""Of a plan that is printed."""


class PlanChange(NamedTuple):
    """A difference between two plans; None stands for a missing entry."""

    name: str
    before: ParameterSharding | None
    after: ParameterSharding | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before or '(none)'} -> {self.after or '(none)'}"


class ShardingPlan(Mapping[str, ParameterSharding]):
    """Fully-qualified parameter name -> `ParameterSharding`.

    Args:
        mapping: names to `ParameterSharding` or to bare layouts.

    Example:
        >>> plan = ShardingPlan({"embedding_bags.t1.weight": table_wise(1)})
        >>> plan["embedding_bags.t1.weight"].layout
    """

    report: Any = None
    """How a planner came to this plan; None for a hand-written one. Not part of the content. One that has `plan_text`
    is asked for the plan's text."""
    setting: Setting | None = None
    """Where it is in force; None for a plan that is of no wrapped model. Not part of the content."""

    def __init__(self, mapping: Mapping[str, ParameterSharding | Layout] | None = None, *, report: Any = None) -> None:
        entries: dict[str, ParameterSharding] = {}
        if mapping is not None and not isinstance(mapping, Mapping):
            raise PlanError(f"expected a dict of parameter name -> layout; got {shown(mapping)}")
        unnamed = [name for name in mapping or () if not isinstance(name, str)]
        if unnamed:
            raise PlanError(f"a plan's keys are parameter names; got {shown(unnamed[0])}")
        for name, value in sorted((mapping or {}).items()):
            entry = ParameterSharding(value) if isinstance(value, Layout) else value
            if not isinstance(entry, ParameterSharding):
                raise PlanError(
                    f"plan entry {name!r} must be a layout, as row_wise(), or a {type_name(ParameterSharding)}; got "
                    f"{type_name(value)}: {shown(value)}",
                    table=name,
                )
            entries[name] = entry
        self._entries = entries
        self.report = report
        self._digest = hashlib.sha256(self.to_json().encode()).hexdigest()

    def __getitem__(self, name: str) -> ParameterSharding:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingPlan) and self._entries == other._entries

    def __hash__(self) -> int:
        return int(self._digest[:15], 16)

    def __copy__(self) -> ShardingPlan:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingPlan:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Of a wrapped model's plan without where it is in force, which holds process groups."""
        return {name: value for name, value in self.__dict__.items() if name != "setting"}

    @property
    def digest(self) -> str:
        """SHA-256 of the content, the same in every process."""
        return self._digest

    def to_json(self) -> str:
        """The plan as text, with a format version."""
        entries = {name: entry.to_json() for name, entry in self._entries.items()}
        return json.dumps({"version": VERSION, "parameters": entries}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """Inverse of `to_json`.

        Raises:
            PlanError: not a plan, or one of a newer version.
        """
        expected = 'not a plan: expected {"version": .., "parameters": {..}}'
        try:
            data: Any = parse_json(text)
        except (ValueError, TypeError) as error:
            raise PlanError(f"{expected}; it is no JSON: {error!s:.500}") from error
        if not isinstance(data, dict) or not isinstance(data.get("parameters"), dict) or "version" not in data:
            raise PlanError(f"{expected}; got {shown(data)}")
        version, entries = data["version"], data["parameters"].items()
        if type(version) is not int or version != VERSION:
            raise PlanError(
                f"this plan has format version {shown(version)}; this version of dmp reads version {VERSION}"
            )
        parsed = {}
        for name, layout in entries:
            try:
                parsed[name] = ParameterSharding.from_json(layout)
            except (ShardError, TypeError, ValueError) as error:
                raise PlanError(f"plan entry {name!r} = {shown(layout)}: {error}", table=name) from error
        return cls(parsed)

    @classmethod
    def from_torchrec(cls, plan: Any, module: nn.Module, env: ShardingEnv | None = None) -> ShardingPlan:
        """The plan that has exactly the rectangles of one of TorchRec's, whatever its sharding types.

        Args:
            plan: TorchRec's `ShardingPlan`, or an `EmbeddingModuleShardingPlan` of `module` alone.
            module: the model, for its parameters' names; on meta is fine.
            env: the mesh; with it layouts that name no ranks (`row_wise()`) are found again.

        Raises:
            PlanError: a module or table that the model lacks, a compute kernel that means nothing here.
        """
        return cls(entries_of_torchrec(plan, module, env))

    def to_torchrec(self, module: nn.Module, env: ShardingEnv, local_size: int | None = None) -> Any:
        """TorchRec's `ShardingPlan` with the same rectangles; entries of dense weights are left out.

        Args:
            module: the plain model, for its tables' shapes and their optimizers.
            env: the mesh.
            local_size: ranks of a host; by default of the inner table axis, or as the launcher says.

        Raises:
            PlanError: a name that the model lacks, rectangles that TorchRec has no sharding type for.
        """
        return torchrec_plan_of(self, Setting.of(module, env), local_size)

    @property
    def plan(self) -> dict[str, Any]:
        """Of a wrapped model's plan: module path -> table -> `ParameterSharding` of TorchRec's, as in its plans."""
        if self.setting is None:
            raise AttributeError(".plan is of a wrapped model's plan; any other: plan.to_torchrec(module, env).plan")
        of_module: dict[str, Any] = torchrec_plan_of(self, self.setting, to_read=True).plan
        return of_module

    def get_plan_for_module(self, module_path: str) -> Any:
        """Of a wrapped model's plan: what `plan` has for a module; None where nothing."""
        return self.plan.get(module_path)

    def diff(self, other: ShardingPlan | Mapping[str, ParameterSharding | Layout]) -> list[PlanChange]:
        """What changes from this plan to `other`, by name."""
        other = as_plan(other)
        names = sorted({*self, *other})
        changes = [PlanChange(n, self._entries.get(n), other._entries.get(n)) for n in names]
        return [c for c in changes if c.before != c.after]

    def validate(
        self, module: nn.Module, env: ShardingEnv, sharders: Iterable[AnySharder], found: Found | None = None
    ) -> None:
        """Check the plan against a model and a mesh in both directions; nothing is changed.

        Args:
            found: what these sharders are known to take of the module on this mesh.

        Raises:
            PlanError: a name that the model lacks, a parameter that the plan lacks, a rank that does not exist, or a
                layout that the sharder cannot run.
        """
        check_plan(self, module, sharders, env, found)

    def merged(self, other: Mapping[str, ParameterSharding | Layout]) -> ShardingPlan:
        """This plan with the entries of `other` over its own."""
        return ShardingPlan({**self._entries, **as_plan(other)})

    def __str__(self) -> str:
        if not self._entries:
            return "ShardingPlan: no sharded parameters"
        names = sorted(self, key=_natural)
        if hasattr(self.report, "plan_text"):
            return str(self.report.plan_text({name: self[name] for name in names}))
        shown = names[:_LINES]
        width = max(len("parameter"), *(len(n) for n in shown))
        lines = [f"{'parameter':<{width}}  layout", f"{'-' * width}  {'-' * 24}"]
        lines += [f"{name:<{width}}  {self[name]}" for name in shown]
        return "\n".join(lines + [f"and {len(self) - _LINES:,} more: plan[name]"] * (len(self) > _LINES))

    def __repr__(self) -> str:
        return f"ShardingPlan({len(self)} parameters, {self._digest[:12]})"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `t_10` after `t_2`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def as_plan(plan: ShardingPlan | Mapping[str, ParameterSharding | Layout]) -> ShardingPlan:
    """A plan from a plan or from a plain dict name -> layout.

    Raises:
        PlanError: anything else.
    """
    if isinstance(plan, ShardingPlan):
        return plan
    if not isinstance(plan, Mapping):
        hint = ": a planner is passed as planner=" if hasattr(plan, "collective_plan") else ""
        raise PlanError(f"expected a ShardingPlan or a dict of parameter name -> layout; got {type_name(plan)}{hint}")
    return ShardingPlan(plan)
