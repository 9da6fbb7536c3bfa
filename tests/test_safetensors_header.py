"""Our reader of safetensors headers against the library's: what that refuses is refused, what it reads is the same."""

from __future__ import annotations

import json
import random
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dmp import CheckpointError, load_checkpoint
from dmp.checkpoint.sources.safetensors import SafetensorsSource
from dmp.chunked import as_chunks
from dmp.read_values import parse_json
from tests import spoiled

ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor(7),
    "c": torch.empty(0, 4),
    "d": torch.arange(3),
}


def theirs(path: Path) -> dict[str, torch.Tensor] | str:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except Exception as error:
        return str(error).splitlines()[0]


def ours(path: Path) -> dict[str, torch.Tensor] | str:
    try:
        source = SafetensorsSource(path)
    except CheckpointError as error:
        return str(error)
    read: dict[str, torch.Tensor] = {}
    for key, (size, dtype) in source.shapes.items():
        read[key.removeprefix("model.")] = target = torch.empty(prod(size), dtype=dtype).reshape(size)
        if target.numel():
            source.read({key: as_chunks(target)})
    return read


def agree(path: Path, said: str) -> bool:
    """Whether both read it; they must not differ in that, nor in values."""
    mine, other = ours(path), theirs(path)
    assert isinstance(mine, str) == isinstance(other, str), f"{said}: {str(mine)[:200]} | {str(other)[:200]}"
    if isinstance(mine, str) or isinstance(other, str):
        return False
    assert mine.keys() == other.keys(), said
    for name, value in other.items():
        assert (mine[name].dtype, mine[name].shape) == (value.dtype, value.shape), said
        assert mine[name].view(-1).view(torch.uint8).tolist() == value.view(-1).view(torch.uint8).tolist(), said
    return True


def entry(**changes: Any) -> str:
    return json.dumps({"a": {**json.loads(ENTRY), **changes}})


HEADERS: dict[str, tuple[str, int]] = {
    "good": (f'{{"a":{ENTRY}}}', 8),
    "spaces": (f' {{"a":{ENTRY}}}\n  ', 8),
    "more after it": (f'{{"a":{ENTRY}}}x', 8),
    "a byte more": (f'{{"a":{ENTRY}}}', 9),
    "a byte less": (f'{{"a":{ENTRY}}}', 7),
    "nothing": ("", 0),
    "empty": ("{}", 0),
    "empty with data": ("{}", 1),
    "a list": ("[]", 0),
    "null": ("null", 0),
    "metadata null": (f'{{"__metadata__":null,"a":{ENTRY}}}', 8),
    "metadata of numbers": (f'{{"__metadata__":{{"x":1}},"a":{ENTRY}}}', 8),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{ENTRY}}}', 8),
    "metadata a list": (f'{{"__metadata__":[],"a":{ENTRY}}}', 8),
    "more fields": (entry(x=[1, {"y": None}]), 8),
    "a field twice": ('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
    "no offsets": ('{"a":{"dtype":"F32","shape":[2]}}', 8),
    "an entry null": ('{"a":null}', 0),
    "three offsets": (entry(data_offsets=[0, 8, 8]), 8),
    "one offset": (entry(data_offsets=[8]), 8),
    "negative offset": (entry(data_offsets=[-8, 0]), 8),
    "reversed offsets": (entry(data_offsets=[8, 0]), 8),
    "minus zero": (entry().replace("[0, 8]", "[-0, 8]"), 8),
    "float offset": (entry(data_offsets=[0.0, 8]), 8),
    "float shape": (entry(shape=[2.0]), 8),
    "exponent": (entry().replace("[2]", "[2e0]"), 8),
    "bool shape": (entry(shape=[True], data_offsets=[0, 4]), 4),
    "text shape": (entry(shape=["2"]), 8),
    "no shape": (entry(shape=None), 8),
    "an object as shape": (entry(shape={}), 4),
    "scalar": (entry(shape=[], data_offsets=[0, 4]), 4),
    "unknown dtype": (entry(dtype="f32"), 8),
    "dtype null": (entry(dtype=None), 8),
    "dtype a number": (entry(dtype=1), 8),
    "half a surrogate": (f'{{"\\ud800":{ENTRY}}}', 8),
    "both surrogates": (f'{{"\\ud83d\\ude00":{ENTRY}}}', 8),
    "half a surrogate elsewhere": (entry(x="Y").replace("Y", "\\ud800"), 8),
    "a control character": (f'{{"a\x01":{ENTRY}}}', 8),
    "no name": (f'{{"":{ENTRY}}}', 8),
    "a byte order mark": (f'\ufeff{{"a":{ENTRY}}}', 8),
    "NaN": (entry(x="Y").replace('"Y"', "NaN"), 8),
    "infinity": (entry(x="Y").replace('"Y"', "1e999"), 8),
    "a number of 400 digits": (entry(x="Y").replace('"Y"', "9" * 400), 8),
    "a number of 5000 digits": (entry(x="Y").replace('"Y"', "9" * 5000), 8),
    "124 deep": (entry(x="Y").replace('"Y"', "[" * 124 + "]" * 124), 8),
    "125 deep": (entry(x="Y").replace('"Y"', "[" * 125 + "]" * 125), 8),
    "126 deep": (entry(x="Y").replace('"Y"', "[" * 126 + "]" * 126), 8),
    "without end": ("[" * 200_000, 8),
    "a hole": (entry(shape=[1], data_offsets=[4, 8]), 8),
    "an overlap": (f'{{"a":{ENTRY},"b":{{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}}}', 8),
    "the same bytes": (f'{{"a":{ENTRY},"b":{ENTRY}}}', 8),
    "none at the end": (f'{{"a":{ENTRY},"b":{{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}}}', 8),
    "none inside": (f'{{"a":{ENTRY},"b":{{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}}}', 8),
    "too many": (entry(shape=[2**32, 2**32], data_offsets=[0, 0]), 0),
    "too many and none": (entry(shape=[2**32, 2**32, 0], data_offsets=[0, 0]), 0),
    "none and too many": (entry(shape=[0, 2**32, 2**32], data_offsets=[0, 0]), 0),
    "too many bits": (entry(shape=[2**61], data_offsets=[0, 0]), 0),
    "2**63": (entry(shape=[2**63, 0], data_offsets=[0, 0]), 0),
    "2**64": (entry(shape=[2**64, 0], data_offsets=[0, 0]), 0),
    "too large an offset": (entry(data_offsets=[0, 2**64]), 8),
    "4 bits": (entry(dtype="F4", shape=[2, 4], data_offsets=[0, 4]), 4),
    "4 bits, odd": (entry(dtype="F4", shape=[3], data_offsets=[0, 1]), 1),
    "6 bits": (entry(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3]), 3),
    **{
        dtype: (entry(dtype=dtype, data_offsets=[0, num_bytes]), num_bytes)
        for dtype, num_bytes in {
            **{"BOOL": 2, "U8": 2, "I8": 2, "U16": 4, "I16": 4, "U32": 8, "I32": 8, "U64": 16, "I64": 16, "F16": 4},
            **{"BF16": 4, "F64": 16, "C64": 16, "F8_E4M3": 2, "F8_E5M2": 2, "F8_E8M0": 2, "F8_E4M3FNUZ": 2},
            **{"F8_E5M2FNUZ": 2},
        }.items()
    },
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header(name: str, tmp_path: Path) -> None:
    header, num_bytes = HEADERS[name]
    spoiled.write_header(tmp_path / "x.safetensors", header.encode(), bytes(num_bytes))
    agree(tmp_path / "x.safetensors", name)


@pytest.mark.parametrize("length", [0, 1, 54, 100_000_000, 100_000_001, 2**63, 2**64 - 1])
def test_a_length(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + f'{{"a":{ENTRY}}}'.encode() + bytes(8))
    agree(path, str(length))
    path.write_bytes(path.read_bytes()[:5])
    assert not agree(path, "5 bytes")


def test_a_header_of_two_gigabytes(tmp_path: Path) -> None:
    """Which is not read: the file is a hole."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((2**31).to_bytes(8, "little"))
        file.truncate(2**31 + 100)
    with pytest.raises(CheckpointError, match="header of 2147483648 bytes; expected 100000000 at most"):
        load_checkpoint(path, torch.nn.Linear(1, 1))


def test_stricter_than_the_library(tmp_path: Path) -> None:
    for header in (f'{{"a":{ENTRY},"a":{ENTRY}}}', '{"a":["F32",[2],[0,8]]}', entry(dtype={"F32": None})):
        spoiled.write_header(tmp_path / "x.safetensors", header.encode(), bytes(8))
        assert isinstance(theirs(tmp_path / "x.safetensors"), dict)
        assert isinstance(ours(tmp_path / "x.safetensors"), str)


def test_mutations(tmp_path: Path) -> None:
    rng, path, read = random.Random(0), tmp_path / "x.safetensors", 0
    for i in range(400):
        header, data = spoiled.header_of(TENSORS)
        said = spoiled.change_json(header, rng)
        spoiled.write_header(path, header, data)
        if i % 4 == 0:
            raw = bytearray(path.read_bytes())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
        if not _is_stricter(path):
            read += agree(path, f"{i}: {said}")
    assert read > 5


def _is_stricter(path: Path) -> bool:
    """One of the two things that we refuse beside the library."""
    said = ours(path)
    return isinstance(said, str) and (
        " is there twice" in said or ("expected an object with dtype" in said and "is [" in said)
    )


def test_a_key_that_is_there_twice_is_found_at_once() -> None:
    """However many there are: each was once compared with all before it."""
    keys = [*(f'"{i}":0' for i in range(60_000)), '"59999":0']
    began = time.process_time()
    with pytest.raises(ValueError, match="'59999' is there twice"):
        parse_json("{" + ",".join(keys) + "}")
    assert time.process_time() - began < 5
