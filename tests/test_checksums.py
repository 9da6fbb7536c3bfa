"""CRC-32 joined from ranges is that of the whole."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch

from dmp import CheckpointError
from dmp.checkpoint.sources.checksums import CheckedRange, compare, joined
from dmp.checkpoint.sources.stored_piece import StoredPiece


@pytest.mark.parametrize("cut", [0, 1, 7, 4096, 99_999, 100_000])
def test_joined(cut: int) -> None:
    data = random.Random(cut).randbytes(100_000)
    assert joined(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)


def test_parts_of_several_ranks(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1000)
    file = tmp_path / "file"
    file.write_bytes(data)
    pieces = [
        StoredPiece(file, at, torch.uint8, (n,), (0,), zlib.crc32(data[at : at + n]))
        for at, n in ((0, 300), (300, 700))
    ]

    def ranges() -> list[CheckedRange]:
        cuts = {0: [0, 11, 300], 1: [0, 1, 2, 699, 700]}
        return [
            CheckedRange(r, f"t{i}", a, b - a, r.crc_of(a, b - a))
            for i, r in enumerate(pieces)
            for a, b in zip(cuts[i], cuts[i][1:], strict=False)
        ][::-1]

    compare(ranges())
    file.write_bytes(data[:500] + bytes([data[500] ^ 4]) + data[501:])
    with pytest.raises(CheckpointError, match=r"file is damaged: the bytes of 't1' from 300 on"):
        compare(ranges())
