"""What a lookup reads, as it came: ids, and which belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Segments = Sequence[tuple[int, int]]
"""(index of a row range, number of ids), in the order of the ids."""


class Bags(NamedTuple):
    """Of pooled lookups in S row ranges: B bags of each.

    Args:
        ids: (N,) int32 or int64, range by range and counted from the range's first row.
        offsets: (S * B + 1,) of the bags.
        weights: (N,) of the ids; None where each counts once.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None


class Segmented(NamedTuple):
    """Of unpooled lookups.

    Args:
        ids: (N,) int32 or int64, counted from the first row of their segment's range.
        segments: in any order of ranges, all of one width.
        bags: (n + 1,) bounds of runs of ids that lie in one segment each: sums over them take the place of rows; none
            is empty.
        weights: (N,) of the ids, with bags alone.
    """

    ids: Tensor
    segments: Segments
    bags: Tensor | None = None
    weights: Tensor | None = None


class Sources(NamedTuple):
    """Samples of several ranks whose gradients do not lie one behind the other, but those of each rank do.

    Args:
        samples: of each, in the order of the bags.
        starts: of each the first element, from that of the matrix of gradients on.
        stride: elements from one sample's to the next.
    """

    samples: tuple[int, ...]
    starts: tuple[int, ...]
    stride: int


class Given(NamedTuple):
    """Gradients of the last samples where a model's backward has left them, in place of the last rows of others.

    Args:
        matrix: (samples, any), of the bank's dtype, each row in one piece.
        columns: of each range the first.
        factor: multiplies them.
    """

    matrix: Tensor
    columns: tuple[int, ...]
    factor: float
