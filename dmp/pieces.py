"""Pieces of a folder of torch's distributed checkpoint: where each chunk's bytes lie, and whether they are whole.

torch stores each chunk as an uncompressed zip archive, many in a file. An archive has a CRC-32 of each entry, which
torch writes and does not look at when it reads; here it is what tells a flipped bit.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from dmp.errors import CheckpointError
from dmp.stored import Stored

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and of what follows the name
_DIRECTORY_ENTRY = struct.Struct("<28xHHH12x")  # the lengths of what follows: name, more, comment
_Chunk = tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offset, size


class Pieces:
    """The stored chunks of a folder's tensors, each looked up when it is first wanted.

    Args:
        path: the folder.
        metadata: its `.metadata`.
        is_plain: all of them lie there as plain bytes, or the folder is damaged.
    """

    def __init__(self, path: Path, metadata: Any, *, is_plain: bool = False) -> None:
        self._path = path
        self._is_plain = is_plain
        self._metadata = metadata
        self._infos = {
            (index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()
        }
        self._known: dict[_Chunk, Stored | None] = {}
        self._like: dict[tuple[int, torch.dtype, tuple[int, ...]], _Archive] = {}

    def check(self, keys: Iterable[str], part: tuple[int, int]) -> None:
        """Read the i-th of n parts of these tensors' chunks, and compare each with its CRC-32.

        Raises:
            CheckpointError: naming the file and the tensor.
        """
        chunks = [chunk for key in sorted(keys) for chunk in self._chunks(key)]
        for chunk in chunks[part[0] :: part[1]]:
            stored = self._find(chunk)
            if stored is not None:
                stored.check(chunk[0])

    def of(self, key: str) -> list[Stored] | None:
        """All chunks of a tensor; None where they do not lie there as plain bytes."""
        found = [self._find(chunk) for chunk in self._chunks(key)]
        plain = [stored for stored in found if stored is not None]
        return plain if len(plain) == len(found) else None

    def _chunks(self, key: str) -> list[_Chunk]:
        entry = self._metadata.state_dict_metadata[key]
        return [(key, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]

    def _find(self, chunk: _Chunk) -> Stored | None:
        if chunk not in self._known:
            key, offset, size = chunk
            info = self._infos.get((key, offset))
            if info is None:
                raise CheckpointError(f"{self._path / '.metadata'} does not say where {key!r} at {offset} lies")
            dtype = self._metadata.state_dict_metadata[key].properties.dtype
            file = self._path / info.relative_path
            try:
                self._known[chunk] = self._look(file, info, dtype, size, offset)
            except (zipfile.BadZipFile, LookupError, pickle.UnpicklingError, struct.error, ValueError) as error:
                raise CheckpointError(
                    f"{file} is damaged: {key!r} at {offset} cannot be found in it: {error}"
                ) from error
        return self._known[chunk]

    def _look(
        self, file: Path, info: Any, dtype: torch.dtype, size: tuple[int, ...], offset: tuple[int, ...]
    ) -> Stored | None:
        if getattr(info, "transform_descriptors", None):
            return None
        like = self._like.get((info.length, dtype, size))
        with file.open("rb") as whole:
            crc = None if like is None else like.crc(whole, info.offset)
            if like is None or crc is None:
                whole.seek(info.offset)
                if whole.read(9)[8:] == b"{" and not self._is_plain:  # safetensors, torch's other way
                    return None
                like = _read_archive(cast(IO[bytes], _Window(whole, info.offset, info.length)), dtype, size)
                if like is None:
                    if self._is_plain:
                        raise ValueError("it is not stored as plain bytes")
                    return None
                self._like[info.length, dtype, size] = like
                crc = like.crc(whole, info.offset)
        return Stored(file, info.offset + like.at, dtype, size, offset, crc if like.is_alone and crc else None)


class _Archive(NamedTuple):
    """What one archive is like, and so are all of as many bytes: each is looked at as a zip archive only once.

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


def _read_archive(file: IO[bytes], dtype: torch.dtype, size: tuple[int, ...]) -> _Archive | None:
    """None where the tensor does not lie there as plain bytes."""
    archive = zipfile.ZipFile(file)
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    pickled, data = entries["data.pkl"], entries["data/0"]
    first, saved_size, stride = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
    num_bytes = prod(size) * dtype.itemsize
    is_plain = tuple(stride) == torch.empty(size, device="meta").stride()
    if data.compress_type != zipfile.ZIP_STORED or tuple(saved_size) != size or not is_plain:
        return None
    if data.file_size < first * dtype.itemsize + num_bytes:
        raise ValueError(f"it has {data.file_size} bytes, {num_bytes} are needed")
    file.seek(archive.start_dir)
    directory = file.read()
    crcs = dict(_crc_places(directory))
    of_values = tuple(at for name, at in crcs.items() if name in ("data/0", ".data/serialization_id"))
    return _Archive(
        data_start(file, data) + first * dtype.itemsize,
        data.file_size == num_bytes,
        archive.start_dir,
        _without(directory, of_values),
        crcs["data/0"],
        of_values,
    )


def _crc_places(directory: bytes) -> Iterator[tuple[str, int]]:
    """(name, where its CRC-32 is) of each entry of a zip archive's directory."""
    at = 0
    while directory[at : at + 4] == b"PK\1\2":
        lengths = _DIRECTORY_ENTRY.unpack_from(directory, at)
        name = directory[at + _DIRECTORY_ENTRY.size :][: lengths[0]].decode()
        yield name.partition("/")[2], at + 16
        at += _DIRECTORY_ENTRY.size + sum(lengths)


def _without(data: bytes, places: tuple[int, ...]) -> bytes:
    cleared = bytearray(data)
    for at in places:
        cleared[at : at + 4] = bytes(4)
    return bytes(cleared)


def data_start(archive: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where in an archive the bytes of an entry begin."""
    archive.seek(entry.header_offset)
    name_bytes, more_bytes = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
    return int(entry.header_offset + _LOCAL_HEADER.size + name_bytes + more_bytes)


def crc_of(entry: zipfile.ZipInfo) -> int | None:
    """None where torch was told to leave it out, and wrote 0."""
    return entry.CRC or None


class _TensorUnpickler(pickle.Unpickler):
    """Reads of a saved tensor where it begins in its storage, its size and its strides; builds nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, first, size, stride, *_: (first, size, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return str
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return None


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, whole: Any, start: int, length: int) -> None:
        self._whole, self._start, self._length, self._at = whole, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._whole.seek(self._start + self._at)
        data = self._whole.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
