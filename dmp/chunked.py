"""`ChunkedTensor`: a large tensor of which this process holds some chunks.

[Note: chunks and pieces] A *rectangle* is geometry: offsets and sizes. A *chunk* is the values of one that this rank
holds; a *piece* is what is stored or sent of a chunk at a time.

It is what sharded tables put into a state dict: torch's distributed checkpoint takes any tensor that answers the three
methods `__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__`, so saving on one plan and loading
on another needs no more. Ranks without a chunk know the size all the same.

[Note: files of one rank] Programs have every rank write its own state with `torch.save`, and read it back into the same
plan. A file of one rank's has no other's, though, and many programs write on rank 0 alone, as they may where each has
everything. So a tensor of chunks is pickled where all that hold some do so, or nowhere.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

import torch

from dmp.dtensor_pieces import rectangles_of
from dmp.errors import ShardError
from dmp.places import is_dtensor
from dmp.sharded_form import Holders, Located, Read, ShardedForm

aten = torch.ops.aten
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""
PIECE_BYTES = 16 << 20
"""Of a stored chunk, at most: torch reads it whole, and it is in memory twice where it is copied to be written. Each
costs a reader a mapping: with 4 MB a load into other columns took 1.3 times as long."""


def _not_whole(*_: Any) -> Any:
    raise ShardError(
        "what is to be written or looked into holds this rank's chunks alone, not the whole tensor: "
        "save_checkpoint(path, model, optimizer) keeps everything, for any mesh; full_state_dict(model) and "
        "full_optimizer_state_dict(model, optimizer) give plain tensors for torch.save, "
        "export_safetensors(path, model) writes safetensors"
    )


class _ChunksOnly:
    """A mark on what holds chunks: it may be copied, and not be pickled as if it were whole."""

    __reduce_ex__ = _not_whole

    def __deepcopy__(self, memo: Any) -> _ChunksOnly:
        return self


CHUNKS_ONLY = _ChunksOnly()


class ChunkState(dict[str, Any]):
    """A state dict of chunks: it may be copied and, tensor by tensor, be given to torch's distributed checkpoint, and
    be pickled as a `ChunkedTensor` is: where it has one, see [Note: files of one rank]."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        states = self.get("state")
        values = [value for each in states.values() for value in each.values()] if isinstance(states, dict) else []
        is_empty = not any(isinstance(value, torch.Tensor) and value.dim() for value in values)
        are_chunks = any(map(is_chunked, values)) and not any(map(is_dtensor, values))
        # What `torch.load(weights_only=True)` makes of a class of ours.
        return (OrderedDict, (), None, None, iter(self.items())) if is_empty or are_chunks else _not_whole()

    def __copy__(self) -> ChunkState:
        return ChunkState(self)

    def __deepcopy__(self, memo: Any) -> ChunkState:
        return ChunkState(copy.deepcopy(dict(self), memo))


class ChunkedTensor(ShardedForm, torch.Tensor):
    """A tensor of `size` of which this process holds `chunks` at `offsets`.

    Args:
        size: shape of the whole tensor.
        chunks: values of this rank's rectangles, often views of a parameter's storage.
        offsets: first index of each chunk along each dim.
        dtype: of the elements; needed only when there are no chunks.
        device: likewise.
        places: of all shards, this rank's and the others', where they are known.
        holders: who has the others; the wrapper says so of what its state dicts give.

    Raises:
        ShardError: a chunk that does not lie inside `size`, or chunks of several dtypes.

    Example:
        >>> ChunkedTensor((4, 2), [torch.zeros(2, 2)], [(2, 0)])
        ChunkedTensor(size=(4, 2), dtype=torch.float32, chunks=[(2, 0)+(2, 2)])
    """

    _by_offset: dict[tuple[int, ...], torch.Tensor] | None  # pieces, where torch has asked for one

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        chunks: Sequence[torch.Tensor],
        offsets: Sequence[Sequence[int]],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        places: Sequence[Located] | None = None,
        holders: Holders | None = None,
    ) -> ChunkedTensor:
        size = torch.Size(size)
        if len(chunks) != len(offsets):
            raise ShardError(f"expected one offset for each chunk; got {len(chunks)} chunks and {len(offsets)} offsets")
        for chunk, offset in zip(chunks, offsets, strict=True):
            if len(offset) != len(size) or any(
                o < 0 or o + n > d for o, n, d in zip(offset, chunk.shape, size, strict=True)
            ):
                raise ShardError(f"chunk of {tuple(chunk.shape)} at {tuple(offset)} is not inside {tuple(size)}")
        if len({c.dtype for c in chunks}) > 1:
            raise ShardError(f"chunks have several dtypes: {sorted({str(c.dtype) for c in chunks})}")
        tensor: ChunkedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            dtype=chunks[0].dtype if chunks else dtype or torch.float32,
            device=chunks[0].device if chunks else torch.device(device or "cpu"),
        )
        tensor.chunks = [c.detach() for c in chunks]
        tensor._by_offset, tensor.places, tensor.holders = None, places, holders
        tensor.offsets = [tuple(int(x) for x in o) for o in offsets]
        return tensor

    @property
    def rectangles(self) -> list[Rectangle]:
        """Where the local chunks lie."""
        return [(offset, tuple(chunk.shape)) for chunk, offset in zip(self.chunks, self.offsets, strict=True)]

    def mapped(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> ChunkedTensor:
        """The same rectangles with `fn` applied to each."""
        chunks = [fn(c) for c in self.chunks]
        return ChunkedTensor(self.size(), chunks, self.offsets, self.dtype, self.device, self.places, self.holders)

    def fill_from(self, source: torch.Tensor) -> None:
        """Copy values into the local chunks from a whole tensor, or from a ChunkedTensor that holds all they need.

        Raises:
            ShardError: another size, or values that `source` does not hold on this process.
        """
        if source.size() != self.size():
            raise ShardError(f"expected size {tuple(self.size())}, got {tuple(source.size())}")
        if isinstance(source, ChunkedTensor):
            missing = self.lacks(source)
            if missing is not None:
                raise ShardError(
                    f"the given chunks do not hold the values of this process's chunk at {missing}; "
                    "they come from another plan: use save_checkpoint and load_checkpoint, or a full tensor"
                )
            given = list(zip(source.chunks, source.offsets, strict=True))
        else:
            given = [(source, (0,) * source.dim())]
        with torch.no_grad():
            for chunk, offset in zip(self.chunks, self.offsets, strict=True):
                for values, at in given:
                    copy_overlap(chunk, offset, values, at)

    def lacks(self, source: torch.Tensor) -> tuple[int, ...] | None:
        """Offset of the first local chunk whose values another tensor of this size does not hold here."""
        if not isinstance(source, ChunkedTensor):
            return None
        chunks = zip(self.chunks, self.offsets, strict=True)
        return next((offset for chunk, offset in chunks if not source._holds(chunk, offset)), None)

    def _holds(self, chunk: torch.Tensor, offset: tuple[int, ...]) -> bool:
        return chunk.numel() == sum(
            overlap_numel(chunk.shape, offset, c.shape, o) for c, o in zip(self.chunks, self.offsets, strict=True)
        )

    def pieces(self, num_bytes: int | None = None) -> Iterable[tuple[tuple[int, ...], torch.Tensor]]:
        """(offset, tensor) of the local chunks, cut to at most so many bytes; a fixed rule of the chunk's shape.

        Args:
            num_bytes: None is `PIECE_BYTES`, as they are stored.
        """
        for chunk, offset in zip(self.chunks, self.offsets, strict=True):
            for at, piece in _cut(chunk, num_bytes or PIECE_BYTES):
                yield tuple(o + a for o, a in zip(offset, at, strict=True)), piece

    # The three methods of torch's distributed checkpoint.
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint import metadata as md
        from torch.distributed.checkpoint import planner

        if self.holders is not None:
            self.holders.say_when()
        return [
            planner.WriteItem(
                index=md.MetadataIndex(fqn, torch.Size(offset)),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=md.ChunkStorageMetadata(torch.Size(offset), piece.size()),
                    properties=md.TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offset, piece in self.pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), piece.size()) for offset, piece in self.pieces()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if self._by_offset is None:
            self._by_offset = dict(self.pieces())
        if tuple(index.offset) in self._by_offset:
            return _alone(self._by_offset[tuple(index.offset)])
        raise ShardError(f"no local chunk of {index.fqn!r} begins at {index.offset}; chunks begin at {self.offsets}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (name := func._schema.name.removeprefix("aten::")).startswith("_foreach_"):  # as averages of weights do
            own = getattr(aten, name.removeprefix("_foreach_"))
            each = [own(*(a[i] if isinstance(a, list) else a for a in args), **kwargs) for i in range(len(args[0]))]
            return None if func._schema.is_mutable else each
        self = args[0]
        if func in _PER_CHUNK:
            return self.mapped(lambda c: func(c, *args[1:], **kwargs))
        if func is aten._to_copy.default:
            moved = self.mapped(lambda c: func(c, **kwargs))
            dtype, device = kwargs.get("dtype") or self.dtype, kwargs.get("device") or self.device
            if moved.chunks:
                return moved
            return ChunkedTensor(self.size(), [], [], dtype, device, self.places, self.holders)
        if func is aten.copy_.default:
            if not isinstance(self, ChunkedTensor) and as_chunks(self).lacks(args[1]) is not None:
                raise ShardError(
                    f"a whole tensor of {tuple(self.shape)} cannot be had of {args[1]!r}, which holds this rank's "
                    "chunks alone: full_state_dict(model) gives plain tensors, complete on every rank"
                )
            as_chunks(self).fill_from(args[1])
            return self
        if func is aten.new_empty.default:
            dtype, device = kwargs.get("dtype") or self.dtype, kwargs.get("device") or self.device
            return ChunkedTensor(args[1], [], [], dtype, device)
        if func in (aten.all.default, aten.any.default):
            of_chunks = [func(c) for c in self.chunks]
            return func(torch.stack(of_chunks)) if of_chunks else torch.tensor(func is aten.all.default)
        if torch.Tag.pointwise in func.tags:
            result = _pointwise(func, args, kwargs)
            return self if func._schema.is_mutable else result
        raise NotImplementedError(
            f"{func} does not work on a ChunkedTensor, which holds a rank's chunks and is for state dicts only: "
            "save_checkpoint(path, model, optimizer), or torch's distributed checkpoint, writes it; "
            "full_state_dict(model) gives plain tensors, its .chunks are this rank's"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See [Note: files of one rank]: collective where there are other ranks."""
        if self.holders is None:
            _not_whole()
        else:
            self.holders.meet()
        dims, like = self.dim(), torch.empty(0, dtype=self.dtype, device=self.device)
        places = None if self.places is None else [(p.offsets[:dims], p.sizes[:dims], p.rank) for p in self.places]
        return restored, (tuple(self.size()), like, [_apart(c) for c in self.chunks], self.offsets, places)

    def __copy__(self) -> ChunkedTensor:
        return self.mapped(torch.Tensor.detach)

    # What writers of other formats ask for first; torch's own answer is an "invalid python storage".
    storage = untyped_storage = numpy = tolist = _not_whole  # type: ignore[assignment]

    def data_ptr(self) -> int:
        """0, by which torch's asynchronous checkpoint tells what has no memory of its own, and copies attributes."""
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedTensor:
        return self.mapped(torch.Tensor.clone)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shown = ", ".join(f"{o}+{tuple(c.shape)}" for c, o in zip(self.chunks, self.offsets, strict=True))
        return f"ChunkedTensor(size={tuple(self.size())}, dtype={self.dtype}, chunks=[{shown}])"


def restored(
    size: Sequence[int],
    like: torch.Tensor,
    chunks: Sequence[torch.Tensor],
    offsets: Sequence[Sequence[int]],
    places: Sequence[Any] | None,
) -> ChunkedTensor:
    """What a rank has written, as files name it; `like` has the dtype and the device of a tensor without chunks."""
    located: list[Located] | None = None if places is None else [Read(*each) for each in places]
    return ChunkedTensor(size, chunks, offsets, like.dtype, like.device, located)


torch.serialization.add_safe_globals([restored])

_PER_CHUNK = [op.default for op in (aten.detach, aten.alias, aten.clone, aten.zeros_like, aten.empty_like)]


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChunkedTensor:
    """`func` of chunk and chunk, as states of one plan are compared; each rank compares what it holds.

    Raises:
        NotImplementedError: another tensor of which this rank holds other rectangles.
    """
    chunked = [a for a in args if isinstance(a, ChunkedTensor)]
    first = chunked[0]
    rectangles = [of.rectangles for of in chunked]
    others = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, ChunkedTensor) and a.dim()]
    if others or any(own != rectangles[0] for own in rectangles):
        what = "a tensor that is whole" if others else "one with other chunks"
        raise NotImplementedError(
            f"{func} of a ChunkedTensor and {what}: it works chunk by chunk; full_state_dict(model) gives plain tensors"
        )

    def of_each(take: Callable[[ChunkedTensor], torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = func(*(take(a) if isinstance(a, ChunkedTensor) else a for a in args), **kwargs)
        return result

    results = [of_each(lambda a, i=i: a.chunks[i]) for i in range(len(first.chunks))]  # type: ignore[misc]
    dtype = (results or [of_each(lambda a: torch.empty(0, dtype=a.dtype, device=a.device))])[0].dtype
    return ChunkedTensor(first.size(), results, first.offsets, dtype, first.device, first.places, first.holders)


def _cut(chunk: torch.Tensor, num_bytes: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offset, piece) in pieces of whole rows, where rows are small enough: else of each row's."""
    if chunk.nbytes <= num_bytes or chunk.dim() == 0:
        yield from [((0,) * chunk.dim(), chunk)] * (chunk.numel() > 0)
    elif chunk[0].nbytes <= num_bytes:
        rows = num_bytes // chunk[0].nbytes
        for start in range(0, len(chunk), rows):
            yield (start, *(0,) * (chunk.dim() - 1)), chunk[start : start + rows]
    else:
        for i, row in enumerate(chunk):
            for at, piece in _cut(row, num_bytes):
                yield (i, *at), piece.unsqueeze(0)


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage that ends where the piece does: torch copies what is a part of a larger one. One in
    another order of dims (channels last, a transposed weight) is copied: where rows lie apart, all of it would have to
    be read for each."""
    if not piece.is_contiguous():
        return piece.contiguous()
    if piece.device.type != "cpu" or not piece.numel():
        return piece
    first = piece.storage_offset() * piece.element_size()
    own = piece.untyped_storage()[first : first + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype).set_(own, 0, piece.shape)  # type: ignore[call-overload, no-any-return]


def _apart(piece: torch.Tensor) -> torch.Tensor:
    """As `_alone`, on any device: a file of a part of a storage would have all of it."""
    alone = _alone(piece)
    return alone if alone.untyped_storage().nbytes() == alone.nbytes else alone.clone()


def is_chunked(value: Any) -> TypeGuard[ChunkedTensor]:
    """Whether it is a `ChunkedTensor`."""
    return isinstance(value, ChunkedTensor)


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that is made of rectangles; a sparse one is copied and stored as other objects are."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def as_chunks(tensor: torch.Tensor) -> ChunkedTensor:
    """Any tensor as chunks that are views of it: a plain one is one chunk, a DTensor this rank's rectangles.

    Returns:
        `tensor` itself where it is one; chunks of the whole sum where a DTensor's sum is still open (a collective).

    """
    if isinstance(tensor, ChunkedTensor):
        return tensor
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return ChunkedTensor(tensor.size(), [tensor], [(0,) * tensor.dim()])
    if any(p.is_partial() for p in tensor.placements):
        return as_chunks(tensor.full_tensor())
    held = list(rectangles_of(tensor))
    chunks, offsets = [values for _, values in held], [at for at, _ in held]
    return ChunkedTensor(tensor.size(), chunks, offsets, tensor.dtype, tensor.device)


def chunk_views(tensor: torch.Tensor, parameter: torch.Tensor, chunked: ChunkedTensor) -> ChunkedTensor:
    """A tensor shaped as the local parameter, such as its gradient, cut as the parameter is; chunks are views.

    Args:
        tensor: of the local parameter's shape, any dtype.
        parameter: the local parameter.
        chunked: its pieces, views of its storage: their storage offsets say where each lies.

    Raises:
        ShardError: another shape, or pieces that are not in the parameter's storage.
    """
    if tensor.shape != parameter.shape or not (tensor.is_contiguous() and parameter.is_contiguous()):
        raise ShardError(
            f"expected a contiguous tensor of the local parameter's shape {tuple(parameter.shape)}; "
            f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    views, plain = [], tensor.detach().as_subclass(torch.Tensor)  # a gradient that tells who asks for its places
    for chunk, offset in zip(chunked.chunks, chunked.offsets, strict=True):
        at = chunk.storage_offset() - parameter.storage_offset()
        last = at + sum((n - 1) * s for n, s in zip(chunk.shape, chunk.stride(), strict=True))
        same = chunk.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if chunk.numel() and not (same and at >= 0 and last < parameter.numel()):
            raise ShardError(f"the chunk at {offset} is not a view of its local parameter of {tuple(parameter.shape)}")
        views.append(
            plain.as_strided(chunk.shape, chunk.stride(), plain.storage_offset() + at)
            if chunk.numel()
            else plain.new_empty(chunk.shape)
        )
    return ChunkedTensor(
        chunked.size(), views, chunked.offsets, tensor.dtype, tensor.device, chunked.places, chunked.holders
    )


def overlap(
    at: Sequence[int], size: Sequence[int], other_at: Sequence[int], other_size: Sequence[int]
) -> Rectangle | None:
    """What two rectangles share; None where that is nothing."""
    start = tuple(map(max, at, other_at))
    ends = zip(at, size, other_at, other_size, start, strict=True)
    shape = tuple(min(a + n, b + m) - first for a, n, b, m, first in ends)
    return (start, shape) if all(n > 0 for n in shape) else None


def overlap_numel(size: Sequence[int], at: Sequence[int], other_size: Sequence[int], other_at: Sequence[int]) -> int:
    """Elements that two rectangles share."""
    shared = overlap(at, size, other_at, other_size)
    return 0 if shared is None else prod(shared[1])


def cut_out(chunk: torch.Tensor, at: Sequence[int], rectangle: Rectangle) -> torch.Tensor:
    """The view of a rectangle in a chunk, which lies at a place in the same tensor."""
    for dim, (first, start, length) in enumerate(zip(at, *rectangle, strict=True)):
        chunk = chunk.narrow(dim, start - first, length)
    return chunk


def copy_overlap(target: torch.Tensor, at: Sequence[int], source: torch.Tensor, source_at: Sequence[int]) -> None:
    """Copy the elements that two rectangles of one tensor share, from `source` into `target`."""
    shared = overlap(at, target.shape, source_at, source.shape)
    if shared is not None:
        cut_out(target, at, shared).copy_(cut_out(source, source_at, shared))
