"""Layouts of dense weights: `DenseLayout`, its constructors, and how the mesh's axes cut a weight.

[Note: dense layouts]
Layouts of dense weights (`colwise()`, ...) have no ranks of their own: they follow the mesh. A weight is split along
the tensor axis or whole on it, then split along dim 0 over the fully sharded axes (FSDP2), and copied along the others;
so one rectangle may be on several ranks. Plans need not name dense weights: the data-parallel part has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, ClassVar

from dmp.errors import ShardError
from dmp.layouts.integers import number
from dmp.layouts.layout import Layout, known_in_json
from dmp.layouts.shard import Shard
from dmp.layouts.tables import row_blocks

if TYPE_CHECKING:
    from dmp.env import ShardingEnv


class DenseLayout(Layout):
    """How a dense weight is cut, see [Note: dense layouts]."""

    is_dense: ClassVar[bool] = True

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether it is one of a tensor-parallel module: `colwise`, `rowwise`, `sequence`."""
        return self.name in ("colwise", "rowwise", "sequence")

    def tensor_dim(self, num_dims: int) -> int | None:
        """The dim, of a parameter with so many, that is split over the tensor axis; None where none is.

        `rowwise` splits the input features, which a bias has not.
        """
        dim: int | None = dict(self.args).get("dim")
        if dim is not None:
            return dim
        if self.name == "colwise":
            return 0
        return 1 if self.name == "rowwise" and num_dims > 1 else None

    def resolve(self, shape: tuple[int, ...], env: ShardingEnv) -> tuple[Shard, ...]:
        """`shards` of a shape and env that are known to be such."""
        return _resolve(self, shape, _dense_axes(env))


def colwise(dim: int | None = None) -> Layout:
    """Tensor parallel by output features: dim 0 of a weight and of its bias is split over the tensor axis.

    Args:
        dim: another tensor dim to split (1 for the columns of an embedding).
    """
    return DenseLayout.of("colwise", dim=None if dim is None else number("dim", dim))


def rowwise(dim: int | None = None) -> Layout:
    """Tensor parallel by input features: dim 1 of a weight is split over the tensor axis; a bias is whole.

    Args:
        dim: another tensor dim to split (0 for the vocabulary of an embedding).
    """
    return DenseLayout.of("rowwise", dim=None if dim is None else number("dim", dim))


def sequence() -> Layout:
    """Sequence parallel: the weight is whole on the tensor axis, the activations are split along the sequence."""
    return DenseLayout.of("sequence")


def replicate() -> Layout:
    """A dense weight whole on every rank, gradients averaged."""
    return DenseLayout.of("replicate")


def fully_sharded() -> Layout:
    """A dense weight split along dim 0 over the fully sharded axes (FSDP2), gathered while it is used."""
    return DenseLayout.of("fully_sharded")


known_in_json(colwise, rowwise, sequence, replicate, fully_sharded)


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
def _resolve(layout: DenseLayout, shape: tuple[int, ...], axes: _DenseAxes) -> tuple[Shard, ...]:
    _check(layout, shape, axes)
    split_dim = None if layout.is_copied or not shape else 0
    found = []
    for rank in range(prod(axes.shape)):
        offsets, sizes = [0] * len(shape), list(shape)
        for kind, dim in (("tensor", layout.tensor_dim(len(shape))), ("split", split_dim)):
            if dim is not None:
                start, size = row_blocks(sizes[dim], axes.size(kind))[axes.index(kind, rank)]
                offsets[dim], sizes[dim] = offsets[dim] + start, size
        if all(sizes):
            found.append(Shard(tuple(offsets), tuple(sizes), rank))
    return tuple(found)


def _check(layout: DenseLayout, shape: tuple[int, ...], axes: _DenseAxes) -> None:
    name, dim = layout.name, layout.tensor_dim(len(shape))
    if layout.is_tensor_parallel and "tensor" not in axes.kinds:
        raise ShardError(f"{name} needs a mesh with a tensor axis (named tp, or tensor=...)")
    if not layout.is_tensor_parallel and not layout.is_copied and "split" not in axes.kinds:
        raise ShardError(
            f"{name} needs a shard axis along which dense weights are split (named shard, dp_shard or fsdp)"
        )
    if dim is None:
        return
    if dim >= len(shape):
        raise ShardError(f"{name} splits dim {dim} of a parameter; got shape {shape}")
    if shape[dim] % axes.size("tensor"):
        raise ShardError(
            f"{name} splits dim {dim} of shape {shape}, whose size {shape[dim]} does not divide over the "
            f"{axes.size('tensor')} ranks of the tensor axis; pad it, make that axis smaller, or leave the entry out"
        )
