"""Which tensors a folder of checkpoint files holds, and where: `tensors.json`, and what torch's `.metadata` says.

[Note: tensors.json]
`.metadata`, by which torch finds its way, is a pickle. Beside it a folder of ours says the same in JSON, and that is
what is read: where the two differ, `tensors.json` is right, and torch's file is never looked into.
    {"files": [name, ..], "tensors": {key: {"size": [..], "dtype": "float32", "pieces": [piece, ..]}}}
A piece is [offset, size, number of its file, first byte, bytes].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from dmp.checkpoint.sources.named_files import check_regular, path_within
from dmp.checkpoint.sources.source import MODEL
from dmp.errors import CheckpointError
from dmp.layouts.cover import first_fault
from dmp.read_values import is_shape, is_size, shown

DTYPES: dict[str, torch.dtype] = {name: d for name, d in vars(torch).items() if isinstance(d, torch.dtype)}
"""By the names that torch gives them."""


class Piece(NamedTuple):
    """What is stored of a chunk, by its place in the whole tensor.

    Args:
        offset: its first index in the whole tensor.
        size: of its rectangle.
        file: name of the file in the folder.
        at: its first byte there.
        num_bytes: of what is stored, an archive as a rule.
        transforms: through which its bytes went when they were written; empty as a rule.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    at: int
    num_bytes: int
    transforms: tuple[str, ...] = ()


class Entry(NamedTuple):
    """A tensor, unsharded."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


Entries: TypeAlias = Mapping[str, Entry]


def check_entries(folder: Path, entries: Entries, by: str) -> None:
    """Pieces cover their tensors exactly, and lie within files of the folder that are as long.

    Args:
        by: which file says so.

    Raises:
        CheckpointError: naming the tensor and the file.
    """
    ends: dict[str, tuple[int, str]] = {}
    for key, (size, dtype, pieces) in entries.items():
        fault = first_fault([(piece.offset, piece.size) for piece in pieces], size)
        if fault:
            held = sum(prod(piece.size) for piece in pieces)
            raise CheckpointError(
                f"{folder / by}: the {len(pieces)} pieces of {key!r} hold {held} elements, {prod(size)} are expected; "
                f"{fault}"
            )
        for piece in pieces:
            needed = prod(piece.size) * dtype.itemsize
            if piece.num_bytes < needed and not piece.transforms:
                raise CheckpointError(
                    f"{folder / by}: the piece of {key!r} at {piece.offset} has {piece.num_bytes} bytes, {needed} are "
                    f"needed for {dtype} of {piece.size}"
                )
            end = piece.at + piece.num_bytes
            if end > ends.get(piece.file, (-1, ""))[0]:
                ends[piece.file] = end, key
    for name, (end, key) in ends.items():
        file = path_within(folder, name, str(folder / by))
        what = f"it holds {key.removeprefix(MODEL)!r} among others"
        try:
            found = file.stat()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise CheckpointError(f"{file} {'is missing' if missing else error}; {what}") from error
        check_regular(file, found.st_mode)
        if found.st_size < end:
            raise CheckpointError(f"{file} has {found.st_size} bytes, {end} are needed: it is cut short; {what}")


def to_json(entries: Entries) -> str:
    """As [Note: tensors.json]."""
    files: dict[str, int] = {}
    tensors = {}
    for key, (size, dtype, pieces) in entries.items():
        listed = [(p.offset, p.size, files.setdefault(p.file, len(files)), p.at, p.num_bytes) for p in pieces]
        tensors[key] = {"size": size, "dtype": str(dtype).removeprefix("torch."), "pieces": listed}
    return json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":"))


def from_json(data: Mapping[str, Any], path: Path) -> dict[str, Entry]:
    """Inverse of `to_json`.

    Args:
        data: what lies in the file, whatever it is.
        path: of the file.

    Raises:
        CheckpointError: what is wrong, and where.
    """
    files, tensors = data.get("files"), data.get("tensors")
    if not isinstance(files, list) or not isinstance(tensors, dict):
        raise CheckpointError(f'{path} holds {shown(dict(data))}; expected {{"files": [..], "tensors": {{..}}}}')
    entries = {}
    for key, given in tensors.items():
        if not isinstance(given, dict) or not isinstance(given.get("pieces"), list):
            raise CheckpointError(
                f"{path}: {key!r} is {shown(given)}; expected an object with a size, a dtype and a list of pieces"
            )
        pieces = [_piece(piece, files, f"{path}: a piece of {key!r}") for piece in given["pieces"]]
        entries[key] = make_entry(f"{path}: {key!r}", given.get("size"), given.get("dtype"), pieces)
    return entries


def make_entry(where: str, size: Any, dtype: Any, pieces: list[Piece]) -> Entry:
    """An entry of values that came from a file.

    Raises:
        CheckpointError: a size or a dtype that is none; `where` begins the message.
    """
    if not is_shape(size):
        raise CheckpointError(f"{where} has the size {shown(size)}; expected a list of integers >= 0")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the dtype {shown(dtype)}; expected the name of one of torch's, as float32")
    return Entry(tuple(size), DTYPES[dtype], pieces)


def make_piece(
    where: str, offset: Any, size: Any, file: Any, at: Any, num_bytes: Any, transforms: tuple[str, ...] = ()
) -> Piece:
    """A piece of values that came from a file.

    Raises:
        CheckpointError: a place or a size that is none; `where` begins the message.
    """
    if not (is_shape(offset) and is_shape(size)):
        raise CheckpointError(f"{where} has offset {shown(offset)} and size {shown(size)}; expected integers >= 0")
    if not (is_size(at) and is_size(num_bytes)):
        raise CheckpointError(f"{where} lies at byte {shown(at)}, {shown(num_bytes)} bytes; expected integers >= 0")
    if not isinstance(file, str):
        raise CheckpointError(f"{where} lies in {shown(file)}; expected the name of a file")
    return Piece(tuple(offset), tuple(size), file, at, num_bytes, transforms)


def _piece(piece: Any, files: list[Any], where: str) -> Piece:
    if not isinstance(piece, list) or len(piece) != 5:
        raise CheckpointError(f"{where} is {shown(piece)}; expected [offset, size, file, first byte, bytes]")
    offset, size, file, at, num_bytes = piece
    if not is_size(file) or file >= len(files):
        raise CheckpointError(f"{where} lies in file {shown(file)}; expected a number from 0 to {len(files) - 1}")
    return make_piece(where, offset, size, files[file], at, num_bytes)
