"""Tensors of a model from their old chunks to their new ones: between the table ranks of each copy of the tables.

Row-wise state whose column blocks change goes by way of a value per row, see [Note: column blocks] of column_blocks.py:
the blocks of some rows at a time come together where these are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dmp.chunked import ChunkedTensor, copy_overlap
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.moving.mover import BUFFER_BYTES, Mover, Moving
from dmp.moving.routes import Rectangle, find_routes
from dmp.ranks import fail_together, gather_objects
from dmp.wrap.optimizers.column_blocks import merge_blocks
from dmp.wrap.replan.carried import Carried

Rows = tuple[int, int]  # first, and the one after the last


class MovedBytes(NamedTuple):
    """Of this rank: sent to others, and what it had itself."""

    sent: int
    kept: int


class _Known(NamedTuple):
    """Where a tensor lies on one rank: its old rectangles, and its new ones."""

    old: list[Rectangle]
    new: list[Rectangle]


def move_values(carried: Sequence[Carried], env: ShardingEnv, what: str) -> MovedBytes:
    """Fill the new chunks; collective.

    Raises:
        ShardError: the ranks have different tensors, or do not have all of one.
    """
    group = env.table_group if env.table_size > 1 else None
    mine = {c.key: _Known(c.old.rectangles, _by_rows(c).rectangles) for c in carried}
    told: list[dict[str, _Known]] = gather_objects(what, mine, group)
    fail_together(lambda: _check(carried, told, env.table_rank), env.everyone, what, kind=ShardError)
    mover = Mover(group, env.device, what)
    mover.move(_whole(c, told) for c in carried if not _is_merged(c))
    for c in carried:
        if _is_merged(c):
            _merge(c, [known[c.key] for known in told], mover, env.table_rank)
    return MovedBytes(mover.sent_bytes, mover.kept_bytes)


def _is_merged(c: Carried) -> bool:
    """Whether it takes the mean over the old blocks."""
    return c.is_row_wise and c.old.dim() == 2


def _by_rows(c: Carried) -> ChunkedTensor:
    """The new chunks; of state whose column blocks change as values per row, each range of rows once."""
    if not c.is_row_wise or c.new.dim() == 1:
        return c.new
    rows = {(o[0], chunk.data_ptr()): chunk.squeeze(1) for chunk, o in zip(c.new.chunks, c.new.offsets, strict=True)}
    return ChunkedTensor(c.new.size()[:1], list(rows.values()), [(at,) for at, _ in rows], c.new.dtype, c.new.device)


def _check(carried: Sequence[Carried], told: list[dict[str, _Known]], rank: int) -> None:
    for r, known in enumerate(told):
        if list(known) != [c.key for c in carried]:
            differs = next(iter(known.keys() ^ {c.key for c in carried}), "the order of its tensors")
            raise ShardError(f"table rank {r} has other values to move than rank {rank}: {differs}")
    for c in carried:
        try:
            find_routes(c.old.size(), [known[c.key].old for known in told], [[] for _ in told], rank)
        except ShardError as error:
            raise ShardError(f"{c.key}: {error}") from error


def _whole(c: Carried, told: list[dict[str, _Known]]) -> Moving:
    old, new = ([getattr(known[c.key], form) for known in told] for form in ("old", "new"))
    return Moving(old, new, c.old.chunks, _by_rows(c).chunks, tuple(c.old.size()))


def _merge(c: Carried, told: list[_Known], mover: Mover, rank: int) -> None:
    """Row-wise state in other column blocks, so many rows at a time as fit into a buffer."""
    num_rows, blocks = c.old.size()
    window = max(1, BUFFER_BYTES // (blocks * c.old.dtype.itemsize))
    target = _by_rows(c)
    for start in range(0, num_rows, window):
        stop = min(start + window, num_rows)
        wanted = [list(_union(known.new, (start, stop))) for known in told]
        room = {
            first: torch.empty(last - first, blocks, dtype=c.old.dtype, device=c.old.device)
            for first, last in wanted[rank]
        }
        new = [[((first, 0), (last - first, blocks)) for first, last in of_rank] for of_rank in wanted]
        mover.move([Moving([known.old for known in told], new, c.old.chunks, list(room.values()), (num_rows, blocks))])
        for first, values in room.items():
            merged = merge_blocks(values, c.old_widths or ())
            for chunk, at in zip(target.chunks, target.offsets, strict=True):
                copy_overlap(chunk, at, merged, (first,))


def _union(rectangles: Sequence[Rectangle], window: Rows) -> Iterator[Rows]:
    """The rows of rectangles inside a window, as ranges that do not touch."""
    ranges = sorted((max(o[0], window[0]), min(o[0] + n[0], window[1])) for o, n in rectangles)
    open_: Rows | None = None
    for start, stop in ranges:
        if start >= stop:
            continue
        if open_ is not None and start <= open_[1]:
            open_ = open_[0], max(open_[1], stop)
            continue
        if open_ is not None:
            yield open_
        open_ = start, stop
    if open_ is not None:
        yield open_
