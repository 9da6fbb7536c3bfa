"""`Offers`: what each class of parameters was offered, as arrays: words are made when somebody asks.

Parameters that are alike (shape, features, optimizer, constraint) are one *class* and share their offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Offers:
    """Options of classes of parameters, a row each.

    Args:
        starts: (classes + 1,) first row of each class.
        labels: what a row is, in words: `column_wise, 4 pieces`.
        label_of: (rows,) index into `labels`.
        busiest: (rows, phases + 1) seconds by phase, then bytes, of the rank it loads most.
        mean: (rows, phases + 1) the same averaged over all ranks.
        objections: row -> why it may not be chosen.
    """

    starts: Integers
    labels: tuple[str, ...]
    label_of: Integers
    busiest: Floats
    mean: Floats
    objections: Mapping[int, str]

    @classmethod
    def none(cls, num_phases: int) -> Offers:
        """Of no class."""
        empty = np.zeros((0, num_phases + 1), np.float32)
        return cls(np.zeros(1, np.int32), (), np.zeros(0, np.int32), empty, empty, {})

    def rows(self, of_class: int) -> range:
        """Rows of a class; none for -1, the class of what was offered nothing."""
        return range(0) if of_class < 0 else range(int(self.starts[of_class]), int(self.starts[of_class + 1]))

    def label(self, row: int) -> str:
        """What a row is, in words."""
        return str(self.labels[int(self.label_of[row])])
