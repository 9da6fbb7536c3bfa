"""Layouts of dense weights: `DenseLayout`, its constructors, and how the mesh's axes cut a weight.

[Note: dense layouts]
Layouts of dense weights (`colwise()`, ...) have no ranks of their own: they follow the mesh. A weight is split along
the tensor axis or whole on it, then split along dim 0 over the fully sharded axes (FSDP2), and copied along the others;
so one rectangle may be on several ranks. Plans need not name dense weights: the data-parallel part has the rest.

[Note: parts] A weight that holds several in one, query, key and value or a gate and what it gates, has as many equal
*parts* one behind the other. A rank of the tensor axis has its share of each, as it would of the separate weights: so
many rectangles. FSDP2 splits such a weight along its other dim, for what it cut of all of them together would be none
of torch's placements; one without another dim that divides is whole along the fully sharded axes.

[Note: stacks] FSDP2 splits dim 0, which of a stack of matrices, one for each expert, counts a few: on more ranks than
that some would have whole experts, and others nothing. Then the longest dim that divides is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
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

    @property
    def splits_inputs(self) -> bool:
        """Whether input features are split over the tensor axis."""
        return self.name == "rowwise"

    @property
    def num_parts(self) -> int:
        """Equal parts along the dim that is split, of each of which a rank has its share; see [Note: parts]."""
        return dict(self.args).get("parts") or 1

    def resolve(self, shape: tuple[int, ...], env: ShardingEnv) -> tuple[Shard, ...]:
        """`shards` of a shape and env that are known to be such."""
        return _resolve(self, shape, _dense_axes(env))


def colwise(dim: int | None = None, parts: int | None = None) -> Layout:
    """Tensor parallel by output features: dim 0 of a weight and of its bias is split over the tensor axis.

    Args:
        dim: another tensor dim to split (1 for the columns of an embedding).
        parts: of a weight that holds several in one (3 for query, key and value), how many equal ones lie one behind
            the other along that dim; a rank has its share of each.

    Raises:
        ShardError: what is no dim, or less than one part.
    """
    return DenseLayout.of("colwise", dim=None if dim is None else number("dim", dim), **_several("colwise", parts))


def rowwise(dim: int | None = None, parts: int | None = None) -> Layout:
    """Tensor parallel by input features: dim 1 of a weight is split over the tensor axis; a bias is whole.

    Args:
        dim: another tensor dim to split (0 for the vocabulary of an embedding).
        parts: of a weight that takes several one behind the other (what an attention and an MLP give), how many equal
            ones lie along that dim; a rank has its share of each.

    Raises:
        ShardError: what is no dim, or less than one part.
    """
    return DenseLayout.of("rowwise", dim=None if dim is None else number("dim", dim), **_several("rowwise", parts))


def _several(name: str, parts: int | None) -> dict[str, int]:
    if parts is not None and number("parts", parts) < 1:
        raise ShardError(f"{name}(parts=...) counts the weights that are held in one, 1 or more; got {parts}")
    return {} if parts is None or parts == 1 else {"parts": parts}


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
    tensor_dim, parts = layout.tensor_dim(len(shape)), layout.num_parts
    split_dim = None if layout.is_copied else fully_sharded_dim(shape, tensor_dim, parts, axes.size("split"))
    found = []
    for rank, part in product(range(prod(axes.shape)), range(parts)):
        offsets, sizes = [0] * len(shape), list(shape)
        if tensor_dim is not None:
            sizes[tensor_dim] //= parts
            offsets[tensor_dim] = part * sizes[tensor_dim]
        for kind, dim in (("tensor", tensor_dim), ("split", split_dim)):
            if dim is not None:
                start, size = row_blocks(sizes[dim], axes.size(kind))[axes.index(kind, rank)]
                offsets[dim], sizes[dim] = offsets[dim] + start, size
        if all(sizes):
            found.append(Shard(tuple(offsets), tuple(sizes), rank))
    return tuple(found)


def fully_sharded_dim(shape: Sequence[int], tensor_dim: int | None, parts: int, size: int) -> int | None:
    """The dim along which fully sharded axes split a dense weight; None where it is whole along them.

    Args:
        shape: of the weight, or of a tensor rank's share of it.
        tensor_dim: the dim that the tensor axis splits, if any.
        parts: along that dim, see [Note: parts].
        size: ranks on the fully sharded axes.
    """
    if tensor_dim == 0 and parts > 1:
        return 1 if len(shape) > 1 and shape[1] % size == 0 else None
    if len(shape) > 2 and tensor_dim != 0 and shape[0] < size:  # see [Note: stacks]
        others = [dim for dim in range(1, len(shape)) if dim != tensor_dim and shape[dim] % size == 0]
        return max(others, key=lambda dim: shape[dim], default=0)
    return 0 if shape else None


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
    if shape[dim] % (axes.size("tensor") * layout.num_parts) and layout.num_parts > 1:
        raise ShardError(
            f"{layout} splits {layout.num_parts} equal parts of dim {dim} of shape {shape} over the "
            f"{axes.size('tensor')} ranks of the tensor axis, and its size {shape[dim]} does not divide by both; make "
            "that axis smaller, or leave the entry out"
        )
    if shape[dim] % axes.size("tensor"):
        raise ShardError(
            f"{name} splits dim {dim} of shape {shape}, whose size {shape[dim]} does not divide over the "
            f"{axes.size('tensor')} ranks of the tensor axis; pad it, make that axis smaller, or leave the entry out"
        )
