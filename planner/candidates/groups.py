"""`Group`: parameters that are placed as one: a single one, or a colocate group, cut alike on the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import PlanError
from planner.candidates.constraints import Constraint
from planner.candidates.costed import Costed
from planner.candidates.family import Block, Family, cut_name, even_cuts
from planner.search.cost_table import Array, reached

Ranks = NDArray[np.bool_]


class Group(NamedTuple):
    """Parameters that are placed as one.

    Args:
        members: their names.
        allowed: (ranks,) which may hold them; None for all.
        spread: groups no two of whose members share a rank.
    """

    members: tuple[str, ...]
    allowed: Ranks | None
    spread: frozenset[str]


class Row(NamedTuple):
    """A family of a group: every member in it.

    Args:
        family: how all are cut.
        rows: of the members' offers, in `Costed`.
    """

    family: Family
    rows: tuple[int, ...]


def groups_of(
    names: Iterable[str], held: Mapping[str, Ranks], constraints: Mapping[str, Constraint], num_ranks: int
) -> tuple[Group, ...]:
    """Groups of all parameters that are not pinned, in the order of their first members.

    Args:
        held: ranks of colocate groups that have pinned members.

    Raises:
        PlanError: a colocate group whose members other constraints keep apart.
    """
    members_of: dict[tuple[str | None, str], list[str]] = {}
    for name in names:
        colocate = constraints[name].colocate
        members_of.setdefault((colocate, "" if colocate is not None else name), []).append(name)
    groups = []
    for (colocate, _), members in members_of.items():
        masks = [held[colocate]] if colocate is not None and colocate in held else []
        asked = [ranks for member in members if (ranks := constraints[member].ranks) is not None]
        masks += [np.isin(np.arange(num_ranks), ranks) for ranks in asked]
        allowed = np.logical_and.reduce(masks) if masks else None
        if colocate is not None and allowed is not None and not allowed.any():
            told = {member: ranks for member in members if (ranks := constraints[member].ranks) is not None}
            of_pins = f", and pinned members on {np.flatnonzero(held[colocate]).tolist()}" if colocate in held else ""
            raise PlanError(
                f"colocate group {colocate!r} has no rank that all its members may be on: their constraints allow "
                f"{told}{of_pins}",
                table=members[0],
            )
        groups.append(Group(tuple(members), allowed, _spread(colocate, members, constraints)))
    return tuple(groups)


def rows_together(colocate: str, members: Sequence[str], offered: Sequence[Sequence[int]], costed: Costed) -> list[Row]:
    """The families that all members of a colocate group can take, each with theirs.

    Args:
        offered: of each member, the rows that may be chosen.

    Raises:
        PlanError: there is none.
    """
    ways = [_ways(rows, costed) for rows in offered]
    first, *others = ways
    found = [Row(way[1], tuple(of[way] for of in ways)) for way in first if all(way in other for other in others)]
    divisible = {(row.family.size, row.family.filled) for row in found if row.family.units}
    # whole, and cut evenly, are contained in what is cut anywhere
    found = [
        row
        for row in found
        if row.family.units or (row.family.size, row.family.filled) not in divisible or costed.offers[row.rows[0]].own
    ]
    if not found:
        texts = {m: [costed.offers[r].family.name for r in rows] for m, rows in zip(members, offered, strict=True)}
        raise PlanError(
            f"colocate group {colocate!r} has no layout that all its members can take: {texts}", table=members[0]
        )
    return found


class Together(NamedTuple):
    """What a group's family costs, as in `CostTable`; `loads` where its ranks' differ, else None."""

    fixed: Array
    slope: Array
    everywhere: Array
    lack: Array
    lack_slope: Array
    loads: Array | None


def costs_together(row: Row, costed: Costed) -> Together:
    """Sums over members."""
    size, pieces, ranks = row.family.size, row.family.pieces, row.family.ranks
    fixed, slope, lack, lack_slope = np.zeros((4, costed.fixed.shape[1]))
    loads = None
    for member in row.rows:
        units = costed.offers[member].family.units
        if units and not row.family.units:  # of one that may be cut anywhere, so many pieces
            fixed = fixed + costed.fixed[member] + costed.slope[member] * (units // pieces)
            lack = lack + costed.lack[member] + costed.lack_slope[member] * (units // pieces)
        elif member in costed.ragged:
            loads = costed.ragged[member] + (0.0 if loads is None else loads)
        else:
            fixed, slope = fixed + costed.fixed[member], slope + costed.slope[member]
            lack, lack_slope = lack + costed.lack[member], lack_slope + costed.lack_slope[member]
    everywhere = costed.everywhere[list(row.rows)].sum(0)
    if loads is not None:
        is_felt = reached(size, ranks, costed.spans)
        loads = np.broadcast_to(loads + fixed * is_felt, (pieces, size, len(fixed))).copy()
        for phase, span in enumerate(costed.spans.tolist()):
            loads[:, max(ranks - span, 0) : max(ranks, min(span, size)), phase] -= lack[phase]
        fixed, lack = loads.max((0, 1)), np.zeros_like(lack)
    return Together(fixed, slope, everywhere, lack, lack_slope, loads)


def _ways(rows: Sequence[int], costed: Costed) -> dict[tuple[object, Family], int]:
    """The ways to cut a parameter that it may share with others -> the row of its offer."""
    found: dict[tuple[object, Family], int] = {}
    for row in rows:
        own, family = costed.offers[row].own, costed.offers[row].family
        found.setdefault((None if own is None else own.layout, family), row)
        if family.units:
            block = Block(family.size, family.ranks)
            found.setdefault((None, Family.on(block, family.name)), row)
            for pieces in even_cuts(family.units // family.least):
                if family.units % pieces == 0:
                    found.setdefault((None, Family.on(block, cut_name(family.size), pieces)), row)
    return found


def _spread(colocate: str | None, members: Sequence[str], constraints: Mapping[str, Constraint]) -> frozenset[str]:
    spread = [group for member in members if (group := constraints[member].spread) is not None]
    if len(set(spread)) != len(spread):
        raise PlanError(
            f"colocate group {colocate!r} has members that a spread group keeps apart: {members}", table=members[0]
        )
    return frozenset(spread)
