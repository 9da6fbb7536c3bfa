"""What the search is asked, and what it chooses. Pure: it knows no table and no module.

[Note: problem]
An *item* takes one of its *options*. An option has *blocks* of loads: each goes onto a different block of consecutive
ranks (ranks b * size .. b * size + size - 1), and one that is as large as the machine stays. A load is a vector of
seconds by phase, then bytes. A solution costs the sum over phases of the slowest rank, plus what each kind of set-up
that occurs in it costs once. Ranks are alike but for `base` and `capacity`.

Items come as objects with dense loads, or as classes of a `CostTable`; the search sees the table, which is made of the
objects where they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.search.cost_table import Array as Array
from planner.search.cost_table import CostTable, Integers, reached

Ranks = NDArray[np.bool_]


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
    allowed: Ranks | None = None
    spread: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Problem:
    """Items and the ranks to put them on; `Problem.of_table` takes items as classes of a table.

    Args:
        items: what to place; empty where a table was given.
        capacity: (ranks,) bytes.
        base: (ranks, phases + 1) load that is there already; of a phase that ranks share, the sum, on each of them.
        setups: (kinds, phases) seconds.
        base_kinds: set-ups paid already.
        taken: for each spread group, (ranks,) which ranks hold a member already.
        table: what the families of every class of items cost.
        item_class: (items,) class of each item.
        allowed: of items that not every rank may hold: (ranks,) which may.
        spread: of items that have some: groups of items no two of which may share a rank.
        span: (phases,) consecutive ranks that share a phase; 1 where each has its own.
    """

    items: tuple[Item, ...]
    capacity: Array
    base: Array
    setups: Array
    base_kinds: frozenset[int] = frozenset()
    taken: Mapping[str, Ranks] = field(default_factory=dict)
    table: CostTable = None  # type: ignore[assignment]  # made of the items
    item_class: Integers = None  # type: ignore[assignment]
    allowed: Mapping[int, Ranks] = field(default_factory=dict)
    spread: Mapping[int, frozenset[str]] = field(default_factory=dict)
    span: Integers = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        made: dict[str, object] = {}
        if self.span is None:
            made["span"] = np.ones(self.base.shape[1] - 1, dtype=np.int64)
        if self.table is None or self.items:
            made["table"], made["item_class"] = _table_of(self.items, self.base.shape[1])
            made["allowed"] = {i: item.allowed for i, item in enumerate(self.items) if item.allowed is not None}
            made["spread"] = {i: item.spread for i, item in enumerate(self.items) if item.spread}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_table(
        cls,
        table: CostTable,
        item_class: Integers,
        capacity: Array,
        base: Array,
        setups: Array,
        span: Integers | None = None,
        *,
        base_kinds: frozenset[int] = frozenset(),
        taken: Mapping[str, Ranks] | None = None,
        allowed: Mapping[int, Ranks] | None = None,
        spread: Mapping[int, frozenset[str]] | None = None,
    ) -> Problem:
        """A problem whose items are classes of a table; arguments as the attributes."""
        ones = np.ones(base.shape[1] - 1, dtype=np.int64)
        return cls(
            (),
            capacity,
            base,
            setups,
            base_kinds,
            dict(taken or {}),
            table,
            np.asarray(item_class, dtype=np.int64),
            dict(allowed or {}),
            dict(spread or {}),
            ones if span is None else np.asarray(span, dtype=np.int64),
        )

    @cached_property
    def piece_loads(self) -> dict[tuple[int, int], Any]:
        """(row, width) -> what a piece puts on ranks, of pieces that some placement has had."""
        return {}

    @cached_property
    def block_shapes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """(size, filled) of blocks, ascending; and which of these each row of the table has."""
        pairs = np.column_stack([self.table.size, self.table.filled])
        found, of = np.unique(pairs, axis=0, return_inverse=True)
        return [(size, filled) for size, filled in found.tolist()], of.ravel().tolist()

    @cached_property
    def partly_filled(self) -> dict[tuple[int, int], Ranks]:
        """(size, filled) of blocks that are not filled -> (size, phases + 1), see `reached`."""
        spans = np.append(self.span, 1)
        return {of: reached(*of, spans) for of in self.block_shapes[0] if of[1] < of[0]}

    @cached_property
    def starts(self) -> Integers:
        """(classes + 1,) first row of each class in the table; then the number of rows."""
        classes = int(self.item_class.max(initial=-1)) + 1
        classes = max(classes, int(self.table.owner.max(initial=-1)) + 1)
        return np.searchsorted(self.table.owner, np.arange(classes + 1)).astype(np.int64)


@dataclass(frozen=True)
class Choice:
    """What one item got.

    Args:
        option: number of its option; of a table's item, of the family among its class's.
        blocks: the block of ranks of each piece.
        widths: units of each piece, of a family that is divisible.
    """

    option: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...] | None = None


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


def _table_of(items: tuple[Item, ...], width: int) -> tuple[CostTable, Integers]:
    """The families of items' options, those of items that share them once, and the class of each item."""
    classes: dict[tuple[int, ...], int] = {}
    families: list[tuple[int, Option]] = []
    item_class = []
    for item in items:
        key = tuple(id(option) for option in item.options)
        if key not in classes:
            classes[key] = len(classes)
            families += [(classes[key], option) for option in item.options]
        item_class.append(classes[key])
    ragged = {}
    fixed = np.zeros((len(families), width))
    for row, (_, option) in enumerate(families):
        fixed[row] = option.loads[0, 0]
        if (option.loads != fixed[row]).any():
            ragged[row], fixed[row] = option.loads, option.loads.max((0, 1))
    options = [option for _, option in families]
    zeros = np.zeros(len(families), dtype=np.int64)
    table = CostTable(
        owner=np.array([owner for owner, _ in families], dtype=np.int64),
        size=np.array([o.loads.shape[1] for o in options], dtype=np.int64),
        pieces=np.array([len(o.loads) for o in options], dtype=np.int64),
        units=zeros,
        least=zeros,
        fixed=fixed,
        slope=np.zeros((len(families), width)),
        everywhere=np.array([o.everywhere for o in options]).reshape(-1, width),
        kinds=np.array([sum(1 << kind for kind in o.kinds) for o in options], dtype=np.int64),
        ragged=ragged,
    )
    return table, np.array(item_class, dtype=np.int64)
