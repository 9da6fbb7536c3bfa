"""`Stored`: one rectangle of a tensor as plain bytes in a file, of which a rank reads the rows it holds."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from dmp.chunked import PIECE_BYTES, ChunkedTensor, copy_overlap
from dmp.errors import CheckpointError


class Stored(NamedTuple):
    """A contiguous rectangle.

    Args:
        file: where it lies.
        at: its first byte.
        dtype: of its elements.
        size: of the rectangle.
        offset: its first index in the whole tensor.
    """

    file: Path
    at: int
    dtype: torch.dtype
    size: tuple[int, ...]
    offset: tuple[int, ...]

    def fill(self, chunk: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Copy what the chunk shares with this rectangle into it, a few MB at a time."""
        if not self.size:
            copy_overlap(chunk, (), self._read(0, 1).view(()), ())
            return
        starts = [max(a, b) for a, b in zip(self.offset, offset, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, offset, chunk.shape, strict=True)]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return
        numel = prod(self.size[1:])
        rows = max(1, PIECE_BYTES // (numel * self.dtype.itemsize))
        for row in range(starts[0], stops[0], rows):
            count = min(rows, stops[0] - row)
            piece = self._read((row - self.offset[0]) * numel, count * numel).view(count, *self.size[1:])
            copy_overlap(chunk, offset, piece, (row, *self.offset[1:]))

    def _read(self, first: int, count: int) -> torch.Tensor:
        data = bytearray(count * self.dtype.itemsize)
        with self.file.open("rb") as file:
            file.seek(self.at + first * self.dtype.itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointError(f"{self.file} ends before byte {file.tell() + 1}: it is cut short")
        return torch.frombuffer(data, dtype=self.dtype)


def fill(target: ChunkedTensor, stored: Iterable[Stored]) -> None:
    """Fill this rank's chunks from the rectangles, which cover the tensor."""
    for rectangle in stored:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            rectangle.fill(chunk, offset)
