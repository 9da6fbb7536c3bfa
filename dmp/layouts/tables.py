"""Layouts of tables: `TableLayout`, its constructors, and the rectangles that each of them makes.

Each constructor checks its arguments, which are then data; the function of the same name after it, with an underscore,
makes the rectangles of a shape, on a mesh of the given table axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from dmp.errors import ShardError
from dmp.layouts import integers
from dmp.layouts.layout import Layout, known_in_json
from dmp.layouts.shard import Shard, check_cover, known_shard
from dmp.read_values import shown

if TYPE_CHECKING:
    from dmp.env import ShardingEnv


_Rows = Sequence[tuple[int, ...]]  # ranks of each row block


class TableLayout(Layout):
    """How a table is cut, and on which ranks."""

    def resolve(self, shape: tuple[int, ...], env: ShardingEnv) -> tuple[Shard, ...]:
        """`shards` of a shape and env that are known to be such."""
        return _resolve(self, shape, env.table_shape)

    def check(self, shape: Sequence[int], env: ShardingEnv) -> None:
        """Raise what `shards` would; of rows over many ranks without making them."""
        shape = integers.integers("a parameter's shape", shape)
        if self.name in _RANKS_OF_ROWS and min(shape, default=0) > 0:
            _check_rows(self, shape, env.table_shape)
        elif not (self.is_copied and min(shape, default=0) > 0):
            self.shards(shape, env)

    def relocated(self, moved: Mapping[int, int], env: ShardingEnv) -> Layout:
        """The same on other ranks; `row_wise()` and `data_parallel()` name none and stay.

        Args:
            moved: table rank -> table rank, for every one of `named_ranks`. A host is where its first rank is.
        """
        inner = prod(env.table_shape[1:])
        return self.of(self.name, **{key: _relocated(key, value, moved, inner) for key, value in self.args})

    def over(self, ranks: Sequence[int]) -> Layout:
        """Of one that takes all ranks because it names none, `row_wise()`: the same on these; any other is itself."""
        return self if ("ranks", None) not in self.args else self.of(self.name, ranks=integers.ranks(ranks))


def _relocated(key: str, value: Any, moved: Mapping[int, int], inner: int) -> Any:
    """An argument of a constructor, where the ranks in it have moved; a host has `inner` ranks."""
    if value is None or key == "widths":
        return value
    if key == "shards":
        return tuple((offsets, sizes, moved[rank]) for offsets, sizes, rank in value)
    if isinstance(value, tuple):
        return tuple(_relocated(key, item, moved, inner) for item in value)
    return moved[value * inner] // inner if key == "host" else moved[value]


def table_wise(rank: int) -> Layout:
    """The whole parameter on one rank."""
    return TableLayout.of("table_wise", rank=integers.rank(rank))


def _table_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], rank: int) -> list[Shard]:
    return [known_shard((0,) * len(shape), shape, rank)]


def row_wise(ranks: Sequence[int] | None = None) -> Layout:
    """Blocks of ceil(rows / n) rows, the first on the first of `ranks`; all ranks in order by default."""
    return TableLayout.of("row_wise", ranks=None if ranks is None else integers.ranks(ranks))


def _row_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], ranks: tuple[int, ...] | None) -> list[Shard]:
    ranks = tuple(range(prod(table_shape))) if ranks is None else ranks
    _need_dims("row_wise", shape, 1)
    blocks = row_blocks(shape[0], len(ranks))
    rest = shape[1:]
    first = (0,) * len(rest)
    return [
        known_shard((start, *first), (rows, *rest), rank)
        for (start, rows), rank in zip(blocks, ranks, strict=True)
        if rows
    ]


def column_wise(ranks: Sequence[int], widths: Sequence[int] | None = None) -> Layout:
    """Column blocks, one for each entry of `ranks` (a rank may appear twice).

    Args:
        widths: columns of each block; by default as even as whole multiples of 4 allow.
    """
    cut = None if widths is None else integers.numbers("widths", "columns", widths)
    return TableLayout.of("column_wise", ranks=integers.ranks(ranks), widths=cut)


def _column_wise(
    shape: tuple[int, ...], table_shape: tuple[int, ...], ranks: tuple[int, ...], widths: tuple[int, ...] | None
) -> list[Shard]:
    _need_dims("column_wise", shape, 2)
    return [
        known_shard((0, start, *(0 for _ in shape[2:])), (shape[0], width, *shape[2:]), rank)
        for (start, width), rank in zip(_column_blocks(shape[1], len(ranks), widths), ranks, strict=True)
    ]


def table_row_wise(host: int | Sequence[int]) -> Layout:
    """Row-wise inside one coordinate (or several) of the outer shard axis; needs a mesh with two shard axes."""
    hosts: int | tuple[int, ...] = integers.rank(host) if isinstance(host, int) else integers.ranks(host)
    return TableLayout.of("table_row_wise", host=hosts)


def _table_row_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], host: int | tuple[int, ...]) -> list[Shard]:
    return _row_wise(shape, table_shape, _of_hosts(table_shape, host))


def _of_hosts(table_shape: tuple[int, ...], host: int | tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of hosts."""
    hosts = (host,) if isinstance(host, int) else host
    if len(table_shape) < 2:
        raise ShardError(
            f"table_row_wise needs a mesh with two shard axes (outer = host); this one has table axes {table_shape}"
        )
    bad = [h for h in hosts if h >= table_shape[0]]
    if bad:
        raise ShardError(f"table_row_wise names host {bad[0]}, but the outer shard axis has size {table_shape[0]}")
    inner = prod(table_shape[1:])
    return tuple(h * inner + i for h in hosts for i in range(inner))


def grid(ranks: Sequence[Sequence[int]], widths: Sequence[int] | None = None) -> Layout:
    """Row blocks x column blocks: `ranks[i][j]` holds row block i of column block j.

    Args:
        widths: columns of each column block; by default as even as whole multiples of 4 allow.
    """
    rows = tuple(integers.ranks(row) for row in ranks) if isinstance(ranks, Sequence) else ()
    if not rows or len({len(row) for row in rows}) != 1:
        raise ShardError(f"grid needs rows of ranks of one length, at least 1x1; got {shown(ranks)}")
    cut = None if widths is None else integers.numbers("widths", "columns", widths)
    return TableLayout.of("grid", ranks=rows, widths=cut)


def _grid(
    shape: tuple[int, ...],
    table_shape: tuple[int, ...],
    ranks: tuple[tuple[int, ...], ...],
    widths: tuple[int, ...] | None = None,
) -> list[Shard]:
    _need_dims("grid", shape, 2)
    columns = _column_blocks(shape[1], len(ranks[0]), widths)
    return [
        known_shard((row, column), (rows, width), ranks[i][j])
        for i, (row, rows) in enumerate(row_blocks(shape[0], len(ranks)))
        for j, (column, width) in enumerate(columns)
        if rows
    ]


def rectangles(shards: Iterable[Shard | Sequence[Any]]) -> Layout:
    """Any rectangles that cover the parameter exactly."""
    try:
        given = list(shards)
    except TypeError:
        raise ShardError(f"rectangles takes a list of Shard; got {shown(shards)}") from None
    items = tuple((s.offsets, s.sizes, integers.rank(s.rank)) for s in map(_shard, given))
    return TableLayout.of("rectangles", shards=items)


def _shard(item: Any) -> Shard:
    try:
        return item if isinstance(item, Shard) else Shard(*item)
    except TypeError:
        raise ShardError(f"expected a Shard, or its (offsets, sizes, rank); got {shown(item)}") from None


def _rectangles(shape: tuple[int, ...], table_shape: tuple[int, ...], shards: tuple[Any, ...]) -> list[Shard]:
    return [Shard(*s) for s in shards]


def data_parallel() -> Layout:
    """The whole parameter on every rank, gradients averaged."""
    return TableLayout.of("data_parallel")


def _data_parallel(shape: tuple[int, ...], table_shape: tuple[int, ...]) -> list[Shard]:
    first = (0,) * len(shape)
    return [known_shard(first, shape, rank) for rank in range(prod(table_shape))]


known_in_json(table_wise, row_wise, column_wise, table_row_wise, grid, rectangles, data_parallel)
_cuts = (_table_wise, _row_wise, _column_wise, _table_row_wise, _grid, _rectangles, _data_parallel)
_RECTANGLES: dict[str, Callable[..., list[Shard]]] = {cut.__name__[1:]: cut for cut in _cuts}


@lru_cache(maxsize=4096)
def _resolve(layout: TableLayout, shape: tuple[int, ...], table_shape: tuple[int, ...]) -> tuple[Shard, ...]:
    of_rows = layout.name in _RANKS_OF_ROWS
    covers = all(shape) and (of_rows or layout.is_copied)  # as they are made, blocks and copies
    if covers and of_rows:
        _check_rows(layout, shape, table_shape)
    shards = tuple(_RECTANGLES[layout.name](shape, table_shape, **dict(layout.args)))
    if not covers:
        check_cover(shards, shape, prod(table_shape))
    return shards


def _check_rows(layout: TableLayout, shape: tuple[int, ...], table_shape: tuple[int, ...]) -> None:
    """Raise for rows over ranks that do not exist, or columns that cannot be cut so."""
    args = dict(layout.args)
    rows = _RANKS_OF_ROWS[layout.name](table_shape, **args)
    _need_dims(layout.name, shape, 1 + (len(rows[0]) > 1 or args.get("widths") is not None))
    if len(rows[0]) > 1 or args.get("widths") is not None:
        _column_blocks(shape[1], len(rows[0]), args.get("widths"))
    block = -(-shape[0] // len(rows))
    last = max(max(row) for row in rows[: -(-shape[0] // block)])
    if last >= prod(table_shape):
        raise ShardError(f"{layout} is on rank {last}, but the mesh has table ranks 0..{prod(table_shape) - 1}")


_RANKS_OF_ROWS: dict[str, Callable[..., _Rows]] = {
    "row_wise": lambda table_shape, ranks: [(r,) for r in (range(prod(table_shape)) if ranks is None else ranks)],
    "table_row_wise": lambda table_shape, host: [(rank,) for rank in _of_hosts(table_shape, host)],
    "grid": lambda table_shape, ranks, widths=None: ranks,
}


def row_blocks(rows: int, count: int) -> list[tuple[int, int]]:
    """(offset, size) of `count` blocks of ceil(rows / count); the last ones may be smaller or empty."""
    block = -(-rows // count)
    starts = [min(i * block, rows) for i in range(count)]
    return [(start, min(block, rows - start)) for start in starts]


def _column_blocks(columns: int, count: int, widths: Sequence[int] | None) -> list[tuple[int, int]]:
    if widths is None:
        units, rest = divmod(columns, 4)
        if units < count:
            raise ShardError(
                f"{columns} columns cannot be cut into {count} blocks of at least 4; use fewer ranks or pass widths="
            )
        widths = [4 * (units // count + (i < units % count)) for i in range(count)]
        widths[-1] += rest
    if len(widths) != count or sum(widths) != columns or min(widths, default=0) < 1:
        raise ShardError(f"widths must be {count} positive numbers that sum to {columns}; got {tuple(widths)}")
    starts = [sum(widths[:i]) for i in range(count)]
    return list(zip(starts, widths, strict=True))


def _need_dims(name: str, shape: tuple[int, ...], dims: int) -> None:
    if len(shape) < dims:
        raise ShardError(f"{name} cuts dim {dims - 1} of a parameter; got shape {shape}")
