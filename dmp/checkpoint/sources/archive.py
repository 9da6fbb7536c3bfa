"""One tensor as `torch.save` writes it: a zip archive whose `data.pkl` describes the tensor; `data/0` is its values.

Nothing of it is unpacked or run: entries are as long as they say and lie apart, and the pickle is read as plain data.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch

from dmp.checkpoint.sources.plain_pickle import Global, Record, check_nesting, read_pickle
from dmp.checkpoint.sources.tensors_json import DTYPES
from dmp.read_values import is_shape, is_size, shown

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and of what follows the name
_DIRECTORY_ENTRY = struct.Struct("<28xHHH12x")  # the lengths of what follows: name, more, comment
_MOST_PICKLE_BYTES = 1 << 16  # of one tensor's description, which has some hundred
_STORAGES = {
    **{"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
}
_REBUILD = (Global("torch._utils", "_rebuild_tensor_v2"), Global("torch._utils", "_rebuild_tensor_v3"))
_UNTYPED = (Global("torch", "UntypedStorage"), Global("torch.storage", "UntypedStorage"))
_ALLOWED = {*_REBUILD, *_UNTYPED, *(("torch", name) for name in (*_STORAGES, *DTYPES))}


class Archive(NamedTuple):
    """Where in an archive a tensor's values are, and how they are arranged.

    Args:
        at: first byte of the storage, in the archive.
        first: element of the storage at which the tensor begins.
        stride: of its dims, in elements.
        entry: of the storage.
    """

    at: int
    first: int
    stride: tuple[int, ...]
    entry: zipfile.ZipInfo


def read_archive(archive: zipfile.ZipFile, file: IO[bytes], dtype: torch.dtype, size: tuple[int, ...]) -> Archive:
    """The one tensor of an archive, which has elements.

    Raises:
        Exception: of many kinds; it is damaged, or holds another tensor than one of this dtype and size.
    """
    entries = {entry.filename.partition("/")[2]: entry for entry in check_entries(archive, file)}
    pickled, data = entries["data.pkl"], entries["data/0"]
    if pickled.file_size > _MOST_PICKLE_BYTES:
        raise ValueError(f"data.pkl has {pickled.file_size} bytes, expected {_MOST_PICKLE_BYTES} at most")
    found, first, its_size, stride = _described(read_pickle(archive.read(pickled), _ALLOWED))
    if (found, its_size) != (dtype, size):
        raise ValueError(f"it is {found} of {its_size}, expected {dtype} of {size}")
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if data.file_size < (last + 1) * dtype.itemsize:
        raise ValueError(f"it has {data.file_size} bytes, {(last + 1) * dtype.itemsize} are needed")
    return Archive(data_start(file, data), first, stride, data)


def check_entries(archive: zipfile.ZipFile, file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """All entries of a zip archive as torch writes them: not packed, one after another, each under a name of its own.

    Raises:
        ValueError: what is not so.
    """
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    names = set()
    end = 0
    for entry in entries:
        name = shown(entry.filename)
        if entry.filename in names:
            raise ValueError(f"the entry {name} is there twice")
        names.add(entry.filename)
        if ".." in entry.filename.split("/") or entry.filename.startswith(("/", "\\")):
            raise ValueError(f"the entry {name} leads out of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise ValueError(f"the entry {name} is packed or encrypted; expected plain bytes, as torch writes them")
        if entry.header_offset < end:
            raise ValueError(f"the entry {name} begins at byte {entry.header_offset}, within the one before it")
        end = data_start(file, entry) + entry.file_size
        if end > archive.start_dir:
            raise ValueError(f"the entry {name} ends at byte {end}, after the directory begins: it is cut short")
    return entries


def check_file(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The entries of a file that `torch.load(weights_only=True)` may be given, with whatever it holds.

    Raises:
        Exception: of many kinds; it is damaged, or made to do harm.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip archive, as torch.save writes; what torch.load reads can be saved again")
    archive = zipfile.ZipFile(file)
    entries = check_entries(archive, file)
    for entry in entries:
        if entry.filename.endswith("/data.pkl"):
            check_nesting(archive.read(entry))
    file.seek(0)
    return entries


def data_start(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where in an archive the bytes of an entry begin."""
    file.seek(entry.header_offset)
    name_bytes, more_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(entry.header_offset + _LOCAL_HEADER.size + name_bytes + more_bytes)


def crc_places(directory: bytes) -> Iterator[tuple[str, int]]:
    """(name, where its CRC-32 is) of each entry of a zip archive's directory."""
    at = 0
    while directory[at : at + 4] == b"PK\1\2":
        lengths = _DIRECTORY_ENTRY.unpack_from(directory, at)
        name = directory[at + _DIRECTORY_ENTRY.size :][: lengths[0]].decode()
        yield name.partition("/")[2], at + 16
        at += _DIRECTORY_ENTRY.size + sum(lengths)


def _described(value: Any) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """(dtype, first element, size, stride) of a saved tensor; raises `ValueError` for other objects."""
    if not isinstance(value, Record) or value.of not in _REBUILD or not 6 <= len(value.args) <= 8:
        raise ValueError(f"it holds {shown(value)}; expected a plain tensor")
    storage, first, size, stride, _, _, *more = value.args
    kind = _storage_kind(storage)
    if value.of == _REBUILD[1] and more:
        given, *more = more
        kind = given if kind in _UNTYPED else None
    name = None if not isinstance(kind, Global) else _STORAGES.get(kind.name, kind.name)
    if name not in DTYPES or any(more) or not is_size(first) or not (is_shape(size) and is_shape(stride)):
        raise ValueError("it holds no plain tensor of a known dtype")
    if not (isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride)):
        raise ValueError(f"it holds a tensor of size {shown(size)} with the strides {shown(stride)}")
    return DTYPES[name], first, size, stride


def _storage_kind(storage: Any) -> Any:
    """The class of the storage `data/0`; None for others."""
    given = storage.args[0] if isinstance(storage, Record) and len(storage.args) == 1 else None
    if not isinstance(given, tuple) or len(given) != 5 or given[0] != "storage" or given[2] != "0":
        return None
    return given[1]
