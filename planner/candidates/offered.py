"""What a sharder offers for a parameter, and why some of it may not be chosen."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError, ShardingEnv
from planner.candidates.constraints import Constraint
from planner.candidates.movable import MovableLayout, movable


def offered_layouts(
    name: str, sharder: ModuleSharder, info: ParameterInfo, constraint: Constraint, env: ShardingEnv
) -> list[tuple[MovableLayout, str]]:
    """Every layout that the sharder offers, alike ones on other ranks once.

    Returns:
        Each with the reason why it may not be chosen; empty where it may.

    Raises:
        PlanError: nothing is offered, a constraint names a layout that is not offered or ranks that do not exist, or
            no layout is left.
    """
    if env.table_size == 1:  # where all layouts are the same, sharders offer one
        constraint = replace(constraint, layouts=None, forbid=None)
    offered = [layout for layout in dict.fromkeys(sharder.layouts(info, env)) if not layout.is_dense]
    if not offered:
        raise PlanError(f"{type(sharder).__name__} offers no layout for {name!r}, shape {info.shape}", table=name)
    _check_constraint(name, sharder, offered, constraint, env)
    found: dict[Layout, tuple[MovableLayout, str]] = {}
    for layout in offered:
        within = layout if constraint.ranks is None else layout.over(constraint.ranks)
        candidate = movable(name, within, sharder, info, constraint, env)
        if candidate.layout not in found:
            found[candidate.layout] = candidate, _objection(candidate, info, constraint, env)
    if all(objection for _, objection in found.values()):
        reasons = "; ".join(f"{layout}: {objection}" for layout, (_, objection) in found.items())
        raise PlanError(f"no layout is left for {name!r}, shape {info.shape}: {reasons}", table=name)
    return list(found.values())


def _check_constraint(
    name: str, sharder: ModuleSharder, offered: list[Layout], constraint: Constraint, env: ShardingEnv
) -> None:
    known = list(dict.fromkeys(layout.name for layout in offered))
    for wanted in constraint.layouts or ():
        if wanted not in known:
            raise PlanError(
                f"the constraint on {name!r} asks for layout {wanted!r}; {type(sharder).__name__} offers {known}",
                table=name,
            )
    outside = [rank for rank in constraint.ranks or () if rank >= env.table_size]
    if outside:
        raise PlanError(
            f"the constraint on {name!r} names rank {outside[0]}; the mesh has table ranks 0..{env.table_size - 1}",
            table=name,
            rank=outside[0],
        )


def _objection(candidate: MovableLayout, info: ParameterInfo, constraint: Constraint, env: ShardingEnv) -> str:
    """Why a layout may not be chosen; empty when it may."""
    name = candidate.layout.name
    if constraint.layouts is not None and name not in constraint.layouts:
        return f"constraint: layouts={list(constraint.layouts)}"
    if constraint.forbid is not None and name in constraint.forbid:
        return f"constraint: forbid={list(constraint.forbid)}"
    cuts_columns = any(shard.columns != prod(info.shape[1:]) for shard in candidate.shards)
    if info.mixes_columns and cuts_columns and name not in (constraint.layouts or ()):
        return (
            f"{info.optimizer} updates a row by all its columns, as by a norm or one value of state for each row: cut "
            "columns change numbers; a constraint's layouts may allow it"
        )
    if constraint.ranks is not None:
        if len(set(candidate.ranks)) > len(constraint.ranks):
            return f"constraint: ranks={list(constraint.ranks)} are fewer than the layout needs"
        if candidate.block_size == env.table_size and not set(candidate.ranks) <= set(constraint.ranks):
            return f"constraint: ranks={list(constraint.ranks)}"
    return ""
