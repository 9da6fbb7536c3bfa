"""`RowCurve`: which share of a table's ids names a row below r, as a curve of some points.

Between points rows are taken as equally likely. A row that alone has a noticeable share has two points, before and
after it, so that its share is exact; others lie in stretches of equal shares, long enough that chance does not pass for
skew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_STRETCHES = 64
_IDS_OF_A_STRETCH = 256
_HOT = 4.0  # a row with 1 / 4 of a stretch's share is one that has a share of its own


@dataclass(frozen=True)
class RowCurve:
    """Points of the curve; see above.

    Args:
        rows: ascending.
        shares: of the ids that name a row below each of them, from 0 to 1.
    """

    rows: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> RowCurve | None:
        """The curve of these ids; None of fewer than tell anything."""
        stretches = min(_STRETCHES, len(ids) // _IDS_OF_A_STRETCH)
        if stretches < 2:
            return None
        ordered = np.sort(ids)
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        found, counts = ordered[first], np.diff(first, append=len(ids))
        hot = found[counts * _HOT * stretches >= len(ids)]
        cuts = ordered[np.arange(1, stretches) * len(ids) // stretches]
        rows = np.unique(np.concatenate([hot, hot + 1, cuts, [found[0], found[-1] + 1]]))
        shares = np.searchsorted(ordered, rows) / len(ids)
        return cls(tuple(rows.tolist()), tuple(np.round(shares, 6).tolist()))

    @classmethod
    def mixed(cls, curves: Sequence[RowCurve], weights: Sequence[float]) -> RowCurve:
        """The curve of ids of which each has its part by weight."""
        if len(curves) == 1:
            return curves[0]
        rows = np.unique(np.concatenate([curve.rows for curve in curves]))
        parts = [w * np.interp(rows, c.rows, c.shares) for c, w in zip(curves, weights, strict=True)]
        shares = np.sum(parts, axis=0) / sum(weights)
        return cls(tuple(rows.tolist()), tuple(np.round(shares, 6).tolist()))

    def below(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """(n,) share of the ids that name a row below each of these (n,)."""
        found: NDArray[np.float64] = np.interp(rows, *self._points)
        return found

    @cached_property
    def _points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array(self.rows, dtype=np.float64), np.array(self.shares)

    def share(self, start: int, stop: int) -> float:
        """Of the ids that name rows start .. stop - 1."""
        first, last = self.below(np.array([start, stop]))
        return float(last - first)
