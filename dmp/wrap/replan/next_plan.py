"""Whether a plan fits a model that is wrapped already, and what it would change: read only.

A plan for tables in other layouts is run by `model.reshard`. What makes a table a dense weight, or splits a dense one
otherwise, changes modules that others have hooks in: that means to save, plan and load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from dmp.errors import PlanError
from dmp.foreign import is_torchrecs, type_name
from dmp.layouts.layout import ParameterSharding
from dmp.names import join_name
from dmp.plans.check import check_layout
from dmp.plans.plan import ShardingPlan, as_plan
from dmp.plans.torchrec_plan import entries_by_path
from dmp.wrap.making.assembly import Assembly, Owned

_ADVICE = "save_checkpoint(path, model), wrap a new model with that plan, load_checkpoint(path, model)"


def next_plan(made: Assembly, given: Any, path: str | None = None) -> ShardingPlan:
    """The plan that `given` leads to: its entries in the places of those in force, whose others stay.

    Args:
        given: a plan; TorchRec's too, and what its `reshard` takes: module's path -> (volume, plan of the module).
        path: of the one module that it is about; None is all that it names.

    Raises:
        PlanError: a name that the model lacks, a layout that does not fit or that the sharder cannot run, or one of a
            dense weight that is another than it has.
    """
    asked, tables, dense = _asked(made, given, path), _tables(made), _dense(made)
    entries: dict[str, ParameterSharding] = {}
    for name, entry in asked.items():
        if name in tables:
            first, owned, relative = tables[name]
            _check_table(first, entry, made)
            check_layout(first, entry.layout, owned.sharder, owned.infos[relative], made.env)
            entry = replace(entry, kernel=made.plan[first].kernel)
        elif name in dense:
            first = dense[name]
            _check_dense(first, entry, made)
        else:
            raise PlanError(_unknown(name, [*tables, *dense]), table=name)
        known = entries.setdefault(first, entry)
        if known != entry:
            raise PlanError(f"plan gives {name!r} {entry}, but {known} under another of its names", table=name)
    kept = {name: entry for name, entry in entries.items() if name in made.plan}
    plan = ShardingPlan({**dict(made.plan), **kept}, report=asked.report)
    plan.setting = made.plan.setting
    return plan


def changed_names(made: Assembly, plan: Mapping[str, ParameterSharding]) -> tuple[str, ...]:
    """Parameters that have another layout in `plan` than in force."""
    return tuple(name for name, entry in plan.items() if entry.layout != made.plan[name].layout)


def changed_sites(made: Assembly, plan: Mapping[str, ParameterSharding]) -> list[Owned]:
    """Sharded modules that have such a parameter."""
    changed = set(changed_names(made, plan))
    return [o for o in made.owned if not changed.isdisjoint(join_name(o.path, relative) for relative in o.infos)]


def _asked(made: Assembly, given: Any, path: str | None) -> ShardingPlan:
    """Any form of a plan as ours."""
    shapes = {name: owned.infos[relative].shape for name, (_, owned, relative) in _tables(made).items()}
    if is_torchrecs(given, "ShardingPlan"):
        given = entries_by_path(given.plan, made.module, made.env, shapes)
    elif isinstance(given, Mapping) and given and all(isinstance(value, tuple) for value in given.values()):
        if path is not None and path not in given:
            raise PlanError(f"expected a plan for module {path!r}; got plans for {sorted(given)}")
        by_path = {key: of_module for key, (_, of_module) in given.items() if path in (None, key)}
        given = entries_by_path(by_path, made.module, made.env, shapes)
    elif path is not None:
        raise PlanError(
            f"sharded_module_fqn={path!r} goes with a dict of module's path -> (volume, plan of the module); "
            f"got {type_name(given)}"
        )
    return as_plan(given)


def _tables(made: Assembly) -> dict[str, tuple[str, Owned, str]]:
    """Every name of every table -> its first name, whose it is, and its name there."""
    return {
        join_name(alias, relative): (join_name(owned.path, relative), owned, relative)
        for owned in made.owned
        for alias in owned.aliases
        for relative in owned.infos
    }


def _dense(made: Assembly) -> dict[str, str]:
    """Every name of every parameter -> its first name."""
    first = {id(p): name for name, p in made.module.named_parameters()}
    return {name: first[id(p)] for name, p in made.module.named_parameters(remove_duplicate=False)}


def _check_table(name: str, entry: ParameterSharding, made: Assembly) -> None:
    if entry.layout.is_dense:
        raise PlanError(
            f"plan makes {name!r} = {made.plan[name]} a dense weight, {entry}, which a running model cannot do: "
            f"{_ADVICE}",
            table=name,
        )
    own = "fused" if name in made.fused.fused else "dense"
    if entry.kernel not in (None, own, made.plan[name].kernel):
        raise PlanError(
            f"plan gives {name!r} the kernel {entry.kernel!r}; in the running model it is {own!r}, for who updates a "
            f"table is settled when it is wrapped: {_ADVICE}",
            table=name,
        )


def _check_dense(name: str, entry: ParameterSharding, made: Assembly) -> None:
    known = made.plan.get(name)
    if known == entry:
        return
    if known is None and entry.layout.is_copied and not made.env.fully_sharded_axes:
        return  # as the data-parallel part has it
    now = f"it is {known}" if known is not None else "it belongs to the data-parallel part"
    what = f"plan gives {name!r} {entry}; {now}, and a running model changes the layouts of tables alone"
    raise PlanError(f"{what}: {_ADVICE}", table=name)


def _unknown(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"it has {', '.join(map(repr, known[:5]))}"
    return f"plan names {name!r}, which the model does not have; {hint}"
