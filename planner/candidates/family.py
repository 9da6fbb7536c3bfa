"""`Family`: layouts of a parameter that differ only in where columns are cut, and on which blocks of ranks pieces lie.

[Note: families of layouts]
Rows are cut evenly over a *block* of consecutive ranks (one rank, 2, 4, ... of a host, whole hosts, all), columns into
*pieces*, each of which has a block of its own. All table ranks are alike, so one family stands for all its places. A
family is a row of the search's `CostTable`, which counts columns in *units* of four; columns beyond a multiple of four
stay with the last piece.
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


class Family(NamedTuple):
    """Layouts that differ only in their cuts and places, see [Note: families of layouts].

    Args:
        name: of the layout: where it is divisible, of the one whose columns are whole.
        size: ranks of a block.
        pieces: column pieces, as even as units allow; of one that is divisible 1.
        units: of the whole, where it is divisible: cut into any pieces of whole units.
        least: units of a piece at least.
        is_copied: every rank has the whole.
    """

    name: str
    size: int
    pieces: int = 1
    units: int = 0
    least: int = 0
    is_copied: bool = False


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
    if len(blocks) == 1:
        return _whole(family.name, family.size, blocks[0], env.table_shape)
    if widths is None:
        return _cut(family.size, tuple(blocks), None)
    order = sorted(range(len(blocks)), key=lambda i: (-widths[i], blocks[i]))
    cut = [UNIT * widths[i] for i in order]
    cut[-1] += columns - sum(cut)
    placed = tuple(blocks[i] for i in order)
    return _cut(family.size, placed, None if cut == even_widths(columns, len(cut)) else tuple(cut))


def even_widths(columns: int, pieces: int) -> list[int]:
    """Columns of each piece of an even cut, as `column_wise` makes it, widest first."""
    units, rest = divmod(columns, UNIT)
    widths = [UNIT * (units // pieces + (i < units % pieces)) for i in range(pieces)]
    widths[-1] += rest
    return widths


@lru_cache(maxsize=1 << 16)
def _whole(name: str, size: int, block: int, table_shape: tuple[int, ...]) -> Layout:
    """One piece on a block, by the name of its layout."""
    num_ranks, first = prod(table_shape), block * size
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
def _cut(size: int, blocks: tuple[int, ...], widths: tuple[int, ...] | None) -> Layout:
    if size == 1:
        return column_wise(blocks, widths)
    return grid([[block * size + i for block in blocks] for i in range(size)], widths)


def whole_names(size: int, table_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the layouts that put rows on a block of so many ranks, the plainest first."""
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
def block_sizes(table_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of blocks to look at, ascending: divisors of a host, then hosts in numbers that divide theirs."""
    sizes, ranks = [1], 1
    for axis in reversed(table_shape):
        sizes += [k * ranks for k in range(2, axis + 1) if axis % k == 0]
        ranks *= axis
    return tuple(sizes)


@lru_cache(maxsize=16)
def canonical_layouts(table_shape: tuple[int, ...]) -> dict[Layout, Family]:
    """Layouts on the first blocks of ranks -> the family that they stand for."""
    num_ranks = prod(table_shape)
    found = {data_parallel(): copies(num_ranks)}
    for size in block_sizes(table_shape):
        for name in reversed(whole_names(size, table_shape)):
            found[_whole(name, size, 0, table_shape)] = Family(name, size)
        for pieces in even_cuts(num_ranks // size):
            found[_cut(size, tuple(range(pieces)), None)] = Family(cut_name(size), size, pieces)
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
    return is_filled(shape[0] if shape else 1, family.size) and (family.pieces == 1 or columns // UNIT >= family.pieces)
