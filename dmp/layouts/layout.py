"""Layouts: how one parameter is cut into rectangles, each on one rank.

[Note: layouts and shards]
A *layout* is what a user writes (`row_wise()`); it is data: a name and arguments. For a shape and an env it resolves to
*shards*: `Shard(offsets, sizes, rank)` rectangles that cover the parameter exactly once (or whole on every rank, for
`data_parallel`). Everything after the plan (sharders, state, checkpoints) reads shards only; a layout's name is for
printing and for plans' JSON. `rank` counts in the mesh's flattened shard and tensor axes (`ShardingEnv.table_rank`).

[Note: dense layouts]
Layouts of dense weights (`colwise()`, ...) have no ranks of their own: they follow the mesh. A weight is split along
the tensor axis or whole on it, then split along dim 0 over the fully sharded axes (FSDP2), and copied along the others;
so one rectangle may be on several ranks. Plans need not name dense weights: the data-parallel part has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from dmp.errors import ShardError
from dmp.layouts.cover import first_fault
from dmp.paths import shown

if TYPE_CHECKING:
    from dmp.env import ShardingEnv

_LIMIT = 1 << 62  # of what counts elements or ranks


@dataclass(frozen=True, order=True)
class Shard:
    """One rectangle of a parameter on one rank.

    Args:
        offsets: first index along each tensor dim.
        sizes: extent along each tensor dim.
        rank: table rank that holds it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _integers("Shard.offsets", self.offsets))
        object.__setattr__(self, "sizes", _integers("Shard.sizes", self.sizes))
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or abs(self.rank) >= _LIMIT:
            raise ShardError(f"Shard.rank must be an integer; got {shown(self.rank)}")


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut: a name and arguments, resolved by `shards`. Use the constructors below."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Of one that is written by hand: as its constructor would have it."""
        try:
            args = dict(self.args)
        except (TypeError, ValueError) as error:
            raise ShardError(f"Layout.args must be (name, value) pairs; got {shown(self.args)}") from error
        object.__setattr__(self, "args", Layout.from_json({**args, "layout": self.name}).args)

    def shards(self, shape: Sequence[int], env: ShardingEnv) -> tuple[Shard, ...]:
        """Rectangles that cover `shape` exactly, in order of their offsets as the constructor gives them.

        Raises:
            ShardError: a rank that does not exist, rectangles that overlap or leave a hole, a mesh without the axes
                that the layout needs.
        """
        if not hasattr(env, "table_shape"):
            raise ShardError(f"a layout resolves for a ShardingEnv; got {shown(env)}")
        shape = _integers("a parameter's shape", shape)
        if any(n < 0 for n in shape):
            raise ShardError(f"a parameter's shape must be integers >= 0; got {shape}")
        if self.is_dense:
            return _resolve_dense(self, shape, _dense_axes(env))
        return _resolve(self, shape, env.table_shape)

    @property
    def is_dense(self) -> bool:
        """Whether it is one of a dense weight, see [Note: dense layouts]."""
        return self.name in _DENSE_RULES

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether it is one of a tensor-parallel module: `colwise`, `rowwise`, `sequence`."""
        return self.name in _TENSOR_PARALLEL

    def __str__(self) -> str:
        shown = ", ".join(_show(key, value) for key, value in self.args if value is not None)
        return f"{self.name}({shown})"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, read back by `Layout.from_json`."""
        return {"layout": self.name, **{key: value for key, value in self.args if value is not None}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """Inverse of `to_json`.

        Raises:
            ShardError: an unknown layout name or argument.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise ShardError(f'expected {{"layout": name, and its arguments}}; got {shown(data)}')
        args = dict(data)
        name = args.pop("layout", None)
        if not isinstance(name, str) or name not in _CONSTRUCTORS:
            raise ShardError(f"unknown layout {shown(name)}; known layouts: {', '.join(sorted(_CONSTRUCTORS))}")
        try:
            return _CONSTRUCTORS[name](**args)
        except TypeError as error:
            raise ShardError(f"layout {name!r} does not take these arguments {shown(args)}: {error}") from error


@dataclass(frozen=True)
class ParameterSharding:
    """One entry of a plan.

    Args:
        layout: how the parameter is cut.
    """

    layout: Layout

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise ShardError(f"a ParameterSharding holds a layout such as row_wise(); got {shown(self.layout)}")

    def __str__(self) -> str:
        return str(self.layout)


def _made(name: str, args: tuple[tuple[str, Any], ...] = ()) -> Layout:
    """By a constructor, which has looked at its arguments."""
    layout = object.__new__(Layout)
    object.__setattr__(layout, "name", name)
    object.__setattr__(layout, "args", args)
    return layout


def table_wise(rank: int) -> Layout:
    """The whole parameter on one rank."""
    return _made("table_wise", (("rank", _rank(rank)),))


def row_wise(ranks: Sequence[int] | None = None) -> Layout:
    """Blocks of ceil(rows / n) rows, the first on the first of `ranks`; all ranks in order by default."""
    return _made("row_wise", (("ranks", None if ranks is None else _ranks(ranks)),))


def column_wise(ranks: Sequence[int], widths: Sequence[int] | None = None) -> Layout:
    """Column blocks, one for each entry of `ranks` (a rank may appear twice).

    Args:
        widths: columns of each block; by default as even as whole multiples of 4 allow.
    """
    cut = None if widths is None else _numbers("widths", "columns", widths)
    return _made("column_wise", (("ranks", _ranks(ranks)), ("widths", cut)))


def table_row_wise(host: int | Sequence[int]) -> Layout:
    """Row-wise inside one coordinate (or several) of the outer shard axis; needs a mesh with two shard axes."""
    hosts: int | tuple[int, ...] = _rank(host) if isinstance(host, int) else _ranks(host)
    return _made("table_row_wise", (("host", hosts),))


def grid(ranks: Sequence[Sequence[int]]) -> Layout:
    """Row blocks x column blocks: `ranks[i][j]` holds row block i of column block j."""
    rows = tuple(_ranks(row) for row in ranks) if isinstance(ranks, Sequence) else ()
    if not rows or len({len(row) for row in rows}) != 1:
        raise ShardError(f"grid needs rows of ranks of one length, at least 1x1; got {shown(ranks)}")
    return _made("grid", (("ranks", rows),))


def rectangles(shards: Iterable[Shard | Sequence[Any]]) -> Layout:
    """Any rectangles that cover the parameter exactly."""
    try:
        given = list(shards)
    except TypeError:
        raise ShardError(f"rectangles takes a list of Shard; got {shown(shards)}") from None
    items = tuple((s.offsets, s.sizes, _rank(s.rank)) for s in map(_shard, given))
    return _made("rectangles", (("shards", items),))


def data_parallel() -> Layout:
    """The whole parameter on every rank, gradients averaged."""
    return _made("data_parallel")


def colwise(dim: int | None = None) -> Layout:
    """Tensor parallel by output features: dim 0 of a weight and of its bias is split over the tensor axis.

    Args:
        dim: another tensor dim to split (1 for the columns of an embedding).
    """
    return _made("colwise", (("dim", None if dim is None else _number("dim", dim)),))


def rowwise(dim: int | None = None) -> Layout:
    """Tensor parallel by input features: dim 1 of a weight is split over the tensor axis; a bias is whole.

    Args:
        dim: another tensor dim to split (0 for the vocabulary of an embedding).
    """
    return _made("rowwise", (("dim", None if dim is None else _number("dim", dim)),))


def sequence() -> Layout:
    """Sequence parallel: the weight is whole on the tensor axis, the activations are split along the sequence."""
    return _made("sequence")


def replicate() -> Layout:
    """A dense weight whole on every rank, gradients averaged."""
    return _made("replicate")


def fully_sharded() -> Layout:
    """A dense weight split along dim 0 over the fully sharded axes (FSDP2), gathered while it is used."""
    return _made("fully_sharded")


def is_replicated(shards: Sequence[Shard], shape: Sequence[int]) -> bool:
    """True when several ranks hold the whole parameter each."""
    return len(shards) > 1 and shards[0].sizes == tuple(shape)


def check_cover(shards: Sequence[Shard], shape: Sequence[int], size: int) -> None:
    """Raise `ShardError` unless `shards` cover `shape` exactly once, or are the whole of it on each of `size` ranks."""
    shape = tuple(shape)
    for s in shards:
        if not 0 <= s.rank < size:
            raise ShardError(f"{s} is on rank {s.rank}, but the mesh has table ranks 0..{size - 1}")
        inside = len(s.offsets) == len(s.sizes) == len(shape) and all(
            o >= 0 and n >= 1 and o + n <= d for o, n, d in zip(s.offsets, s.sizes, shape, strict=True)
        )
        if not inside:
            raise ShardError(f"{s} does not lie inside shape {shape} (each size must be at least 1)")
    if is_replicated(shards, shape) and all(s.sizes == shape for s in shards):
        if sorted(s.rank for s in shards) != list(range(size)):
            raise ShardError(f"whole copies must be on every rank 0..{size - 1} once; got {[s.rank for s in shards]}")
        return
    if first_fault([(s.offsets, s.sizes) for s in shards], shape) is None:
        return
    clash = _first_overlap(shards)
    if clash:
        raise ShardError(f"rectangles overlap in shape {shape}: {clash[0]} and {clash[1]}")
    covered = sum(prod(s.sizes) for s in shards)
    raise ShardError(f"rectangles cover {covered} of {prod(shape)} elements of shape {shape}; every one is needed")


def _first_overlap(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """First overlapping pair by a sweep along dim 0, or None."""
    active: list[Shard] = []
    for s in sorted(shards, key=lambda s: s.offsets):
        if s.offsets:
            active = [a for a in active if a.offsets[0] + a.sizes[0] > s.offsets[0]]
        for a in active:
            if all(
                ao < so + sn and so < ao + an
                for ao, an, so, sn in zip(a.offsets[1:], a.sizes[1:], s.offsets[1:], s.sizes[1:], strict=True)
            ):
                return a, s
        active.append(s)
    return None


@lru_cache(maxsize=4096)
def _resolve(layout: Layout, shape: tuple[int, ...], table_shape: tuple[int, ...]) -> tuple[Shard, ...]:
    shards = tuple(_RULES[layout.name](shape, table_shape, **dict(layout.args)))
    check_cover(shards, shape, prod(table_shape))
    return shards


def _row_blocks(rows: int, count: int) -> list[tuple[int, int]]:
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


def _table_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], rank: int) -> list[Shard]:
    return [Shard((0,) * len(shape), shape, rank)]


def _row_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], ranks: tuple[int, ...] | None) -> list[Shard]:
    ranks = tuple(range(prod(table_shape))) if ranks is None else ranks
    _need_dims("row_wise", shape, 1)
    blocks = _row_blocks(shape[0], len(ranks))
    rest = shape[1:]
    return [
        Shard((start, *(0 for _ in rest)), (rows, *rest), rank)
        for (start, rows), rank in zip(blocks, ranks, strict=True)
        if rows
    ]


def _column_wise(
    shape: tuple[int, ...], table_shape: tuple[int, ...], ranks: tuple[int, ...], widths: tuple[int, ...] | None
) -> list[Shard]:
    _need_dims("column_wise", shape, 2)
    return [
        Shard((0, start, *(0 for _ in shape[2:])), (shape[0], width, *shape[2:]), rank)
        for (start, width), rank in zip(_column_blocks(shape[1], len(ranks), widths), ranks, strict=True)
    ]


def _table_row_wise(shape: tuple[int, ...], table_shape: tuple[int, ...], host: int | tuple[int, ...]) -> list[Shard]:
    hosts = (host,) if isinstance(host, int) else host
    if len(table_shape) < 2:
        raise ShardError(
            f"table_row_wise needs a mesh with two shard axes (outer = host); this one has table axes {table_shape}"
        )
    bad = [h for h in hosts if h >= table_shape[0]]
    if bad:
        raise ShardError(f"table_row_wise names host {bad[0]}, but the outer shard axis has size {table_shape[0]}")
    inner = prod(table_shape[1:])
    return _row_wise(shape, table_shape, tuple(h * inner + i for h in hosts for i in range(inner)))


def _grid(shape: tuple[int, ...], table_shape: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]) -> list[Shard]:
    _need_dims("grid", shape, 2)
    columns = _column_blocks(shape[1], len(ranks[0]), None)
    return [
        Shard((row, column), (rows, width), ranks[i][j])
        for i, (row, rows) in enumerate(_row_blocks(shape[0], len(ranks)))
        for j, (column, width) in enumerate(columns)
        if rows
    ]


def _rectangles(shape: tuple[int, ...], table_shape: tuple[int, ...], shards: tuple[Any, ...]) -> list[Shard]:
    return [Shard(*s) for s in shards]


def _data_parallel(shape: tuple[int, ...], table_shape: tuple[int, ...]) -> list[Shard]:
    return [Shard((0,) * len(shape), shape, rank) for rank in range(prod(table_shape))]


@dataclass(frozen=True)
class _DenseAxes:
    """The table axes of an env as dense weights see them: sizes, and what each does."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...]  # "tensor", "split" (FSDP2) or "copy"

    def size(self, kind: str) -> int:
        return prod(n for n, k in zip(self.shape, self.kinds, strict=True) if k == kind)

    def index(self, kind: str, rank: int) -> int:
        """Place of a table rank along the axes of a kind, flattened."""
        found, step = 0, 1
        for n, k in reversed(list(zip(self.shape, self.kinds, strict=True))):
            rank, at = divmod(rank, n)
            if k == kind:
                found, step = found + at * step, step * n
        return found


def _dense_axes(env: ShardingEnv) -> _DenseAxes:
    names = env.axes("shard", "tensor")
    kind = {**dict.fromkeys(env.axes("tensor"), "tensor"), **dict.fromkeys(env.fully_sharded_axes, "split")}
    shape = tuple(env.shape[env.names.index(name)] for name in names)
    return _DenseAxes(shape or (1,), tuple(kind.get(name, "copy") for name in names) or ("copy",))


@lru_cache(maxsize=4096)
def _resolve_dense(layout: Layout, shape: tuple[int, ...], axes: _DenseAxes) -> tuple[Shard, ...]:
    dim = _DENSE_RULES[layout.name](shape, axes, **dict(layout.args))
    is_split = layout.name != "replicate"
    found = []
    for rank in range(prod(axes.shape)):
        offsets, sizes = [0] * len(shape), list(shape)
        for kind, at in (("tensor", dim), ("split", 0 if is_split and shape else None)):
            if at is not None:
                start, size = _row_blocks(sizes[at], axes.size(kind))[axes.index(kind, rank)]
                offsets[at], sizes[at] = offsets[at] + start, size
        if all(sizes):
            found.append(Shard(tuple(offsets), tuple(sizes), rank))
    return tuple(found)


def _split_dim(name: str, shape: tuple[int, ...], axes: _DenseAxes, dim: int) -> int:
    if "tensor" not in axes.kinds:
        raise ShardError(f"{name} needs a mesh with a tensor axis (named tp, or tensor=...)")
    if dim >= len(shape):
        raise ShardError(f"{name} splits dim {dim} of a parameter; got shape {shape}")
    if shape[dim] % axes.size("tensor"):
        raise ShardError(
            f"{name} splits dim {dim} of shape {shape}, whose size {shape[dim]} does not divide over the "
            f"{axes.size('tensor')} ranks of the tensor axis; pad it, make that axis smaller, or leave the entry out"
        )
    return dim


def _colwise(shape: tuple[int, ...], axes: _DenseAxes, dim: int | None) -> int | None:
    return _split_dim("colwise", shape, axes, 0 if dim is None else dim)


def _rowwise(shape: tuple[int, ...], axes: _DenseAxes, dim: int | None) -> int | None:
    if dim is None and len(shape) < 2:
        return None
    return _split_dim("rowwise", shape, axes, 1 if dim is None else dim)


def _sequence(shape: tuple[int, ...], axes: _DenseAxes) -> int | None:
    if "tensor" not in axes.kinds:
        raise ShardError("sequence needs a mesh with a tensor axis (named tp, or tensor=...)")
    return None


def _replicate(shape: tuple[int, ...], axes: _DenseAxes) -> int | None:
    return None


def _fully_sharded(shape: tuple[int, ...], axes: _DenseAxes) -> int | None:
    if "split" not in axes.kinds:
        raise ShardError(
            "fully_sharded needs a shard axis along which dense weights are split (named shard, dp_shard or fsdp)"
        )
    return None


_CONSTRUCTORS: dict[str, Callable[..., Layout]] = {
    f.__name__: f
    for f in (
        *(table_wise, row_wise, column_wise, table_row_wise, grid, rectangles, data_parallel),
        *(colwise, rowwise, sequence, replicate, fully_sharded),
    )
}
# What is split over the tensor axis: its dim, or None.
_DENSE_RULES: dict[str, Callable[..., int | None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "sequence": _sequence,
    "replicate": _replicate,
    "fully_sharded": _fully_sharded,
}
_TENSOR_PARALLEL = ("colwise", "rowwise", "sequence")
_RULES: dict[str, Callable[..., list[Shard]]] = {
    "table_wise": _table_wise,
    "row_wise": _row_wise,
    "column_wise": _column_wise,
    "table_row_wise": _table_row_wise,
    "grid": _grid,
    "rectangles": _rectangles,
    "data_parallel": _data_parallel,
}


def _number(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise ShardError(f"{what} must be an integer >= 0; got {shown(value)}")
    return value


def _numbers(what: str, of: str, values: Any) -> tuple[int, ...]:
    try:
        items = tuple(values)
    except TypeError:
        raise ShardError(f"{what} must be a list of {of}; got {shown(values)}") from None
    return tuple(_number(f"each of {what}", v) for v in items)


def _integers(what: str, values: Any) -> tuple[int, ...]:
    try:
        items = tuple(values)
        if any(isinstance(item, (bool, str)) for item in items):
            raise TypeError
        integers = tuple(index(item) for item in items)
        if any(abs(i) >= _LIMIT for i in integers):
            raise TypeError
        return integers
    except TypeError:
        raise ShardError(f"{what} must be a list of integers; got {shown(values)}") from None


def _rank(value: Any) -> int:
    return _number("a rank", value)


def _ranks(values: Sequence[int]) -> tuple[int, ...]:
    ranks = _numbers("ranks", "ranks", values)
    if not ranks:
        raise ShardError("a layout needs at least one rank; got none")
    return ranks


def _shard(item: Any) -> Shard:
    try:
        return item if isinstance(item, Shard) else Shard(*item)
    except TypeError:
        raise ShardError(f"expected a Shard, or its (offsets, sizes, rank); got {shown(item)}") from None


def _need_dims(name: str, shape: tuple[int, ...], dims: int) -> None:
    if len(shape) < dims:
        raise ShardError(f"{name} cuts dim {dims - 1} of a parameter; got shape {shape}")


def _show(key: str, value: Any) -> str:
    text = f"{len(value)} shards" if key == "shards" else str(list(value) if isinstance(value, tuple) else value)
    return f"widths={text}" if key == "widths" else text
