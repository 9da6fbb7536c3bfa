"""Pieces of tensors in buffers of a few MB, one behind the other: as they lie where they are sent, and where they come.

Both sides cut views of one shape and dtype, each its own, and so know where each piece lies without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from dmp.chunked import ChunkedTensor
from dmp.moving.routes import Rectangle

ALIGN_BYTES = 16
Batch = list[tuple[int, torch.Tensor]]  # (first byte, piece) of what goes to one rank, or comes from it, at one time


def cut_out(chunk: torch.Tensor, at: Sequence[int], rectangle: Rectangle) -> torch.Tensor:
    """The view of a rectangle in a chunk, which lies at a place in the same tensor."""
    for dim, (first, start, length) in enumerate(zip(at, *rectangle, strict=True)):
        chunk = chunk.narrow(dim, start - first, length)
    return chunk


def batches(views: Iterable[torch.Tensor], most_bytes: int) -> Iterator[Batch]:
    """The views in pieces, by as many as fit into so many bytes."""
    batch: Batch = []
    end = 0
    for view in views:
        for _, piece in ChunkedTensor(view.shape, [view], [(0,) * view.dim()]).pieces(most_bytes):
            if batch and end + piece.nbytes > most_bytes:
                yield batch
                batch, end = [], 0
            batch.append((end, piece))
            end += _aligned(piece.nbytes)
    if batch:
        yield batch


def num_bytes(batch: Batch) -> int:
    """Of a buffer for it."""
    return _aligned(batch[-1][0] + batch[-1][1].nbytes) if batch else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def room_in(buffer: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer, larger where it must be, and so much of it."""
    if buffer.numel() < num_bytes:
        buffer = buffer.new_empty(num_bytes)
    return buffer, buffer[:num_bytes]


def places(
    going: Iterable[Batch], sizes: Sequence[int], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece and where it lies in the buffer, batch after batch, as a tensor of its shape."""
    start = 0
    for batch, size in zip(going, sizes, strict=True):
        for at, piece in batch:
            yield piece, buffer[start + at : start + at + piece.nbytes].view(piece.dtype).view(piece.shape)
        start += size
