"""`MovableLayout`: a layout of a sharder's own that the search may put on other ranks.

[Note: blocks of ranks]
All table ranks are alike, so a layout that a sharder offers on some ranks stands for the same layout on others: the
sharder offers representatives (`table_wise(0)`, `column_wise([0, 1])`), and the search decides where they go. Most are
of a `Family`. Of any other, the ranks fall into *blocks* of consecutive ranks that move as one: single ranks, or for
row blocks that are summed inside a host the host's ranks. A layout that names no ranks stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError, Shard, ShardError, ShardingEnv, hook, is_replicated
from planner.candidates.family import Family, block_sizes, canonical_layouts


@dataclass(frozen=True, eq=False)
class MovableLayout:
    """A layout of one parameter, see [Note: blocks of ranks].

    Args:
        layout: in canonical place: its first block of ranks is block 0, and so on.
        block_size: ranks in a block.
        shards: where they lie as it was offered (of one alone when all ranks have the whole).
        ranks: of the shards, in canonical place.
        num_blocks: number of blocks to place.
        is_copied: all ranks have the whole.
    """

    layout: Layout
    block_size: int
    shards: tuple[Shard, ...]
    ranks: tuple[int, ...]
    num_blocks: int
    is_copied: bool = False

    @property
    def narrowest(self) -> int:
        """Columns of the narrowest shard."""
        return min(prod(shard.sizes[1:]) for shard in self.shards)

    def at(self, blocks: Sequence[int], env: ShardingEnv) -> Layout:
        """The layout with its blocks put at `blocks`."""
        return _moved(self.layout, self.block_size, dict(enumerate(blocks)), env)


class Placed(NamedTuple):
    """A layout as one of a family, and the blocks where it is."""

    family: Family
    blocks: tuple[int, ...]


def placed(layout: Layout, env: ShardingEnv) -> Placed | None:
    """The family that a layout is of, wherever it is; None where it is of none."""
    known = canonical_layouts(env.table_shape)
    if layout in known:
        return Placed(known[layout], tuple(range(known[layout].pieces)))
    named = layout.named_ranks(env)
    if not named or max(named) >= env.table_size:
        return None
    for size in block_sizes(env.table_shape):
        places = tuple(dict.fromkeys(rank // size for rank in named))
        if len(places) * size > env.table_size:
            continue
        found = known.get(_moved(layout, size, {place: i for i, place in enumerate(places)}, env))
        if found is not None and found.size == size:
            return Placed(found, places)
    return None


def fixed(name: str, layout: Layout, info: ParameterInfo, env: ShardingEnv) -> MovableLayout:
    """A layout that stays where it is: all ranks are one block.

    Raises:
        PlanError: a layout that does not fit the parameter or the mesh.
    """
    try:
        shards = layout.shards(info.shape, env)
    except ShardError as error:
        raise PlanError(f"{name!r} = {layout}: {error}", table=name) from error
    if layout.is_copied or is_replicated(shards, info.shape):
        return MovableLayout(layout, env.table_size, tuple(shards[:1]), tuple(range(env.table_size)), 1, True)
    shards = shards or (Shard((0,) * len(info.shape), info.shape, 0),)  # a parameter of no rows
    return MovableLayout(layout, env.table_size, tuple(shards), tuple(s.rank for s in shards), 1)


def movable(
    name: str,
    layout: Layout,
    sharder: ModuleSharder,
    info: ParameterInfo,
    env: ShardingEnv,
    only: Sequence[int] | None = None,
) -> MovableLayout:
    """A layout in its canonical place; one that stays where it is, where the sharder minds the ranks.

    Args:
        only: the ranks that may have something: where its blocks are not whole among them, single ranks move.

    Raises:
        PlanError: a layout that does not fit the parameter or the mesh.
    """
    in_place = fixed(name, layout, info, env)
    named = layout.named_ranks(env)
    is_of_hosts = _is_of_hosts(layout, named, env)
    size = max(_block_size(in_place, named, env), env.table_shape[-1] * is_of_hosts)
    if size == in_place.block_size:
        return in_place
    is_broken = only is not None and not {rank // size * size + k for rank in named for k in range(size)} <= {*only}
    if is_broken and is_of_hosts:
        return in_place
    size = 1 if is_broken else size
    places = list(dict.fromkeys(rank // size for rank in (*in_place.ranks, *named)))
    canonical = {place * size + k: i * size + k for i, place in enumerate(places) for k in range(size)}
    ranks = tuple(canonical[rank] for rank in in_place.ranks)
    found = MovableLayout(layout.relocated(canonical, env), size, in_place.shards, ranks, len(places))
    accepts = hook(sharder, "accepts")
    last = places if is_broken else [env.table_size // size - 1 - i for i in range(len(places))]
    if accepts and not accepts(info, found.at(last, env), env):
        return in_place
    return found


def _moved(layout: Layout, size: int, places: dict[int, int], env: ShardingEnv) -> Layout:
    """A layout whose blocks of ranks are moved, each to another place."""
    return layout.relocated({a * size + k: b * size + k for a, b in places.items() for k in range(size)}, env)


def _is_of_hosts(layout: Layout, named: tuple[int, ...], env: ShardingEnv) -> bool:
    """Whether it names hosts, so that it moves with whole ones, however few of their ranks have any rows."""
    inner = env.table_shape[-1]
    turned = {rank: rank // inner * inner + (rank + 1) % inner for rank in named}
    return inner > 1 and bool(named) and layout.relocated(turned, env) == layout


def _block_size(in_place: MovableLayout, named: tuple[int, ...], env: ShardingEnv) -> int:
    """Ranks that move as one: all, one, a host's, or the aligned run that the layout has on each of its hosts."""
    used = {*in_place.ranks, *named}
    if not named or len(used) == env.table_size:
        return env.table_size
    inner = env.table_shape[-1]
    columns_on_host = {(s.rank // inner, s.offsets[1:], s.sizes[1:]) for s in in_place.shards}
    if len(env.table_shape) == 1 or len(columns_on_host) == len(in_place.shards):
        return 1
    per_host = Counter(rank // inner for rank in used)
    width = max(per_host.values())
    runs = [range(rank - rank % width, rank - rank % width + width) for rank in used]
    is_aligned = inner % width == 0 and all(used.issuperset(run) for run in runs)
    return width if is_aligned and set(per_host.values()) == {width} else inner
