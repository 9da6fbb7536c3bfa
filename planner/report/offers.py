"""`Offers`: what each class of parameters was offered, as arrays: words are made when somebody asks.

Parameters that are alike (shape, features, optimizer, constraint) are one *class* and share their offers. An offer is a
family of layouts: those that differ in where they lie alone, and those whose columns may be cut into more pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


class Options(NamedTuple):
    """Offers at some numbers of pieces, a row each.

    Args:
        row: of the offer.
        pieces: into which columns are cut.
        busiest: (options, phases + 1) seconds by phase, then bytes, of the rank that it loads most.
        mean: (options, phases + 1) the same averaged over all ranks.
    """

    row: NDArray[np.int64]
    pieces: NDArray[np.int64]
    busiest: NDArray[np.float64]
    mean: NDArray[np.float64]

    def of(self, chosen: slice | NDArray[np.int64]) -> Options:
        """Some of them."""
        return Options(self.row[chosen], self.pieces[chosen], self.busiest[chosen], self.mean[chosen])

    @staticmethod
    def joined(several: Sequence[Options]) -> Options:
        """All of several, at least one, in order."""
        row, pieces, busiest, mean = zip(*several, strict=True)
        return Options(np.concatenate(row), np.concatenate(pieces), np.concatenate(busiest), np.concatenate(mean))


@dataclass(frozen=True, eq=False)
class Offers:
    """Families offered to classes of parameters, a row each.

    Args:
        starts: (classes + 1,) first row of each class.
        labels: what a row is, in words: `row_wise over 8 ranks`.
        label_of: (rows,) index into `labels`.
        busiest: (rows, phases + 1) seconds by phase, then bytes, of the rank it loads most, columns whole.
        mean: (rows, phases + 1) the same averaged over all ranks.
        by_width: (rows, phases + 1) the part of `busiest` that goes with a piece's columns.
        by_piece: (rows, phases + 1) what each piece besides the first adds to `mean`.
        units: (rows,) widths of a piece are multiples of 1 / units; 1 where columns stay whole.
        most_pieces: (rows,) into which columns may be cut.
        objections: row -> why it may not be chosen.
    """

    starts: Integers
    labels: tuple[str, ...]
    label_of: Integers
    busiest: Floats
    mean: Floats
    by_width: Floats
    by_piece: Floats
    units: Integers
    most_pieces: Integers
    objections: Mapping[int, str]

    @classmethod
    def none(cls, num_phases: int) -> Offers:
        """Of no class."""
        empty, no_rows = np.zeros((0, num_phases + 1), np.float32), np.zeros(0, np.int32)
        return cls(np.zeros(1, np.int32), (), no_rows, empty, empty, empty, empty, no_rows, no_rows, {})

    def options(self, of_class: int) -> Options:
        """What a class could have got: each family whole, in 2, 4, 8, ... pieces and in as many as may be.

        Args:
            of_class: -1 is the class of what was offered nothing.
        """
        start, stop = (0, 0) if of_class < 0 else self.starts[of_class : of_class + 2].tolist()
        cuts = [(row, p) for row in range(start, stop) for p in _numbers(int(self.most_pieces[row]))]
        row, pieces = np.array(cuts, dtype=np.int64).reshape(-1, 2).T
        width = -(-self.units[row] // pieces) / self.units[row]
        busiest = self.busiest[row] - self.by_width[row] * (1 - width)[:, None]
        mean = self.mean[row] + self.by_piece[row] * (pieces - 1)[:, None]
        return Options(row, pieces, busiest.astype(np.float64), mean.astype(np.float64))

    def label(self, row: int, pieces: int = 1) -> str:
        """What an option is, in words."""
        return str(self.labels[int(self.label_of[row])]) + f", {pieces} column pieces" * (pieces > 1)


def _numbers(most: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    found = [1 << power for power in range(max(1, most).bit_length())]
    return found if found[-1] == most else [*found, most]
