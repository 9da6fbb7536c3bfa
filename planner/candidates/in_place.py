"""`InPlace`: pinned parameters: where they are, and what they put on ranks before anything else is placed."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ParameterInfo, PlanError, ShardingEnv
from planner.candidates.constraints import Constraint
from planner.candidates.costed import Costed
from planner.candidates.family import Family, has_some
from planner.candidates.movable import fixed, placed
from planner.candidates.offered import Offer, check_rank_numbers
from planner.observed.row_curve import RowCurve
from planner.search.cost_table import Array, Integers, reached

Ranks = NDArray[np.bool_]


class InPlace(NamedTuple):
    """A pinned layout, as an offer with the blocks where it is."""

    layout: Layout
    offer: Offer
    blocks: tuple[int, ...]


def in_place(name: str, layout: Layout, info: ParameterInfo, env: ShardingEnv, curve: RowCurve | None) -> InPlace:
    """A pinned layout where it is.

    Args:
        curve: which rows ids name: then its row blocks are costed one by one.

    Raises:
        PlanError: it does not fit the parameter or the mesh.
    """
    place = placed(layout, env)
    is_uneven = curve is not None and place is not None and place.family.size > 1
    if place is not None and has_some(place.family, info.shape) and not is_uneven:
        return InPlace(layout, Offer(place.family), place.blocks)
    own = fixed(name, layout, info, env)
    return InPlace(layout, Offer(Family(layout.name, own.block_size), "", own), (0,))


def add_load(load: Array, of: InPlace, costed: Costed, row: int, spans: Integers) -> None:
    """Add what a pinned parameter puts on ranks to (ranks, phases + 1), in place."""
    size, filled = of.offer.family.size, of.offer.family.ranks
    loads = costed.ragged.get(row)
    for piece, block in enumerate(of.blocks):
        first = block * size
        own = costed.fixed[row] * reached(size, filled, spans) if loads is None else loads[piece]
        load[first : first + size] += own
        if loads is None:
            _take_lack(load, costed.lack[row], first + filled, spans)
        for phase in np.flatnonzero(spans > size).tolist():  # the others that share it
            span, value = int(spans[phase]), own[..., phase].max()
            start = first // span * span
            load[start:first, phase] += value
            load[first + size : start + span, phase] += value
    load += costed.everywhere[row]


def _take_lack(load: Array, lack: Array, stop: int, spans: Integers) -> None:
    """Take away what a block's last rank has less; in a phase that ranks share, the last of their groups."""
    for phase in np.flatnonzero(lack).tolist():
        load[stop - spans[phase] : stop, phase] -= lack[phase]


def ranks_held(of: InPlace, costed: Costed, row: int, num_ranks: int) -> Ranks:
    """(ranks,) which have something of a pinned parameter."""
    held = np.zeros(num_ranks, dtype=bool)
    size, filled, loads = of.offer.family.size, of.offer.family.ranks, costed.ragged.get(row)
    for piece, block in enumerate(of.blocks):
        if loads is None:
            held[block * size : block * size + filled] = True
        else:
            held[block * size : (block + 1) * size] = loads[piece, :, -1] > 0
    return held


def check_ranks(
    pinned: Mapping[str, InPlace], held: Mapping[str, Ranks], constraints: Mapping[str, Constraint]
) -> None:
    """Raises PlanError where a pinned layout holds something on a rank that the parameter's constraint leaves out."""
    for name, ranks in held.items():
        check_rank_numbers(name, constraints[name], len(ranks))
        allowed = constraints[name].ranks
        outside = [] if allowed is None else [r for r in np.flatnonzero(ranks).tolist() if r not in allowed]
        if allowed is not None and outside:
            raise PlanError(
                f"{name!r} is pinned as {pinned[name].layout}, which is on rank {outside[0]}; its constraint allows "
                f"ranks={list(allowed)}: pin it there, or change the constraint",
                table=name,
                rank=outside[0],
            )


def check_layouts(
    pinned: Mapping[str, Layout],
    constraints: Mapping[str, Constraint],
    infos: Mapping[str, ParameterInfo],
    env: ShardingEnv,
) -> None:
    """Raises PlanError where a parameter is pinned as a layout that its constraint does not allow, or forbids."""
    for name, layout in pinned.items():
        only, banned, least = constraints[name].layouts, constraints[name].forbid, constraints[name].min_columns
        said = f"allows layouts={list(only)}" if only is not None and layout.name not in only else ""
        said = said or (f"says forbid={list(banned)}" if banned is not None and layout.name in banned else "")
        if least is not None and not said:
            narrowest = fixed(name, layout, infos[name], env).narrowest
            said = f"says min_columns={least}" if narrowest < min(least, prod(infos[name].shape[1:])) else ""
        if said:
            raise PlanError(
                f"{name!r} is pinned as {layout}, a {layout.name!r} layout; its constraint {said}: pin another, or "
                "change the constraint",
                table=name,
            )


def check_cut_alike(
    pinned: Mapping[str, InPlace],
    constraints: Mapping[str, Constraint],
    infos: Mapping[str, ParameterInfo],
    env: ShardingEnv,
) -> None:
    """Raises PlanError where two pinned parameters of a colocate group are cut in different ways."""
    first: dict[str, str] = {}
    for name, of in pinned.items():
        group = constraints[name].colocate
        if group is None or (before := first.setdefault(group, name)) == name:
            continue
        other = pinned[before].layout
        if of.layout != other and _cut(of.layout, infos[name], env) != _cut(other, infos[before], env):
            raise PlanError(
                f"{before!r} is pinned as {other} and {name!r} as {of.layout}; they are of the colocate group "
                f"{group!r}, whose members are cut alike: pin one, or both alike",
                table=name,
            )


def _cut(layout: Layout, info: ParameterInfo, env: ShardingEnv) -> list[tuple[int, ...]]:
    """Rank, row block and column block of each part: the same of tables of other sizes that are cut alike."""
    shards = layout.shards(info.shape, env)
    starts = [sorted({shard.offsets[dim] for shard in shards}) for dim in range(len(info.shape))]
    return sorted((s.rank, *(of.index(o) for of, o in zip(starts, s.offsets, strict=True))) for s in shards)


def held_by_groups(held: Mapping[str, Ranks], constraints: Mapping[str, Constraint], what: str) -> dict[str, Ranks]:
    """Ranks of the pinned members of each `colocate` or `spread` group.

    Raises:
        PlanError: of a colocate group they are on different ranks, or of a spread group they share one.
    """
    found: dict[str, Ranks] = {}
    for name, ranks in held.items():
        group = getattr(constraints[name], what)
        if group is None:
            continue
        before = found.get(group)
        if what == "colocate" and before is not None and (before != ranks).any():
            raise PlanError(
                f"pinned parameters of the colocate group {group!r} are on other ranks: {name!r}", table=name
            )
        if what == "spread" and before is not None and (before & ranks).any():
            raise PlanError(f"pinned parameters of the spread group {group!r} share a rank: {name!r}", table=name)
        found[group] = ranks if before is None else before | ranks
    return found
