"""`Planned`: what each parameter got and where its pieces lie, as arrays, in the order of the names."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from dmp import Layout
from planner.report.offers import Floats, Integers


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where parameters lie: blocks of consecutive ranks that are loaded alike.

    Args:
        owner: (pieces,) index of the parameter.
        first: (pieces,) first rank of the block.
        size: (pieces,) ranks in it.
        seconds: (pieces,) of a step on each of these ranks.
        bytes: (pieces,) on each of them.
    """

    owner: Integers
    first: Integers
    size: Integers
    seconds: Floats
    bytes: Floats


@dataclass(frozen=True, eq=False)
class Planned:
    """What parameters got.

    Args:
        names: of the parameters, sorted.
        layouts: chosen, in their places.
        shapes: of the unsharded parameters.
        is_pinned: (parameters,) given by the user.
        busiest: (parameters, phases + 1) seconds by phase, then bytes, on the rank that it loads most.
        mean: (parameters, phases + 1) the same averaged over all ranks.
        class_of: (parameters,) its class among the offers; -1 for none.
        chosen: (parameters,) its row among the offers; -1 for none.
        cut: (parameters,) pieces into which that row's columns are cut.
        pieces: where they lie.
    """

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_pinned: NDArray[np.bool_]
    busiest: Floats
    mean: Floats
    class_of: Integers
    chosen: Integers
    cut: Integers
    pieces: Pieces

    @property
    def elements(self) -> int:
        """Of all parameters together, unsharded."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def work(self) -> Floats:
        """(parameters,) seconds of a step, summed over phases and averaged over ranks."""
        found: Floats = self.mean[:, :-1].sum(1)
        return found

    def by_work(self) -> list[int]:
        """Indices, those with the most work first; equals by name."""
        return [int(i) for i in np.argsort(-self.work, kind="stable")]
