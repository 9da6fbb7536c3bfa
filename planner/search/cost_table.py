"""`CostTable`: what every option of every class of items costs, a row each, as arrays. Pure, as `planner.search`.

[Note: families]
A row is a *family*: ways to place an item that differ only in where it is cut, and where the pieces go. Each *piece*
goes onto a block of `size` consecutive ranks of its own (block b is ranks b * size .. b * size + size - 1; one that
is as large as the machine stays). With `units` = 0 the family has `pieces` equal pieces. With `units` > 0 an item is
divisible: it is cut into any number of pieces of whole units, each of at least `least`, that sum to `units` (columns
of a table, say, four at a time). A piece of u units puts `fixed + u * slope` on every rank of its block.

A phase whose `span` is above 1 is one that so many consecutive ranks share (the network card of a host, say): every
piece of at most `span` ranks puts its load there once, a larger one once on each such group of ranks that it covers.

[Note: last ranks] What is cut evenly over a block may leave less for the block's last rank: a piece of u units puts
`lack + u * lack_slope` less there; in a phase that ranks share, on the last of the groups of ranks that it covers, if
there are several.

[Note: filled blocks] What is cut over three ranks takes a block of four, for blocks are where their size divides: only
the first `filled` ranks of a block get anything, and the last of these is the last rank of the note above. In a phase
that ranks share it is all ranks of their groups that feel it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CostTable:
    """Families of classes of items, see [Note: families].

    Args:
        owner: (rows,) class of each family, ascending from 0.
        size: (rows,) ranks in a block.
        pieces: (rows,) of a family that is not divisible; else 1.
        units: (rows,) of the whole item; 0 where it is not divisible.
        least: (rows,) units of a piece at least.
        fixed: (rows, phases + 1) seconds by phase, then bytes, on every rank of a piece whatever its width.
        slope: (rows, phases + 1) for each unit of it besides.
        everywhere: (rows, phases + 1) on every rank, once, wherever and however it is cut.
        kinds: (rows,) set-ups needed, a bit each.
        ragged: of families whose ranks differ: row -> (pieces, size, phases + 1); `fixed` is its maximum then.
        lack, lack_slope: (rows, phases + 1) see [Note: last ranks]; of no rows where none lacks anything.
        filled: (rows,) see [Note: filled blocks]; of no rows where all are.
    """

    owner: Integers
    size: Integers
    pieces: Integers
    units: Integers
    least: Integers
    fixed: Array
    slope: Array
    everywhere: Array
    kinds: Integers
    ragged: Mapping[int, Array] = field(default_factory=dict)
    lack: Array = field(default_factory=lambda: np.zeros((0, 0)))
    lack_slope: Array = field(default_factory=lambda: np.zeros((0, 0)))
    filled: Integers = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not len(self.filled):
            object.__setattr__(self, "filled", self.size)
        for name in ("lack", "lack_slope"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros_like(self.fixed))

    @cached_property
    def lacking(self) -> NDArray[np.bool_]:
        """(rows,) whether the last rank of a block gets less."""
        return np.asarray(self.lack.any(1) | self.lack_slope.any(1), dtype=np.bool_)

    @cached_property
    def whole(self) -> Array:
        """(rows, phases + 1) what a rank of a piece has at most, were there only one."""
        units = self.units[:, None].astype(np.float64)
        found: Array = np.maximum(self.fixed, 0) + units * np.maximum(self.slope, 0)
        found -= np.minimum(self.lack, 0) + units * np.minimum(self.lack_slope, 0)  # a last rank may have more
        return found


def reached(size: int, filled: int, spans: Integers) -> NDArray[np.bool_]:
    """(size, phases + 1) which ranks of a block feel what a piece puts on those that are filled.

    Args:
        spans: (phases + 1,) ranks that share a phase.
    """
    found: NDArray[np.bool_] = np.arange(size)[:, None] < -(-filled // spans) * spans
    return found
