"""Pieces of a folder of torch's distributed checkpoint: where each one's bytes lie, and whether they are whole.

torch stores each piece as an uncompressed zip archive, many in a file. An archive has a CRC-32 of each entry, which
torch writes and does not look at when it reads; here it is what tells a flipped bit.

[Note: as they are stored]
Where a piece's values lie in the file one after another, a rank reads just those it holds (`StoredPiece`). Else, with
other strides or packed, it is read whole, once to be checked and again to be copied from (`PackedPiece`).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from dmp.checkpoint.sources.archive import crc_places, read_archive
from dmp.checkpoint.sources.named_files import open_file
from dmp.checkpoint.sources.safetensors_header import read_header
from dmp.checkpoint.sources.stored_piece import StoredPiece
from dmp.checkpoint.sources.tensors_json import Entries, Entry, Piece, check_entries
from dmp.chunked import copy_overlap
from dmp.errors import CheckpointError
from dmp.read_values import shown

_ZSTD = "stream.zstd/1"
_MORE_BYTES = 1 << 20  # than its values, that a packed piece may have


class FolderPieces:
    """The stored pieces of a folder's tensors, each looked up when it is first wanted.

    Args:
        path: the folder.
        entries: its tensors.
        by: which file says so.
        only_archives: all of them are torch's archives, or the folder is damaged.

    Attributes:
        shapes: key -> size and dtype of every tensor.

    Raises:
        CheckpointError: as `check_entries`.
    """

    def __init__(self, path: Path, entries: Entries, by: str, *, only_archives: bool = False) -> None:
        check_entries(path, entries, by)
        self.shapes = {key: (entry.size, entry.dtype) for key, entry in entries.items()}
        self._path = path
        self._only_archives = only_archives
        self._entries = entries
        self._known: dict[tuple[str, tuple[int, ...]], StoredPiece | PackedPiece] = {}
        self._forms: dict[tuple[int, torch.dtype, tuple[int, ...]], _ArchiveForm] = {}

    def check(self, keys: Iterable[str], share: tuple[int, int]) -> None:
        """Read the i-th of n shares of these tensors' pieces, and compare each with its CRC-32.

        Raises:
            CheckpointError: naming the file and the tensor.
        """
        pieces = [(key, piece) for key in sorted(keys) for piece in self._entries[key].pieces if all(piece.size)]
        for key, piece in pieces[share[0] :: share[1]]:
            self._find(key, piece).check(key)

    def of(self, key: str) -> list[StoredPiece | PackedPiece]:
        """All pieces of a tensor."""
        return [self._find(key, piece) for piece in self._entries[key].pieces if all(piece.size)]

    def _find(self, key: str, piece: Piece) -> StoredPiece | PackedPiece:
        found = self._known.get((key, piece.offset))
        if found is None:
            file = self._path / piece.file
            try:
                found = self._look(file, piece, self._entries[key])
            except Exception as error:  # zipfile has many kinds for what is no archive
                raise CheckpointError(
                    f"{file} is damaged: {key!r} at {piece.offset} cannot be found in it: {error}"
                ) from error
            self._known[key, piece.offset] = found
        return found

    def _look(self, file: Path, piece: Piece, entry: Entry) -> StoredPiece | PackedPiece:
        dtype, size = entry.dtype, piece.size
        packed = PackedPiece(file, piece, dtype, size, piece.offset)
        if piece.transforms:
            packed.check("it")
            return packed
        form = self._forms.get((piece.num_bytes, dtype, size))
        with open_file(file) as whole:
            crc = None if form is None else form.crc(whole, piece.at)
            if form is None or crc is None:
                whole.seek(piece.at)
                if whole.read(9)[8:] == b"{" and not self._only_archives:  # safetensors, torch's other way
                    return _in_safetensors(whole, file, piece, dtype)
                form = _read_form(cast(IO[bytes], _Window(whole, piece.at, piece.num_bytes)), dtype, size)
                if form is None:
                    return packed
                self._forms[piece.num_bytes, dtype, size] = form
                crc = form.crc(whole, piece.at)
        return StoredPiece(file, piece.at + form.at, dtype, size, piece.offset, crc if form.is_alone and crc else None)


class PackedPiece(NamedTuple):
    """A piece whose values do not lie in the file one after another; see [Note: as they are stored].

    Args:
        file: where it lies.
        piece: as the folder has it.
        dtype: of its elements.
        size: of its rectangle, as it is given out.
        offset: its first index in the whole tensor.
    """

    file: Path
    piece: Piece
    dtype: torch.dtype
    size: tuple[int, ...]
    offset: tuple[int, ...]

    def fill(self, chunk: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Give the chunk what it shares with this piece."""
        copy_overlap(chunk.detach(), offset, self._tensor().reshape(self.size), self.offset)

    def check(self, name: str) -> None:
        """Read all of it.

        Raises:
            CheckpointError: naming the file and `name`; it is damaged, or packed in a way that is not known.
        """
        try:
            self._tensor()
        except Exception as error:  # zipfile has many kinds for what is no archive
            raise CheckpointError(
                f"{self.file} is damaged, or in a form that is not known: {name!r} at {self.piece.offset}: {error}"
            ) from error

    def _tensor(self) -> torch.Tensor:
        with open_file(self.file) as whole:
            whole.seek(self.piece.at)
            data = whole.read(self.piece.num_bytes)
        for transform in reversed(self.piece.transforms):
            data = _unpacked(data, transform, 2 * prod(self.piece.size) * self.dtype.itemsize + _MORE_BYTES)
        file = io.BytesIO(data)
        archive = zipfile.ZipFile(file)
        described = read_archive(archive, file, self.dtype, self.piece.size)
        storage = bytearray(archive.read(described.entry))
        whole_elements = torch.frombuffer(storage, dtype=self.dtype, count=len(storage) // self.dtype.itemsize)
        return whole_elements.as_strided(self.piece.size, described.stride, described.first)


def _unpacked(data: bytes, transform: str, limit: int) -> bytes:
    """What was packed, at most so many bytes."""
    if not (transform == _ZSTD or transform.startswith(_ZSTD + ".")):
        raise ValueError(f"it went through {shown(transform)}; expected {_ZSTD}, or nothing")
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            "it is compressed, and the package zstandard is not installed: pip install zstandard"
        ) from None
    found: bytes = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(limit + 1)
    if len(found) > limit:
        raise ValueError(f"it unpacks to more than {limit} bytes")
    return found


def _in_safetensors(whole: IO[bytes], file: Path, piece: Piece, dtype: torch.dtype) -> StoredPiece:
    whole.seek(piece.at)
    held = list(read_header(whole, piece.num_bytes, file).values())
    if len(held) != 1 or (held[0].dtype, held[0].size) != (dtype, piece.size):
        raise ValueError(f"it holds {shown(held)}; expected one tensor, {dtype} of {piece.size}")
    return held[0]._replace(offset=piece.offset)


class _ArchiveForm(NamedTuple):
    """How one archive is laid out, and so are all of as many bytes: each is looked at as a zip archive only once.

    Args:
        at: where the tensor begins in it.
        is_alone: its storage holds nothing else, so that the CRC-32 is the tensor's.
        directory_at: where its directory begins.
        directory: to the archive's end, with zeros for what depends on the values.
        crc_at: where the storage's CRC-32 is in it.
        of_values: where all is that depends on the values, 4 bytes each.
    """

    at: int
    is_alone: bool
    directory_at: int
    directory: bytes
    crc_at: int
    of_values: tuple[int, ...]

    def crc(self, file: IO[bytes], start: int) -> int | None:
        """CRC-32 of the storage in the archive that starts there, 0 where there is none; None if it is another kind."""
        file.seek(start + self.directory_at)
        found = file.read(len(self.directory))
        crc = int.from_bytes(found[self.crc_at : self.crc_at + 4], "little")
        return crc if _without(found, self.of_values) == self.directory else None


def _read_form(file: IO[bytes], dtype: torch.dtype, size: tuple[int, ...]) -> _ArchiveForm | None:
    """None where the tensor does not lie there as plain bytes."""
    archive = zipfile.ZipFile(file)
    described = read_archive(archive, file, dtype, size)
    if described.stride != torch.empty(size, device="meta").stride():  # not one after another
        return None
    file.seek(archive.start_dir)
    directory = file.read()
    crcs = dict(crc_places(directory))
    of_values = tuple(at for name, at in crcs.items() if name in ("data/0", ".data/serialization_id"))
    at = described.at + described.first * dtype.itemsize
    is_alone = described.entry.file_size == prod(size) * dtype.itemsize
    alike = _without(directory, of_values)
    return _ArchiveForm(at, is_alone, archive.start_dir, alike, crcs["data/0"], of_values)


def _without(data: bytes, places: tuple[int, ...]) -> bytes:
    cleared = bytearray(data)
    for at in places:
        cleared[at : at + 4] = bytes(4)
    return bytes(cleared)


class _Window(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, whole: Any, start: int, length: int) -> None:
        self._whole, self._start, self._length, self._at = whole, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError(f"byte {at} of an archive")
        self._at = at
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._whole.seek(self._start + self._at)
        data = self._whole.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
