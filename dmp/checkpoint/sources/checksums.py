"""CRC-32 of one stored piece, computed by several ranks, each on a range of its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from dmp.checkpoint.sources.stored_piece import StoredPiece

_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits in reverse, as its remainders are


class CheckedRange(NamedTuple):
    """What one rank has found.

    Args:
        stored: the piece.
        name: of its tensor.
        start: the first byte of the range, in the piece.
        num_bytes: of the range.
        crc: its CRC-32.
    """

    stored: StoredPiece
    name: str
    start: int
    num_bytes: int
    crc: int


def compare(ranges: Iterable[CheckedRange]) -> None:
    """Join ranges that cover pieces, in any order, and compare.

    Raises:
        CheckpointError: naming the file and the tensor that is damaged.
    """
    in_order = sorted(ranges, key=lambda one: (str(one.stored.file), one.stored.at, one.start))
    for (stored, name), of_one in groupby(in_order, key=lambda one: (one.stored, one.name)):
        crc = 0
        for one in of_one:
            crc = joined(crc, one.crc, one.num_bytes) if one.start else one.crc
        stored.compare(crc, name)


def joined(first: int, second: int, num_bytes: int) -> int:
    """CRC-32 of two runs of bytes one after the other, of which the second has so many.

    To append n zeros to the first multiplies its remainder by x^(8n), modulo the polynomial.
    """
    power, square, left = 1 << 31, 1 << 30, 8 * num_bytes  # 1 and x
    while left:
        if left & 1:
            power = _times(power, square)
        square, left = _times(square, square), left >> 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
