"""What the search is asked, and what it chooses. Pure: it knows no table and no module.

[Note: problem]
An *item* takes one of its *options*. An option has *blocks* of loads: each goes onto a different block of consecutive
ranks (ranks b * size .. b * size + size - 1), and one that is as large as the machine stays. A load is a vector of
seconds by phase, then bytes. A solution costs the sum over phases of the slowest rank, plus what each kind of set-up
that occurs in it costs once. Ranks are alike but for `base` and `capacity`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Option:
    """One way to place an item.

    Args:
        loads: (blocks, ranks in a block, phases + 1) seconds by phase, then bytes.
        everywhere: (phases + 1,) the same on every rank besides.
        kinds: which set-ups it needs.
    """

    loads: Array
    everywhere: Array
    kinds: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Item:
    """Something to place.

    Args:
        options: at least one; the first of equals is taken.
        allowed: (ranks,) which ranks may hold it; None for all.
        spread: groups of items no two of which may share a rank.
    """

    options: tuple[Option, ...]
    allowed: NDArray[np.bool_] | None = None
    spread: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Problem:
    """Items and the ranks to put them on.

    Args:
        items: what to place.
        capacity: (ranks,) bytes.
        base: (ranks, phases + 1) load that is there already.
        setups: (kinds, phases) seconds.
        base_kinds: set-ups paid already.
        taken: for each spread group, (ranks,) which ranks hold a member already.
    """

    items: tuple[Item, ...]
    capacity: Array
    base: Array
    setups: Array
    base_kinds: frozenset[int] = frozenset()
    taken: dict[str, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """What one item got: the option's index, and the block of ranks for each of its blocks."""

    option: int
    blocks: tuple[int, ...]


class Infeasible(Exception):
    """No placement was found.

    Attributes:
        item: index of the item that does not fit.
        option: index of its option that comes nearest, or None when ranks, not bytes, are missing.
        rank: where it comes nearest, or None.
        bytes_short: bytes missing there.
        load: (ranks, phases + 1) of what was placed before.
    """

    def __init__(self, item: int, option: int | None, rank: int | None, bytes_short: int, load: Array) -> None:
        super().__init__(f"item {item} does not fit: {bytes_short} bytes short on rank {rank}")
        self.item, self.option, self.rank, self.bytes_short, self.load = item, option, rank, bytes_short, load

    @property
    def distance(self) -> tuple[bool, int]:
        """From a place, the smaller the nearer: bytes that are missing are nearer than ranks that are."""
        return self.rank is None, self.bytes_short
