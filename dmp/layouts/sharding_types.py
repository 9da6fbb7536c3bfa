"""TorchRec's names for rectangles: which of its sharding types a layout is, and that type's shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from dmp.layouts.layout import Layout
from dmp.layouts.shard import Shard
from dmp.layouts.tables import row_blocks

if TYPE_CHECKING:
    from dmp.env import ShardingEnv

COPIED = "data_parallel"
"""A copy on every rank, which has no shards there."""


@dataclass(frozen=True)
class Block:
    """A shard as TorchRec lists them: it may be empty, which ours are not."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


def sharding_types(
    layout: Layout, shape: tuple[int, ...], env: ShardingEnv, local: int
) -> dict[str, Sequence[Block | Shard]]:
    """TorchRec's names for a layout's rectangles, the usual one first -> its shards, in its order.

    Args:
        local: ranks of a host.
    """
    shards, world = layout.shards(shape, env), env.table_size
    if layout.is_copied:
        return {COPIED: shards}
    found: dict[str, Sequence[Block | Shard]] = {"table_wise": shards} if len(shards) == 1 else {}
    if len(shape) != 2:
        return found
    wanted = {(s.offsets, s.sizes, s.rank) for s in shards}
    hosts = {s.rank // local for s in shards}
    everywhere, here = _row_blocks(shape, range(world)), _row_blocks(shape, _ranks_of(min(hosts), local))
    if _full(everywhere) == wanted:
        found["row_wise"] = everywhere
    if len(hosts) == 1 and _full(here) == wanted:
        found["table_row_wise"] = here
    ordered = sorted(shards, key=lambda s: (s.offsets[1], s.offsets[0]))
    if all(s.sizes[0] == shape[0] for s in shards):
        found["column_wise"] = ordered
        if len(hosts) == 1:
            found["table_column_wise"] = ordered
    columns = [list(of) for _, of in groupby(ordered, lambda s: s.offsets[1])]
    cut = [block for column in columns for block in _grid_column(shape, column, local)]
    if _full(cut) == wanted:
        found["grid_shard"] = cut
    return found


def _row_blocks(shape: tuple[int, ...], ranks: Sequence[int]) -> list[Block]:
    blocks = zip(row_blocks(shape[0], len(ranks)), ranks, strict=True)
    return [Block((start, 0), (rows, shape[1]), rank) for (start, rows), rank in blocks]


def _grid_column(shape: tuple[int, ...], column: Sequence[Shard], local: int) -> list[Block]:
    """The row blocks of one column block on its host."""
    first, width = column[0].offsets[1], column[0].sizes[1]
    blocks = _row_blocks(shape, _ranks_of(column[0].rank // local, local))
    return [Block((b.offsets[0], first), (b.sizes[0], width), b.rank) for b in blocks]


def _ranks_of(host: int, local: int) -> range:
    return range(host * local, (host + 1) * local)


def _full(blocks: Iterable[Block | Shard]) -> set[tuple[tuple[int, ...], tuple[int, ...], int]]:
    return {(b.offsets, b.sizes, b.rank) for b in blocks if all(b.sizes)}
