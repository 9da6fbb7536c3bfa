"""`Family`: layouts of a parameter that differ only in where columns are cut, and on which blocks of ranks pieces lie.

[Note: families of layouts]
Rows are cut evenly over a *block* of consecutive ranks (one rank, 2, 4, ... of a host, whole hosts, all), columns into
*pieces*, each of which has a block of its own. All table ranks are alike, so one family stands for all its places. A
family is a row of the search's `CostTable`, which counts columns in *units* of four; columns beyond a multiple of four
stay with the last piece.

Blocks lie where their size divides, so that they are parts of each other. Rows over 3 ranks, which do not, are on the
first three of a block of four: of such a block only some ranks are *filled*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from dmp import Layout, ShardingEnv, column_wise, data_parallel, grid, row_wise, table_row_wise, table_wise

UNIT = 4
"""Columns that stay together: kernels and TorchRec want multiples of it."""
_EVEN_CUTS = (2, 4, 8, 16, 32, 64, 128)
_EVERY = 8
"""Up to so many ranks of a host, or hosts, rows are cut over any number of them,"""
_FEW = 16
"""where there are no more ranks than these. On more, only over three quarters of blocks inside hosts: of many choices
that gain less the search makes worse plans than without them."""


class Block(NamedTuple):
    """Consecutive ranks that rows are cut over, see [Note: families of layouts]."""

    size: int
    filled: int


class Family(NamedTuple):
    """Layouts that differ only in their cuts and places, see [Note: families of layouts].

    Args:
        name: of the layout: where it is divisible, of the one whose columns are whole.
        size: ranks of a block.
        pieces: column pieces, as even as units allow; of one that is divisible 1.
        units: of the whole, where it is divisible: cut into any pieces of whole units.
        least: units of a piece at least.
        is_copied: every rank has the whole.
        filled: ranks of a block that have rows, the first ones; 0: all.
    """

    name: str
    size: int
    pieces: int = 1
    units: int = 0
    least: int = 0
    is_copied: bool = False
    filled: int = 0

    @property
    def ranks(self) -> int:
        """Of a block, that have rows."""
        return self.filled or self.size

    @classmethod
    def on(cls, block: Block, name: str, pieces: int = 1) -> Family:
        """Rows over a block, columns in even pieces."""
        return cls(name, block.size, pieces, filled=block.filled % block.size)


def copies(num_ranks: int) -> Family:
    """Whole on every rank."""
    return Family(data_parallel.__name__, num_ranks, is_copied=True)


def layout_of(
    family: Family, blocks: Sequence[int], widths: Sequence[int] | None, columns: int, env: ShardingEnv
) -> Layout:
    """The layout of a family with its pieces on these blocks.

    Args:
        widths: units of each piece; None for an even cut.
        columns: of the parameter.
    """
    block = Block(family.size, family.ranks)
    if len(blocks) == 1:
        return _whole(family.name, block, blocks[0], env.table_shape)
    if widths is None:
        return _cut(block, tuple(blocks), None)
    order = sorted(range(len(blocks)), key=lambda i: (-widths[i], blocks[i]))
    cut = [UNIT * widths[i] for i in order]
    cut[-1] += columns - sum(cut)
    placed = tuple(blocks[i] for i in order)
    return _cut(block, placed, None if cut == even_widths(columns, len(cut)) else tuple(cut))


def even_widths(columns: int, pieces: int) -> list[int]:
    """Columns of each piece of an even cut, as `column_wise` makes it, widest first."""
    units, rest = divmod(columns, UNIT)
    widths = [UNIT * (units // pieces + (i < units % pieces)) for i in range(pieces)]
    widths[-1] += rest
    return widths


@lru_cache(maxsize=1 << 16)
def _whole(name: str, block: Block, place: int, table_shape: tuple[int, ...]) -> Layout:
    """One piece on a block, by the name of its layout."""
    num_ranks, first, size = prod(table_shape), place * block.size, block.filled
    inner = num_ranks // table_shape[0]
    hosts = range(first // inner, (first + size) // inner)
    makers: tuple[tuple[Callable[..., Layout], tuple[Any, ...]], ...] = (
        (data_parallel, ()),
        (table_wise, (first,)),
        (table_row_wise, (hosts[0] if len(hosts) == 1 else hosts,)),
        (row_wise, () if size == num_ranks else (range(first, first + size),)),
    )
    return next(make(*args) for make, args in makers if make.__name__ == name)


@lru_cache(maxsize=1 << 14)
def _cut(block: Block, places: tuple[int, ...], widths: tuple[int, ...] | None) -> Layout:
    if block.size == 1:
        return column_wise(places, widths)
    return grid([[place * block.size + i for place in places] for i in range(block.filled)], widths)


def whole_names(size: int, table_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the layouts that put rows on so many ranks of a block, the plainest first."""
    num_ranks = prod(table_shape)
    if size == 1:
        return ("table_wise",) if num_ranks > 1 else ("table_wise", "row_wise")
    if len(table_shape) > 1 and size % (num_ranks // table_shape[0]) == 0:
        return ("row_wise", "table_row_wise") if size == num_ranks else ("table_row_wise", "row_wise")
    return ("row_wise",)


def cut_name(size: int) -> str:
    """Name of the layout that cuts columns too."""
    return "column_wise" if size == 1 else "grid"


@lru_cache(maxsize=64)
def blocks_of(table_shape: tuple[int, ...]) -> tuple[Block, ...]:
    """Blocks to look at, those with fewer ranks first: of a host, then of whole hosts. Sizes are divisors of either."""
    found, ranks = [Block(1, 1)], 1
    for axis in reversed(table_shape):
        divisors = [k for k in range(2, axis + 1) if axis % k == 0]
        filled = {*divisors}
        if prod(table_shape) <= _FEW:
            filled |= {*range(2, min(axis, _EVERY) + 1)}
        elif ranks == 1:
            filled |= {3 * k // 4 for k in divisors if k <= _EVERY and k % 4 == 0}
        found += [Block(next(k for k in divisors if k >= n) * ranks, n * ranks) for n in sorted(filled)]
        ranks *= axis
    return tuple(found)


@lru_cache(maxsize=64)
def block_sizes(table_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of blocks, ascending."""
    return tuple(sorted({block.size for block in blocks_of(table_shape)}))


@lru_cache(maxsize=16)
def canonical_layouts(table_shape: tuple[int, ...]) -> dict[Layout, Family]:
    """Layouts on the first blocks of ranks -> the family that they stand for."""
    num_ranks = prod(table_shape)
    found = {data_parallel(): copies(num_ranks)}
    for block in blocks_of(table_shape):
        for name in reversed(whole_names(block.filled, table_shape)):
            found[_whole(name, block, 0, table_shape)] = Family.on(block, name)
        for pieces in even_cuts(num_ranks // block.size):
            found[_cut(block, tuple(range(pieces)), None)] = Family.on(block, cut_name(block.size), pieces)
    return found


def even_cuts(most: int) -> list[int]:
    """Numbers of pieces to look at where columns are cut evenly."""
    return [pieces for pieces in _EVEN_CUTS if pieces <= most]


def is_filled(rows: int, size: int) -> bool:
    """Whether each of so many blocks of ceil(rows / size) rows has some."""
    return -(-rows // size) * (size - 1) < rows if size > 1 else True


def has_some(family: Family, shape: Sequence[int]) -> bool:
    """Whether each of a family's blocks gets rows of a parameter of this shape, and each piece columns."""
    if family.is_copied:
        return True
    columns = shape[1] if len(shape) == 2 else 0
    rows = shape[0] if shape else 1
    return is_filled(rows, family.ranks) and (family.pieces == 1 or columns // UNIT >= family.pieces)
