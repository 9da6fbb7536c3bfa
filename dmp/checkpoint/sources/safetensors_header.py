"""The header of a safetensors file: which tensors it holds, and where.

It is read here rather than by the package `safetensors`, so that reading needs no more than torch and an error can name
the parameter. What the package refuses is refused, and two things more: a name that is there twice, of which it takes
the last, and an entry that is no JSON object.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import IO, Any

import torch

from dmp.checkpoint.sources.stored_piece import StoredPiece
from dmp.errors import CheckpointError
from dmp.read_values import parse_json, shown

_MOST_BYTES = 100_000_000
_MOST_DEPTH = 127
_LENGTH_BYTES = 8
_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32"},
    **{"U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2"},
}
DTYPES: dict[str, torch.dtype] = {name: d for name, of in _NAMES.items() if (d := getattr(torch, of, None)) is not None}
"""By the format's names."""


def read_header(file: IO[bytes], num_bytes: int, where: Path) -> dict[str, StoredPiece]:
    """The tensors that a safetensors file holds, each in one piece.

    Args:
        file: at the beginning of one, which is anywhere in a folder of torch's.
        num_bytes: of all of it.
        where: it lies.

    Raises:
        CheckpointError: what is wrong.
    """
    start = file.tell()
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > num_bytes - _LENGTH_BYTES:
        raise CheckpointError(f"{where} has {num_bytes} bytes and no whole header: it is cut short")
    if length > _MOST_BYTES:
        raise CheckpointError(f"{where} has a header of {length} bytes; expected {_MOST_BYTES} at most")
    try:
        header = parse_json(file.read(length), parse_int=_integer)
        _check_values(header)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be read as a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} cannot be read as a safetensors file: its header is {shown(header)}")
    about = header.pop("__metadata__", None)
    if about is not None and not (isinstance(about, dict) and all(isinstance(text, str) for text in about.values())):
        raise CheckpointError(f"{where} has the __metadata__ {shown(about)}; expected texts by name")
    begins = _LENGTH_BYTES + length
    ends = {name: _entry(f"{where}: {shown(name)}", entry) for name, entry in header.items()}
    at = 0
    for name, (_, _, first, last) in sorted(ends.items(), key=lambda item: item[1][2:]):
        if first != at:
            problem = "begins before the one before it ends" if first < at else "leaves a hole before it"
            raise CheckpointError(f"{where}: {shown(name)} {problem}: it begins at byte {first}, expected {at}")
        at = last
        if begins + last > num_bytes:
            raise CheckpointError(
                f"{where} has {num_bytes} bytes, {shown(name)} ends at {begins + last}: it is cut short"
            )
    if begins + at != num_bytes:
        raise CheckpointError(f"{where} has {num_bytes} bytes, of which its header names {begins + at}")
    return {
        name: StoredPiece(where, start + begins + first, dtype, size, (0,) * len(size))
        for name, (dtype, size, first, _) in ends.items()
    }


def _entry(where: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """(dtype, size, first byte, byte after the last)."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} is {shown(entry)}; expected an object with dtype, shape and data_offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"{where} has dtype {shown(name)}; expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise CheckpointError(f"{where} has the shape {shown(shape)}; expected a list of integers >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise CheckpointError(f"{where} has the data_offsets {shown(offsets)}; expected two integers >= 0")
    is_countable = all(count < 1 << 61 for count in accumulate(shape, mul))
    if name == "F4":  # two to a byte
        if not shape or shape[-1] % 2:
            raise CheckpointError(
                f"{where} has the shape {shown(shape)}; expected an even last dim, as {name} needs it"
            )
        shape = [*shape[:-1], shape[-1] // 2]
    dtype, (first, last) = DTYPES[name], offsets
    needed = prod(shape) * dtype.itemsize
    if not is_countable or last - first != needed:
        raise CheckpointError(f"{where} has {shown(last - first)} bytes, which is not {name} of {shown(tuple(shape))}")
    return dtype, tuple(shape), first, last


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _check_values(header: Any) -> None:
    """Whatever it holds beside what is read: neither too deep, nor a number or a text that cannot be."""
    level: list[Any] = [[header]]
    for _ in range(_MOST_DEPTH + 1):
        values = [value for held in level for value in (held if isinstance(held, list) else [*held, *held.values()])]
        for value in values:
            if isinstance(value, str):
                value.encode()  # half a pair of surrogates: UnicodeEncodeError, a ValueError
            elif isinstance(value, (int, float)) and abs(value) >= 1 << 1024:
                raise ValueError("a number out of range")
        level = [value for value in values if isinstance(value, (list, dict))]
        if not level:
            return
    raise ValueError("it is nested too deeply")
