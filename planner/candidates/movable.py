"""`MovableLayout`: a layout that the search may put on other ranks.

[Note: blocks of ranks]
All table ranks are alike, so a layout that a sharder offers on some ranks stands for the same layout on others: the
sharder offers representatives (`table_wise(0)`, `column_wise([0, 1])`), and the search decides where they go. A
layout's ranks fall into *blocks* of consecutive ranks that move as one: single ranks, or for row blocks that are summed
inside a host the host's ranks. `row_wise()` and `data_parallel()` name no ranks and stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError, Shard, ShardError, ShardingEnv, hook, is_replicated
from planner.candidates.constraints import Constraint
from planner.costs.protocol import ShardInfo


@dataclass(frozen=True, eq=False)
class MovableLayout:
    """A layout of one parameter, see [Note: blocks of ranks].

    Args:
        layout: in canonical place: its first block of ranks is block 0, and so on.
        block_size: ranks in a block.
        shards: what the cost model knows of each (of one alone when all ranks have the whole).
        ranks: of the shards, in canonical place.
        num_blocks: number of blocks to place.
    """

    layout: Layout
    block_size: int
    shards: tuple[ShardInfo, ...]
    ranks: tuple[int, ...]
    num_blocks: int

    def at(self, blocks: Sequence[int], env: ShardingEnv) -> Layout:
        """The layout with its blocks put at `blocks`."""
        size = self.block_size
        moved = {i * size + k: to * size + k for i, to in enumerate(blocks) for k in range(size)}
        return self.layout.relocated(moved, env)


def fixed(name: str, layout: Layout, info: ParameterInfo, constraint: Constraint, env: ShardingEnv) -> MovableLayout:
    """A layout that stays where it is: all ranks are one block.

    Raises:
        PlanError: a layout that does not fit the parameter or the mesh.
    """
    try:
        shards = layout.shards(info.shape, env)
    except ShardError as error:
        raise PlanError(f"{name!r} = {layout}: {error}", table=name) from error
    ids = _ids_per_sample(name, info, constraint)
    if layout.is_copied or is_replicated(shards, info.shape):
        whole = ShardInfo.of(info, shards[0], ids, True)
        return MovableLayout(layout, env.table_size, (whole,), tuple(range(env.table_size)), 1)
    shards = shards or (Shard((0,) * len(info.shape), info.shape, 0),)  # a parameter of no rows
    # Row blocks of the same columns on one host: their partial sums are added up there before they leave it.
    inner = env.table_shape[-1]
    columns_on_host = [(s.rank // inner, s.offsets[1:], s.sizes[1:]) for s in shards]
    count = Counter(columns_on_host if len(env.table_shape) > 1 else ())
    infos = tuple(
        ShardInfo.of(info, shard, ids, False, 1 / max(1, count[columns]))
        for shard, columns in zip(shards, columns_on_host, strict=True)
    )
    return MovableLayout(layout, env.table_size, infos, tuple(s.rank for s in shards), 1)


def movable(
    name: str, layout: Layout, sharder: ModuleSharder, info: ParameterInfo, constraint: Constraint, env: ShardingEnv
) -> MovableLayout:
    """A layout in its canonical place; one that stays where it is, where the sharder minds the ranks.

    Raises:
        PlanError: a layout that does not fit the parameter or the mesh.
    """
    in_place = fixed(name, layout, info, constraint, env)
    named = layout.named_ranks(env)
    size = _block_size(in_place, named, env)
    if size == in_place.block_size:
        return in_place
    places = list(dict.fromkeys(rank // size for rank in (*in_place.ranks, *named)))
    canonical = {place * size + k: i * size + k for i, place in enumerate(places) for k in range(size)}
    ranks = tuple(canonical[rank] for rank in in_place.ranks)
    found = MovableLayout(layout.relocated(canonical, env), size, in_place.shards, ranks, len(places))
    accepts = hook(sharder, "accepts")
    last = [env.table_size // size - 1 - i for i in range(len(places))]
    if accepts and not accepts(info, found.at(last, env), env):
        return in_place
    return found


def _ids_per_sample(name: str, info: ParameterInfo, constraint: Constraint) -> float:
    """Mean number of ids of a sample in all features of a table."""
    factor = constraint.pooling_factor if constraint.pooling_factor is not None else info.pooling_factor
    if factor is None or isinstance(factor, (int, float)):
        return (1.0 if factor is None else float(factor)) * info.num_features
    if len(factor) != info.num_features:
        raise PlanError(
            f"{name!r} is read by {info.num_features} features; got {len(factor)} pooling factors {tuple(factor)}",
            table=name,
        )
    return float(sum(factor))


def _block_size(in_place: MovableLayout, named: tuple[int, ...], env: ShardingEnv) -> int:
    """Ranks that move as one: all, one, a host's, or the aligned run that the layout has on each of its hosts."""
    used = {*in_place.ranks, *named}
    if not named or len(used) == env.table_size:
        return env.table_size
    if not any(shard.host_share < 1 for shard in in_place.shards):
        return 1
    inner = prod(env.table_shape[1:])
    per_host = Counter(rank // inner for rank in used)
    width = max(per_host.values())
    runs = [range(rank - rank % width, rank - rank % width + width) for rank in used]
    is_aligned = inner % width == 0 and all(used.issuperset(run) for run in runs)
    return width if is_aligned and set(per_host.values()) == {width} else inner
