"""Pinned entries: what of a plan a user has fixed before the planner begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from torch import nn

from dmp import Layout, ParameterSharding, PlanError, ShardingPlan, type_name

Pinned = Mapping[str, ParameterSharding | Layout] | None


def split_pinned(pinned: Pinned) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Pinned layouts of tables, and of dense weights, by the names that the user has for them.

    Raises:
        PlanError: what is no plan.
    """
    if pinned is not None and not isinstance(pinned, Mapping):
        raise PlanError(f"expected pinned to be a plan or a dict of name -> layout; got {type_name(pinned)}")
    layouts = {name: entry.layout for name, entry in ShardingPlan(pinned or {}).items()}
    dense = {name: layout for name, layout in layouts.items() if layout.is_dense}
    return {name: layout for name, layout in layouts.items() if name not in dense}, dense


def by_first_name(pinned: Mapping[str, Layout], module: nn.Module, names: Collection[str]) -> dict[str, Layout]:
    """Pinned layouts under the names that the plan uses: a shared module's first.

    Args:
        names: of the parameters to plan.

    Raises:
        PlanError: a name that no sharder takes, or two layouts for one parameter.
    """
    known = dict(module.named_parameters(remove_duplicate=False)) if pinned else {}
    first = {id(known[name]): name for name in reversed(list(names))} if pinned else {}
    kept: dict[str, Layout] = {}
    for alias, layout in pinned.items():
        name = alias if alias in names else first.get(id(known.get(alias)))
        if name is None:
            close = get_close_matches(alias, names, n=3, cutoff=0.5) or list(names)[:5]
            raise PlanError(f"pinned names {alias!r}, which no sharder takes; parameters to plan: {close}", table=alias)
        if kept.setdefault(name, layout) != layout:
            raise PlanError(f"pinned gives {name!r} both {kept[name]} and {layout}", table=name)
    return kept
