"""`StoredPiece`: a piece of a tensor as plain bytes in a file, of which a rank reads what it holds.

[Note: straight into place] Where what is shared is whole rows of both, bytes go from the file into the target's own
memory. Else they are copied, and to compare checksums they are read, out of a mapping: that costs two thirds of reading
them into a buffer first. Its pages are brought in by a call that says when that fails; touching them would end the
process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import torch

from dmp.checkpoint.sources.named_files import open_file
from dmp.chunked import PIECE_BYTES, ChunkedTensor, copy_overlap, cut_out, overlap
from dmp.errors import CheckpointError

_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which the module mmap has no name for


class StoredPiece(NamedTuple):
    """A piece, contiguous.

    Args:
        file: where it lies.
        at: its first byte.
        dtype: of its elements.
        size: of its rectangle.
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
        """Read what the chunk shares with this piece into it, see [Note: straight into place]."""
        shared = overlap(self.offset, self.size, offset, chunk.shape)
        if shared is None:
            return
        starts, target = shared[0], cut_out(chunk.detach(), offset, shared)
        shape = target.shape[:1] + self.size[1:]  # of this piece's rows that are shared
        at = (starts[0] - self.offset[0]) * prod(shape[1:]) * self.dtype.itemsize if starts else 0
        is_plain = target.device.type == "cpu" and target.dtype == self.dtype
        with open_file(self.file, buffering=0) as file:
            if target.shape == shape and target.is_contiguous() and is_plain:
                file.seek(self.at + at)
                _fill_buffer(file, _memory_of(target), self.file)
                return
            data = self._mapped(file, at, prod(shape) * self.dtype.itemsize)
        rows = torch.frombuffer(data, dtype=self.dtype).view(shape)
        copy_overlap(chunk.detach(), offset, rows, (*starts[:1], *self.offset[1:]))

    def check(self, name: str) -> None:
        """Read all of it.

        Raises:
            CheckpointError: naming the file and `name`; the bytes are not those that were written, or are not there.
        """
        if self.crc is not None:
            self.compare(self.crc_of(0, prod(self.size) * self.dtype.itemsize), name)

    def crc_of(self, start: int, num_bytes: int) -> int:
        """CRC-32 of some of its bytes."""
        crc = 0
        with open_file(self.file, buffering=0) as file:
            for at in range(start, start + num_bytes, PIECE_BYTES):
                crc = zlib.crc32(self._mapped(file, at, min(PIECE_BYTES, start + num_bytes - at)), crc)
        return crc

    def compare(self, crc: int, name: str) -> None:
        """Raise as `check` does, unless the CRC-32 is this one."""
        if self.crc is not None and crc != self.crc:
            raise CheckpointError(
                f"{self.file} is damaged: the bytes of {name!r} from {self.at} on have CRC-32 {crc:08x}, expected "
                f"{self.crc:08x}"
            )

    def _mapped(self, file: IO[bytes], first: int, num_bytes: int) -> memoryview:
        """So many bytes from the first on, see [Note: straight into place]; changing them changes no file."""
        start = self.at + first
        page = start - start % mmap.ALLOCATIONGRANULARITY
        if os.fstat(file.fileno()).st_size < start + num_bytes:
            raise CheckpointError(f"{self.file} ends before byte {start + num_bytes}: it is cut short")
        data = mmap.mmap(file.fileno(), start + num_bytes - page, access=mmap.ACCESS_COPY, offset=page)
        if sys.platform == "linux":
            try:
                data.madvise(_POPULATE_READ)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel before 5.14
                    raise CheckpointError(f"{self.file} cannot be read up to byte {start + num_bytes}") from error
        return memoryview(data)[start - page :]


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one on the CPU, while it lives; without NumPy, which torch does not bring."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill_buffer(file: IO[bytes], buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} ends before byte {file.tell() + 1}: it is cut short")
        buffer = buffer[count:]


class Stored(Protocol):
    """What is stored of a tensor."""

    def fill(self, chunk: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Give the chunk what it shares with it."""
        ...


def fill(target: ChunkedTensor, stored: Iterable[Stored]) -> None:
    """Fill this rank's chunks from the pieces, which cover the tensor."""
    for piece in stored:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            piece.fill(chunk, offset)
