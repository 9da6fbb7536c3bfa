"""Distinct rows of a step: from how many batches have, and how these grow where several ranks' batches come together.

Where few rows have most of the ids, far fewer rows are read and updated than ids would name that are spread evenly. How
the number grows with the ids is a power of them over a wide range (a law of words in texts), and is measured as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, log

import numpy as np
from numpy.typing import NDArray

_ALL_NEW = 0.999
"""Of the ids: where more name a row of their own, nothing is known of how many rows there are."""
_HALVINGS = 60


def num_distinct(ids: NDArray[np.int64]) -> int:
    """Different ones among them; several times as fast as `np.unique`, which hashes."""
    ordered = np.sort(ids)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + min(1, len(ordered))


def growth_of(batches: Sequence[NDArray[np.int64]]) -> float:
    """Power of their number with which the distinct ids of batches grow: 0 where all have the same, 1 where none.

    Of a single batch it is that of its halves.
    """
    filled = [ids for ids in batches if len(ids)]
    if len(filled) == 1:
        filled = [half for half in np.array_split(filled[0], 2) if len(half)]
    if len(filled) < 2:
        return 1.0
    found = [num_distinct(ids) for ids in filled]
    together = num_distinct(np.concatenate(filled))
    return min(1.0, max(0.0, log(together * len(found) / sum(found)) / log(len(found))))


def equally_likely(distinct: float, ids: float) -> float:
    """So many rows that so many ids, each of any of them, name as many distinct ones; 0 where that cannot be told."""
    if not 0 < distinct < _ALL_NEW * ids:
        return 0.0
    low, high = 0.0, 2 / (1 - _ALL_NEW)  # ids for each row
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if -expm1(-middle) * ids > distinct * middle else (low, middle)
    return ids / high
