"""`Group`: parameters that are placed as one: a single one, or a colocate group, cut alike on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import PlanError
from planner.candidates.constraints import Constraint
from planner.candidates.costed import ClassLayouts, CostedLayout
from planner.costs.protocol import BYTES
from planner.search.problem import Item, Option

Ranks = NDArray[np.bool_]


class Group(NamedTuple):
    """Parameters that are placed as one: `rows[i][k]` is member k's layout in the item's option i."""

    members: tuple[str, ...]
    rows: tuple[tuple[CostedLayout, ...], ...]
    item: Item


def groups_of(
    offered: Mapping[str, ClassLayouts],
    pinned: Mapping[str, CostedLayout],
    constraints: Mapping[str, Constraint],
    num_ranks: int,
) -> tuple[Group, ...]:
    """Groups of all parameters that are not pinned, in the order of their first members.

    Raises:
        PlanError: a colocate group whose members have no layout in common, or which other constraints keep apart.
    """
    members_of: dict[tuple[str | None, str], list[str]] = {}
    for name in offered:
        colocate = constraints[name].colocate
        members_of.setdefault((colocate, "" if colocate is not None else name), []).append(name)
    held = _ranks_held(pinned, constraints)
    known: dict[tuple[int, ...], tuple[tuple[tuple[CostedLayout, ...], ...], tuple[Option, ...]]] = {}
    groups = []
    for (colocate, _), members in members_of.items():
        key = tuple(id(offered[member]) for member in members)
        if key not in known:
            rows = _rows(colocate, {member: offered[member] for member in members})
            known[key] = rows, tuple(_sum(row) for row in rows)
        rows, options = known[key]
        masks = [held[colocate]] if colocate in held else []
        asked = [ranks for member in members if (ranks := constraints[member].ranks) is not None]
        masks += [np.isin(np.arange(num_ranks), ranks) for ranks in asked]
        allowed = np.logical_and.reduce(masks) if masks else None
        groups.append(Group(tuple(members), rows, Item(options, allowed, _spread(colocate, members, constraints))))
    return tuple(groups)


def _ranks_held(pinned: Mapping[str, CostedLayout], constraints: Mapping[str, Constraint]) -> dict[str, Ranks]:
    """Ranks that a colocate group must have because pinned members lie there."""
    found: dict[str, Ranks] = {}
    for name, layout in pinned.items():
        group = constraints[name].colocate
        if group is not None:
            held = layout.option.loads[0, :, BYTES] > 0
            if (found.setdefault(group, held) != held).any():
                raise PlanError(
                    f"pinned parameters of the colocate group {group!r} are on other ranks: {name!r}", table=name
                )
    return found


def _spread(colocate: str | None, members: Sequence[str], constraints: Mapping[str, Constraint]) -> frozenset[str]:
    spread = [group for member in members if (group := constraints[member].spread) is not None]
    if len(set(spread)) != len(spread):
        raise PlanError(
            f"colocate group {colocate!r} has members that a spread group keeps apart: {members}", table=members[0]
        )
    return frozenset(spread)


def _rows(colocate: str | None, offered: Mapping[str, ClassLayouts]) -> tuple[tuple[CostedLayout, ...], ...]:
    """The first member's layouts that all others have too, each with theirs."""
    first, *others = offered.values()
    rows = []
    for choice in first.choices:
        same = [next((c for c in other.choices if _is_alike(c, choice)), None) for other in others]
        row = [choice, *(c for c in same if c is not None)]
        if len(row) == len(offered):
            rows.append(tuple(row))
    if not rows:
        layouts = {member: [str(c.movable.layout) for c in of.choices] for member, of in offered.items()}
        raise PlanError(
            f"colocate group {colocate!r} has no layout that all its members can take: {layouts}",
            table=next(iter(offered)),
        )
    return tuple(rows)


def _is_alike(one: CostedLayout, other: CostedLayout) -> bool:
    return one.movable.layout == other.movable.layout and one.option.loads.shape == other.option.loads.shape


def _sum(row: Sequence[CostedLayout]) -> Option:
    first, *others = (layout.option for layout in row)
    if not others:
        return first
    loads = sum((option.loads for option in others), first.loads)
    everywhere = sum((option.everywhere for option in others), first.everywhere)
    return Option(loads, everywhere, first.kinds.union(*(option.kinds for option in others)))
