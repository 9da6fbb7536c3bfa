"""*Cells*: blocks of ranks that are filled alike, so that a large machine is searched as a smaller one. Pure.

[Note: cells]
Where ranks are many and items few, what is even inside a block of ranks is mostly better than what one piece at a time
finds: a table whose columns are cut into k pieces, whose rows are cut over the rest of the block, asks the same of each
of its ranks. So a problem is made in which a cell is a rank: each family of pieces of `size` ranks becomes one of whole
cells, k = cell // size pieces side by side. What is small beside a step may lie on a part of a cell too; it counts by
its mean there, and which part is found out when the placement is carried over to ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.search.cost_table import Array, CostTable, Integers
from planner.search.placement import Part, Placement
from planner.search.potential import powered, ranks_together
from planner.search.problem import Problem

_SMALL = 0.05
"""Share of a phase's target up to which a piece may lie on a part of a cell."""
_POWER = 8


@dataclass(frozen=True, eq=False)
class Cells:
    """A problem whose ranks are cells of another, see [Note: cells].

    Args:
        whole: the other.
        problem: of cells.
        size: ranks in a cell.
        row: (rows,) of the whole's table, of which each row is made.
        side_by_side: (rows,) pieces that fill a cell; 1 where one has whole cells, 0 where it has a part of one.
        scale: (phases + 1,) what a rank may carry.
    """

    whole: Problem
    problem: Problem
    size: int
    row: Integers
    side_by_side: Integers
    scale: Array

    def placement(self, parts: list[Part]) -> Placement:
        """What was placed on cells, on ranks."""
        found, table = Placement(self.whole), self.whole.table
        rest: list[tuple[float, int, Part]] = []
        for item, part in enumerate(parts):
            row, number = int(self.row[part.row]), int(self.side_by_side[part.row])
            if number:
                blocks = tuple(b * number + i for b in part.blocks for i in range(number))
                found.add(item, Part(row, blocks, tuple(w for w in part.widths for _ in range(number))))
            else:
                load = table.fixed[row] + max(part.widths) * table.slope[row]
                rest.append((-float((load / self.scale)[:-1].sum()), item, part))
        for _, item, part in sorted(rest, key=lambda r: (r[0], r[1])):
            found.add(item, self._inside(found, part))
        return found

    def _inside(self, found: Placement, part: Part) -> Part:
        """The blocks of each cell where pieces add least."""
        table, row = self.whole.table, int(self.row[part.row])
        size, own = int(table.size[row]), np.append(self.whole.span == 1, True)
        blocks = []
        for cell, width in zip(part.blocks, part.widths, strict=True):
            x = (found.local[cell * self.size : (cell + 1) * self.size] + found.every) / self.scale
            load = own * (table.fixed[row] + width * table.slope[row]) / self.scale
            grown = (powered(x + load, _POWER) - powered(x, _POWER)).sum(1).reshape(-1, size).sum(1)
            blocks.append(cell * (self.size // size) + int(grown.argmin()))
        return Part(row, tuple(blocks), part.widths)


def cells(problem: Problem, target: Array, sizes: Sequence[int]) -> Iterator[Cells]:
    """The problem with cells of so many ranks each, where that can be.

    Args:
        target: (phases,) seconds by phase that a good placement may have.
        sizes: powers of two.
    """
    num_ranks, most = len(problem.capacity), ranks_together(problem)
    for size in sizes:
        is_even = num_ranks % size == 0 and (most % size == 0 or size % most == 0)
        made = _with_cells(problem, size, target) if is_even else None
        if made is not None:
            yield made


def _with_cells(problem: Problem, size: int, target: Array) -> Cells | None:
    """None where an item has nothing that lies on cells."""
    table, num_cells = problem.table, len(problem.capacity) // size
    span = np.append(problem.span, 1)
    is_shared = (span >= size) & (span > 1)
    together = np.maximum(np.minimum(span, size) // table.size[:, None], 1)  # pieces of ranks that share a phase
    number = np.maximum(size // table.size, 1)
    is_plain = ~np.isin(np.arange(len(table.owner)), list(table.ragged))
    is_large = is_plain & (table.size % size == 0)
    is_small = is_plain & (table.size < size) & (size % table.size == 0)
    cut = (table.units > 0) & (table.units % number == 0) & (table.units // number >= table.least)
    fills = is_small & (cut | ((table.units == 0) & (table.pieces % number == 0)))
    largest = (table.fixed + table.units[:, None] * table.slope)[:, :-1]
    partly = is_small & (np.where(is_shared[:-1], 0.0, largest) <= _SMALL * target).all(1)
    row = np.concatenate([np.flatnonzero(of) for of in (is_large, fills, partly)])
    side = np.concatenate([np.ones(is_large.sum(), np.int64), number[fills], np.zeros(partly.sum(), np.int64)])
    order = np.lexsort((side == 0, row, table.owner[row]))
    row, side = row[order], side[order]
    if len(np.unique(table.owner[row])) < len(np.unique(table.owner)):
        return None
    filled = np.maximum(side, 1)
    share = np.minimum(np.maximum(span, table.size[row, None]) / size, 1.0)  # of the cell, that feels a piece
    load = np.where(side[:, None] > 1, together[row], np.where(side[:, None] > 0, 1.0, share))
    made = CostTable(
        owner=table.owner[row],
        size=np.maximum(table.size[row] // size, 1),
        pieces=np.maximum(table.pieces[row] // filled, 1),
        units=table.units[row] // filled,
        least=table.least[row],
        fixed=table.fixed[row] * load,
        slope=table.slope[row] * load,
        everywhere=table.everywhere[row],
        kinds=table.kinds[row],
    )
    coarse = replace(
        problem,
        items=(),
        capacity=problem.capacity.reshape(num_cells, size).min(1),
        base=problem.base.reshape(num_cells, size, -1).max(1),
        taken={group: np.any(mask.reshape(-1, size), axis=1) for group, mask in problem.taken.items()},
        table=made,
        allowed={item: np.all(mask.reshape(-1, size), axis=1) for item, mask in problem.allowed.items()},
        span=np.maximum(1, problem.span // size),
    )
    scale = np.append(np.maximum(target, 1e-3 * float(target.sum()) + 1e-30), float(problem.capacity.max()))
    return Cells(problem, coarse, size, row, side, scale)
