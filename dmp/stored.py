"""`Stored`: one rectangle of a tensor as plain bytes in a file, of which a rank reads the part it holds.

[Note: straight into place] Bytes go from the file into the target's own memory, where the shared part is whole rows of
both; else through a piece of a few MB. Where a target has some of the columns and a row of them is long, it is read row
by row, so that nothing else is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from dmp.chunked import PIECE_BYTES, ChunkedTensor, copy_overlap
from dmp.errors import CheckpointError

_LONG_RUN_BYTES = 16 << 10  # from here on, a read for each row costs less than reading what is not needed


class Stored(NamedTuple):
    """A contiguous rectangle.

    Args:
        file: where it lies.
        at: its first byte.
        dtype: of its elements.
        size: of the rectangle.
        offset: its first index in the whole tensor.
        crc: CRC-32 of its bytes; None where the format has none.
    """

    file: Path
    at: int
    dtype: torch.dtype
    size: tuple[int, ...]
    offset: tuple[int, ...]
    crc: int | None = None

    def fill(self, chunk: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Read what the chunk shares with this rectangle into it, see [Note: straight into place]."""
        if not self.size:
            copy_overlap(chunk, (), self._read(0, 1).view(()), ())
            return
        starts = [max(a, b) for a, b in zip(self.offset, offset, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, offset, chunk.shape, strict=True)]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return
        target = chunk.detach()
        for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            target = target.narrow(dim, start - offset[dim], stop - start)
        first, numel = starts[0] - self.offset[0], prod(self.size[1:])
        is_plain = target.device.type == "cpu" and target.dtype == self.dtype
        if target.shape[1:] == self.size[1:] and target.is_contiguous() and is_plain:
            self._read_into(first * numel, target)
        elif len(self.size) == 2 and target.shape[1] * self.dtype.itemsize >= _LONG_RUN_BYTES:
            for i, row in enumerate(target):
                at = (first + i) * numel + starts[1] - self.offset[1]
                if is_plain and row.is_contiguous():
                    self._read_into(at, row)
                else:
                    row.copy_(self._read(at, row.numel()))
        else:
            rows = max(1, PIECE_BYTES // (numel * self.dtype.itemsize))
            for row in range(starts[0], stops[0], rows):
                count = min(rows, stops[0] - row)
                piece = self._read((row - self.offset[0]) * numel, count * numel).view(count, *self.size[1:])
                copy_overlap(chunk, offset, piece, (row, *self.offset[1:]))

    def check(self, name: str) -> None:
        """Read all of it, a few MB at a time.

        Raises:
            CheckpointError: naming the file and `name`; the bytes are not those that were written, or are not there.
        """
        if self.crc is None:
            return
        left, crc = prod(self.size) * self.dtype.itemsize, 0
        buffer = memoryview(bytearray(min(left, PIECE_BYTES)))
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.at)
            while left:
                part = buffer[: min(left, len(buffer))]
                _fill_buffer(file, part, self.file)
                crc = zlib.crc32(part, crc)
                left -= len(part)
        if crc != self.crc:
            raise CheckpointError(
                f"{self.file} is damaged: the bytes of {name!r} from {self.at} on have CRC-32 {crc:08x}, expected "
                f"{self.crc:08x}"
            )

    def _read(self, first: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.dtype)
        self._read_into(first, values)
        return values

    def _read_into(self, first: int, target: torch.Tensor) -> None:
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.at + first * self.dtype.itemsize)
            _fill_buffer(file, memoryview(target.view(-1).view(torch.uint8).numpy().data), self.file)


def _fill_buffer(file: Any, buffer: memoryview, path: Path) -> None:
    source: BinaryIO = file
    while buffer:
        count = source.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} ends before byte {source.tell() + 1}: it is cut short")
        buffer = buffer[count:]


def fill(target: ChunkedTensor, stored: Iterable[Stored]) -> None:
    """Fill this rank's chunks from the rectangles, which cover the tensor."""
    for rectangle in stored:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            rectangle.fill(chunk, offset)
