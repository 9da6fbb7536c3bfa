"""`StoredPiece`: a piece in a file, read into any other rectangle of the tensor, and no more of it than that."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch

from dmp import CheckpointError
from dmp.checkpoint.sources.stored_piece import StoredPiece

BEFORE = 13  # bytes in the file ahead of the piece


def store(path: Path, values: torch.Tensor, offset: tuple[int, ...] = ()) -> StoredPiece:
    data = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(b"x" * BEFORE + data + b"y" * 5)
    return StoredPiece(path, BEFORE, values.dtype, tuple(values.shape), offset or (0,) * values.dim(), zlib.crc32(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_what_they_share_and_nothing_else(dims: int, dtype: torch.dtype, tmp_path: Path) -> None:
    rng = random.Random(dims)
    size = [rng.randint(4, 9) for _ in range(dims)]
    whole = (torch.rand(size) * 100).to(dtype)

    def rectangle() -> tuple[slice, ...]:
        starts = [rng.randrange(n) for n in size]
        return tuple(slice(a, rng.randint(a + 1, n)) for a, n in zip(starts, size, strict=True))

    for _ in range(60):
        stored, held = rectangle(), rectangle()
        source = store(tmp_path / "values", whole[stored], tuple(s.start for s in stored))
        filled = torch.zeros(size, dtype=dtype)  # a view of something larger, as a chunk of a parameter often is
        source.fill(filled[held], tuple(s.start for s in held))
        expected = torch.zeros(size, dtype=dtype)
        both = tuple(
            slice(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
            for a, b in zip(stored, held, strict=True)
        )
        expected[both] = whole[both]
        assert torch.equal(filled, expected)


def test_other_dtypes_are_converted(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4)
    target = torch.zeros(3, 4, dtype=torch.float64)
    store(tmp_path / "values", values).fill(target, (0, 0))
    assert torch.equal(target, values.double())


@pytest.mark.parametrize("bit", [0, 8 * 11 + 3, 8 * 4 * 5999 + 31])
def test_a_flipped_bit_and_a_cut_are_named(bit: int, tmp_path: Path) -> None:
    source = store(tmp_path / "values", torch.randn(6000))
    source.check("w")
    data = bytearray(source.file.read_bytes())
    data[BEFORE + bit // 8] ^= 1 << bit % 8
    source.file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"values is damaged: the bytes of 'w'"):
        source.check("w")
    source.file.write_bytes(data[: BEFORE + 100])
    with pytest.raises(CheckpointError, match=r"values ends before byte \d+: it is cut short"):
        source.check("w")
    for target in (torch.zeros(6000), torch.zeros(6000, dtype=torch.float64)):  # read into place, and out of a mapping
        with pytest.raises(CheckpointError, match=r"values ends before byte \d+: it is cut short"):
            source.fill(target, (0,))
