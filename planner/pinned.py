"""Pinned entries: what of a plan a user has fixed before the planner begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches

from torch import nn

from dmp import Layout, ParameterSharding, PlanError, ShardingPlan, type_name
from planner.candidates.constraints import Constraint

Pinned = Mapping[str, ParameterSharding | Layout] | None


def split_pinned(pinned: Pinned) -> tuple[dict[str, ParameterSharding], dict[str, Layout]]:
    """Pinned entries of tables, and layouts of dense weights, by the names that the user has for them.

    Raises:
        PlanError: what is no plan.
    """
    if pinned is not None and not isinstance(pinned, Mapping):
        raise PlanError(f"expected pinned to be a plan or a dict of name -> layout; got {type_name(pinned)}")
    entries = ShardingPlan(pinned or {})
    dense = {name: entry.layout for name, entry in entries.items() if entry.layout.is_dense}
    return {name: entry for name, entry in entries.items() if name not in dense}, dense


def by_first_name(
    pinned: Mapping[str, ParameterSharding], module: nn.Module, names: Collection[str]
) -> dict[str, ParameterSharding]:
    """Pinned entries under the names that the plan uses: a shared module's first.

    Args:
        names: of the parameters to plan.

    Raises:
        PlanError: a name that no sharder takes, or two entries for one parameter.
    """
    known = dict(module.named_parameters(remove_duplicate=False)) if pinned else {}
    first = {id(known[name]): name for name in reversed(list(names))} if pinned else {}
    kept: dict[str, ParameterSharding] = {}
    for alias, entry in pinned.items():
        name = alias if alias in names else first.get(id(known.get(alias)))
        if name is None:
            close = get_close_matches(alias, names, n=3, cutoff=0.5) or list(names)[:5]
            raise PlanError(f"pinned names {alias!r}, which no sharder takes; parameters to plan: {close}", table=alias)
        if kept.setdefault(name, entry) != entry:
            raise PlanError(f"pinned gives {name!r} both {kept[name]} and {entry}", table=name)
    return kept


def with_colocated(
    pinned: Mapping[str, ParameterSharding], constraints: Mapping[str, Constraint]
) -> dict[str, ParameterSharding]:
    """With the members of pinned ones' colocate groups, which are cut alike and lie on the same ranks: as they are."""
    groups = {group: pinned[name].layout for name in pinned if (group := constraints[name].colocate) is not None}
    together = {
        name: ParameterSharding(groups[constraint.colocate])
        for name, constraint in constraints.items()
        if name not in pinned and constraint.colocate in groups
    }
    return {**pinned, **together}


def with_kernels(
    constraints: Mapping[str, Constraint], pinned: Mapping[str, ParameterSharding]
) -> dict[str, Constraint]:
    """Constraints with the kernels that entries are pinned with.

    Raises:
        PlanError: a constraint asks for another.
    """
    found = dict(constraints)
    for name, entry in pinned.items():
        asked = constraints[name].kernel
        if entry.kernel is not None and asked not in (None, entry.kernel):
            raise PlanError(
                f"{name!r} is pinned as {entry}; its constraint says kernel={asked!r}: leave out one of them",
                table=name,
            )
        found[name] = replace(constraints[name], kernel=entry.kernel or asked)
    return found
