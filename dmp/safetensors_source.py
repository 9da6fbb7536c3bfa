"""A safetensors file, or a Hugging Face folder of them, as a checkpoint's source.

The header is read here rather than by the package `safetensors`, so that reading needs no more than torch, an error can
name the parameter, and rows are read as those of torch's own folders are.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import torch

from dmp.checksums import Checked
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.sources import MODEL
from dmp.stored import Stored, fill

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SafetensorsSource:
    """Weights alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        index = path / INDEX
        if path.is_dir() and not (path / ONE_FILE).exists():
            self._stored = _read_index(index)
        else:
            self._stored = _read_header(path / ONE_FILE if path.is_dir() else path)
        self.shapes = {MODEL + name: (s.size, s.dtype) for name, s in self._stored.items()}

    def check(self, keys: Collection[str], part: tuple[int, int]) -> list[Checked]:
        """Nothing: the format has no checksums."""
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            fill(target, [self._stored[key.removeprefix(MODEL)]])


def _read_index(index: Path) -> dict[str, Stored]:
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of safetensors files: {error}") from error
    files: dict[str, dict[str, Stored]] = {}
    for name, file in places.items():
        if file not in files:
            if not (index.parent / file).is_file():
                raise CheckpointError(f"{index.parent / file} is missing; {index.name} says that it holds {name!r}")
            files[file] = _read_header(index.parent / file)
        if name not in files[file]:
            raise CheckpointError(f"{index.parent / file} does not hold {name!r}, as {index.name} says")
    return {name: files[file][name] for name, file in places.items()}


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            num_bytes = path.stat().st_size
            if header_bytes > num_bytes - 8:
                raise CheckpointError(f"{path} has {num_bytes} bytes and no whole header: it is cut short")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        entries = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    stored = {}
    for name, (dtype, size, first, last) in entries.items():
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name!r} has dtype {dtype}; expected one of {', '.join(_DTYPES)}")
        if last - first != prod(size) * _DTYPES[dtype].itemsize:
            raise CheckpointError(f"{path}: {name!r} has {last - first} bytes, which is not {dtype} of {size}")
        at, end = 8 + header_bytes + first, 8 + header_bytes + last
        if end > num_bytes:
            raise CheckpointError(f"{path} has {num_bytes} bytes, {name!r} ends at {end}: it is cut short")
        stored[name] = Stored(path, at, _DTYPES[dtype], size, (0,) * len(size))
    return stored
