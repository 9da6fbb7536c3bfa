"""Options: the layouts that a sharder offers for a parameter, which of them may be chosen, and how they may move.

[Note: blocks and relocation]
All table ranks are alike, so a layout that a sharder offers on some ranks stands for the same layout on others: the
sharder offers representatives (`table_wise(0)`, `column_wise([0, 1])`), and the search decides where they go. An
option's ranks fall into *blocks* of consecutive ranks that move as one: single ranks, or for row blocks that are summed
inside a host the host's ranks. `row_wise()` and `data_parallel()` name no ranks and stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from dmp import (
    Layout,
    ModuleSharder,
    ParameterInfo,
    PlanError,
    Shard,
    ShardError,
    ShardingEnv,
    hook,
    is_replicated,
)
from planner.candidates.constraints import Constraint
from planner.costs.cost_model import ALL_REDUCE, BYTES, EXCHANGE, CostModel, ShardInfo
from planner.costs.topology import Topology
from planner.search.problem import Option


@dataclass(frozen=True, eq=False)
class Sketch:
    """A layout of one parameter before it has costs.

    Args:
        layout: in canonical place: its first block of ranks is block 0, and so on.
        block: ranks in a block.
        pieces: one for each shard (one in all when it is whole on every rank).
        ranks: of the pieces, in canonical place.
        num_blocks: number of blocks to place.
    """

    layout: Layout
    block: int
    pieces: tuple[ShardInfo, ...]
    ranks: tuple[int, ...]
    num_blocks: int

    def at(self, blocks: Sequence[int], env: ShardingEnv) -> Layout:
        """The layout with its blocks put at `blocks`."""
        moved = {i * self.block + k: to * self.block + k for i, to in enumerate(blocks) for k in range(self.block)}
        return self.layout.relocated(moved, env)


class Rejected(NamedTuple):
    """A layout that was offered but may not be chosen."""

    sketch: Sketch
    reason: str


def sketches(
    name: str, sharder: ModuleSharder, info: ParameterInfo, constraint: Constraint, env: ShardingEnv
) -> tuple[list[Sketch], list[Rejected]]:
    """What the sharder offers for a parameter, alike layouts on other ranks once, and what may not be chosen.

    Raises:
        PlanError: nothing is offered, a constraint names a layout that is not offered or ranks that do not exist.
    """
    if env.table_size == 1:  # where all layouts are the same, sharders offer one
        constraint = replace(constraint, layouts=None, forbid=None)
    offered = [layout for layout in dict.fromkeys(sharder.layouts(info, env)) if not layout.is_dense]
    known = list(dict.fromkeys(o.name for o in offered))
    if not offered:
        raise PlanError(f"{type(sharder).__name__} offers no layout for {name!r}, shape {info.shape}", table=name)
    for wanted in constraint.layouts or ():
        if wanted not in known:
            raise PlanError(
                f"the constraint on {name!r} asks for layout {wanted!r}; {type(sharder).__name__} offers {known}",
                table=name,
            )
    outside = [r for r in constraint.ranks or () if r >= env.table_size]
    if outside:
        raise PlanError(
            f"the constraint on {name!r} names rank {outside[0]}; the mesh has table ranks 0..{env.table_size - 1}",
            table=name,
            rank=outside[0],
        )
    chosen: dict[Layout, Sketch] = {}
    rejected: dict[Layout, Rejected] = {}
    for layout in offered:
        sketch = _sketch(name, _within(layout, constraint), sharder, info, constraint, env)
        if sketch.layout in chosen or sketch.layout in rejected:
            continue
        reason = _objection(sketch, info, constraint, env)
        if reason:
            rejected[sketch.layout] = Rejected(sketch, reason)
        else:
            chosen[sketch.layout] = sketch
    return list(chosen.values()), list(rejected.values())


def sketch_in_place(name: str, layout: Layout, info: ParameterInfo, constraint: Constraint, env: ShardingEnv) -> Sketch:
    """A sketch of a layout that stays where it is."""
    pieces, ranks = _pieces(name, layout, info, constraint, env)
    return Sketch(layout, env.table_size, pieces, ranks, 1)


def options(
    drawn: Sequence[Sketch], model: CostModel, env: ShardingEnv, topology: Topology, batch_size: float
) -> list[Option]:
    """Cost vectors of sketches, all in one evaluation of the model."""
    local, everywhere = model.costs([p for s in drawn for p in s.pieces], env, topology, batch_size)
    made, at = [], 0
    for s in drawn:
        loads = np.zeros((s.num_blocks * s.block, BYTES + 1))
        part = local[at : at + len(s.pieces)]
        if s.pieces[0].replicated:
            loads[:] = part[0]
        elif len(part) == 1:
            loads[s.ranks[0]] = part[0]
        else:
            np.add.at(loads, np.array(s.ranks), part)
        kind = ALL_REDUCE if s.pieces[0].replicated else EXCHANGE
        common = everywhere[at : at + len(s.pieces)].sum(0)
        made.append(Option(loads.reshape(s.num_blocks, s.block, BYTES + 1), common, frozenset([kind])))
        at += len(s.pieces)
    return made


def _sketch(
    name: str, layout: Layout, sharder: ModuleSharder, info: ParameterInfo, constraint: Constraint, env: ShardingEnv
) -> Sketch:
    in_place = sketch_in_place(name, layout, info, constraint, env)
    named = layout.named_ranks(env)
    block = _block_size(in_place, named, env)
    if block == in_place.block:
        return in_place
    places = list(dict.fromkeys(rank // block for rank in (*in_place.ranks, *named)))
    canonical = {at * block + k: i * block + k for i, at in enumerate(places) for k in range(block)}
    sketch = Sketch(
        layout.relocated(canonical, env),
        block,
        in_place.pieces,
        tuple(canonical[r] for r in in_place.ranks),
        len(places),
    )
    accepts = hook(sharder, "accepts")
    last = [in_place.block // block - 1 - i for i in range(len(places))]
    if accepts and not accepts(info, sketch.at(last, env), env):
        return in_place  # a sharder that is not indifferent to the ranks
    return sketch


def _pieces(
    name: str, layout: Layout, info: ParameterInfo, constraint: Constraint, env: ShardingEnv
) -> tuple[tuple[ShardInfo, ...], tuple[int, ...]]:
    try:
        shards = layout.shards(info.shape, env)
    except ShardError as error:
        raise PlanError(f"{name!r} = {layout}: {error}", table=name) from error
    ids = _ids_per_sample(name, info, constraint)
    if layout.is_copied or is_replicated(shards, info.shape):
        return (ShardInfo.of(info, shards[0], ids, True, False),), tuple(range(env.table_size))
    shards = shards or (Shard((0,) * len(info.shape), info.shape, 0),)  # a parameter of no rows
    inner = prod(env.table_shape[1:])
    two_axes = len(env.table_shape) > 1
    together = Counter((s.rank // inner, s.offsets[1:], s.sizes[1:]) for s in shards) if two_axes else Counter()
    pieces = tuple(
        ShardInfo.of(info, s, ids, False, two_axes and together[s.rank // inner, s.offsets[1:], s.sizes[1:]] > 1)
        for s in shards
    )
    return pieces, tuple(s.rank for s in shards)


def _ids_per_sample(name: str, info: ParameterInfo, constraint: Constraint) -> float:
    factor = constraint.pooling_factor if constraint.pooling_factor is not None else info.pooling_factor
    if factor is None or isinstance(factor, (int, float)):
        return (1.0 if factor is None else float(factor)) * info.num_features
    if len(factor) != info.num_features:
        raise PlanError(
            f"{name!r} is read by {info.num_features} features; got {len(factor)} pooling factors {tuple(factor)}",
            table=name,
        )
    return float(sum(factor))


def _within(layout: Layout, constraint: Constraint) -> Layout:
    """`row_wise()` on the constraint's ranks, where there is one."""
    return layout if constraint.ranks is None else layout.over(constraint.ranks)


def _block_size(sketch: Sketch, named: tuple[int, ...], env: ShardingEnv) -> int:
    """Ranks that move as one (see the note at the top), for a sketch that is in place, a block of all ranks."""
    used = sorted({*sketch.ranks, *named})
    if not named or len(used) == sketch.block:
        return sketch.block
    if not any(p.row_cut_in_host for p in sketch.pieces):
        return 1
    inner = prod(env.table_shape[1:])
    per_host = Counter(rank // inner for rank in used)
    width = max(per_host.values())
    aligned = inner % width == 0 and all(
        set(range(r // width * width, r // width * width + width)) <= set(used) for r in used
    )
    return width if aligned and set(per_host.values()) == {width} else inner


def _objection(sketch: Sketch, info: ParameterInfo, constraint: Constraint, env: ShardingEnv) -> str:
    """Why a layout may not be chosen; empty when it may."""
    layout = sketch.layout
    if constraint.layouts is not None and layout.name not in constraint.layouts:
        return f"constraint: layouts={list(constraint.layouts)}"
    if constraint.forbid is not None and layout.name in constraint.forbid:
        return f"constraint: forbid={list(constraint.forbid)}"
    cuts_columns = any(p.columns != prod(info.shape[1:]) for p in sketch.pieces)
    has_state_by_row = info.state_bytes is not None and info.state_bytes[1] > 0
    if has_state_by_row and cuts_columns and layout.name not in (constraint.layouts or ()):
        return (
            f"{info.optimizer} keeps a value per row: cut columns change numbers; a constraint's layouts may allow it"
        )
    if constraint.ranks is not None:
        if len(set(sketch.ranks)) > len(constraint.ranks):
            return f"constraint: ranks={list(constraint.ranks)} are fewer than the layout needs"
        if sketch.block == env.table_size and not set(sketch.ranks) <= set(constraint.ranks):
            return f"constraint: ranks={list(constraint.ranks)}"
    return ""
