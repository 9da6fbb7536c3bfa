"""Whether a plan fits a model that is wrapped already, and what it would change: read only.

A plan for tables in other layouts is run by `model.reshard`. What makes a table a dense weight, or splits a dense one
otherwise, changes modules that others have hooks in: that means to save, plan and load.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from dmp.errors import PlanError
from dmp.layouts.layout import ParameterSharding
from dmp.names import join_name
from dmp.plans.check import check_layout
from dmp.plans.plan import ShardingPlan, as_plan
from dmp.wrap.assembly import Assembly, Owned

_ADVICE = "save_checkpoint(path, model), wrap a new model with that plan, load_checkpoint(path, model)"


def next_plan(made: Assembly, given: Any) -> ShardingPlan:
    """The plan that `given` leads to: its entries in the places of those in force, whose others stay.

    Raises:
        PlanError: a name that the model lacks, a layout that does not fit or that the sharder cannot run, or one of a
            dense weight that is another than it has.
    """
    asked, tables, dense = as_plan(given), _tables(made), _dense(made)
    entries: dict[str, ParameterSharding] = {}
    for name, entry in asked.items():
        if name in tables:
            first, owned, relative = tables[name]
            _check_table(first, entry, made)
            check_layout(first, entry.layout, owned.sharder, owned.infos[relative], made.env)
        elif name in dense:
            first = dense[name]
            _check_dense(first, entry, made)
        else:
            raise PlanError(_unknown(name, [*tables, *dense]), table=name)
        known = entries.setdefault(first, entry)
        if known != entry:
            raise PlanError(f"plan gives {name!r} {entry}, but {known} under another of its names", table=name)
    kept = {name: entry for name, entry in entries.items() if name in made.plan}
    return ShardingPlan({**dict(made.plan), **kept}, report=asked.report)


def changed_sites(made: Assembly, plan: Mapping[str, ParameterSharding]) -> list[Owned]:
    """Sharded modules of which some table has another layout in `plan` than in force."""

    def differs(owned: Owned) -> bool:
        names = [join_name(owned.path, relative) for relative in owned.infos]
        return any(plan[name] != made.plan[name] for name in names)

    return [owned for owned in made.owned if differs(owned)]


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
