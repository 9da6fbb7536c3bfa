"""`RankGroup`: ranks that are loaded alike, so that eight ranks and four thousand are read in a few lines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.report.figures import Figures

_EQUAL = (1e-6, 0.01, 0.03)
"""Ranks are one group when all their figures are within one of these parts of the largest; the first that suffices."""


class RankGroup(NamedTuple):
    """Ranks that are loaded alike, or within one band of load.

    Args:
        ranks: which, ascending.
        seconds: (phases,) mean over them.
        least, most: seconds of the idlest and of the busiest.
        least_bytes, most_bytes: of the emptiest and of the fullest.
    """

    ranks: NDArray[np.int64]
    seconds: NDArray[np.float64]
    least: float
    most: float
    least_bytes: int
    most_bytes: int


def rank_groups(figures: Figures, limit: int) -> list[RankGroup]:
    """All ranks, in at most `limit` groups: equal ones, else bands of load; the busiest group first."""
    loads = np.column_stack([figures.rank_seconds, figures.rank_bytes.astype(np.float64)])
    largest = np.maximum(loads.max(0, initial=0), 1e-300)
    for tolerance in _EQUAL:
        keys = np.round(loads / largest / tolerance).astype(np.int64)
        _, group_of = np.unique(keys, axis=0, return_inverse=True)
        if group_of.max(initial=0) < limit:
            break
    else:
        total = loads[:, :-1].sum(1) if loads[:, :-1].any() else loads[:, -1]
        width = (total.max() - total.min()) / limit
        group_of = np.minimum((total - total.min()) / max(width, 1e-300), limit - 1).astype(np.int64)
    groups = [_group(figures, np.flatnonzero(group_of.ravel() == g)) for g in np.unique(group_of)]
    return sorted(groups, key=lambda g: (-g.most, -g.most_bytes, int(g.ranks[0])))


def _group(figures: Figures, ranks: NDArray[np.int64]) -> RankGroup:
    seconds, sizes = figures.rank_seconds[ranks], figures.rank_bytes[ranks]
    total = seconds.sum(1)
    return RankGroup(ranks, seconds.mean(0), float(total.min()), float(total.max()), int(sizes.min()), int(sizes.max()))
