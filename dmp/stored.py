"""`Stored`: one rectangle of a tensor as plain bytes in a file, of which a rank reads the part it holds.

[Note: straight into place] Bytes go from the file into the target's own memory, where the shared part is whole rows of
both; else through a small buffer. Where a target has some of the columns and a row of them is long, it is read row
by row, so that nothing else is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError

_LONG_RUN_BYTES = 16 << 10  # from here on, a read for each row costs less than reading what is not needed
_STAGE_BYTES = 512 << 10  # what is read to be looked at or copied stays in a core's cache


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
        starts = [max(a, b) for a, b in zip(self.offset, offset, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, offset, chunk.shape, strict=True)]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return
        target = chunk.detach()
        for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            target = target.narrow(dim, start - offset[dim], stop - start)
        first = [start - at for start, at in zip(starts, self.offset, strict=True)]
        with self.file.open("rb", buffering=0) as file:
            self._fill(target, first, file)

    def _fill(self, target: torch.Tensor, first: list[int], file: IO[bytes]) -> None:
        """The rectangle of `target`'s shape at `first` in this one."""
        is_plain = target.device.type == "cpu" and target.dtype == self.dtype
        row = prod(self.size[1:])
        at = first[0] * row if first else 0
        if target.shape[1:] == self.size[1:] and target.is_contiguous() and is_plain:
            self._read(file, at, target)
        elif not self.size:
            target.copy_(self._read(file, 0, torch.empty((), dtype=self.dtype)))
        elif len(self.size) == 2 and target.shape[1] * self.dtype.itemsize >= _LONG_RUN_BYTES:
            for part in target:
                is_run = is_plain and part.is_contiguous()
                run = self._read(file, at + first[1], part if is_run else torch.empty(part.shape, dtype=self.dtype))
                if not is_run:
                    part.copy_(run)
                at += row
        else:
            rows = min(len(target), max(1, _STAGE_BYTES // (row * self.dtype.itemsize)))
            stage = torch.empty((rows, *self.size[1:]), dtype=self.dtype)
            for part in target.split(rows):
                wanted = self._read(file, at, stage[: len(part)])
                for dim, (start, count) in enumerate(zip(first[1:], part.shape[1:], strict=True), 1):
                    wanted = wanted.narrow(dim, start, count)
                part.copy_(wanted)
                at += row * len(part)

    def check(self, name: str) -> None:
        """Read all of it.

        Raises:
            CheckpointError: naming the file and `name`; the bytes are not those that were written, or are not there.
        """
        if self.crc is None:
            return
        left, crc = prod(self.size) * self.dtype.itemsize, 0
        buffer = memoryview(bytearray(min(left, _STAGE_BYTES)))
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

    def _read(self, file: IO[bytes], first: int, target: torch.Tensor) -> torch.Tensor:
        """Fill `target`, contiguous, with the elements from the first on; returns it."""
        file.seek(self.at + first * self.dtype.itemsize)
        _fill_buffer(file, memoryview(target.view(-1).view(torch.uint8).numpy().data), self.file)
        return target


def _fill_buffer(file: IO[bytes], buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} ends before byte {file.tell() + 1}: it is cut short")
        buffer = buffer[count:]


def fill(target: ChunkedTensor, stored: Iterable[Stored]) -> None:
    """Fill this rank's chunks from the rectangles, which cover the tensor."""
    for rectangle in stored:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            rectangle.fill(chunk, offset)
