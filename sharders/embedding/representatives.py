"""Layouts of a table that stand for every way to cut it."""

from __future__ import annotations

from functools import cache
from math import prod

from dmp import Layout, column_wise, data_parallel, grid, row_wise, table_row_wise, table_wise


@cache
def representatives(dim: int, table_shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """Of every way to cut a table of so many columns: made once, for there may be thousands of ranks and tables."""
    size = prod(table_shape)
    found = [table_wise(0)]
    if size > 1:
        most = min(size, dim // 4)
        blocks = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
        found += [row_wise(), data_parallel(), *(column_wise(range(count)) for count in blocks)]
        if dim >= 8 and size >= 4:
            rows = _grid_rows(table_shape)
            found.append(grid([[i, rows + i] for i in range(rows)]))
    return (*found, table_row_wise(0)) if len(table_shape) > 1 else tuple(found)


def _grid_rows(table_shape: tuple[int, ...]) -> int:
    """Row blocks of a grid of two column blocks: half of the ranks, or the most below that are a whole part of a host
    or hosts in a number that divides theirs. Such a grid stands for all of its kind, any other for itself alone."""
    half, ranks, found = prod(table_shape) // 2, 1, [1]
    for axis in reversed(table_shape):
        found += [k * ranks for k in range(2, axis + 1) if axis % k == 0 and k * ranks <= half]
        ranks *= axis
    return max(found) if max(found) > 1 else half
