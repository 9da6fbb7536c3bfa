"""A placement of a small problem that fits, by an integer programme: the last resort. Pure, as `planner.search`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.search.cost_table import Array
from planner.search.placement import Part, Placement
from planner.search.problem import Problem

_ITEMS, _RANKS = 100, 16
_NODES = 6000
"""Of the solver, over the number of items; a count, so that the same problem has the same answer everywhere."""


class _Put(NamedTuple):
    """A family of an item: its variables are a use, then for each block a piece, then the units of each.

    Args:
        first: number of the first variable.
        loads: (ranks in a block,) bytes of a piece of no units.
    """

    item: int
    row: int
    first: int
    blocks: int
    loads: Array


def exact(problem: Problem) -> list[Part | None] | None:
    """Parts of all items by bytes alone; None for a large problem, without SciPy, or where none was found."""
    ranks = len(problem.capacity)
    if len(problem.item_class) > _ITEMS or ranks > _RANKS or problem.spread:
        return None
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        return None
    puts = _puts(problem)
    number = puts[-1].first + 1 + 2 * puts[-1].blocks
    entries, low, high = _rows(problem, puts)
    at, column, value = (np.array(part) for part in zip(*entries, strict=True))
    scale = max(float(problem.capacity.max()), 1.0)
    is_bytes = np.arange(len(low)) < ranks
    value = np.where(is_bytes[at], value / scale, value)
    high = np.where(is_bytes, high / scale, high)
    matrix = coo_array((value, (at, column)), shape=(len(low), number))
    found: Any = milp(
        np.zeros(number),
        integrality=np.ones(number),
        bounds=Bounds(0, _most(problem, puts, number)),
        constraints=LinearConstraint(matrix, low, high),
        options={"node_limit": _NODES // len(problem.item_class)},
    )
    if found.x is None:
        return None
    parts = _parts(problem, puts, np.round(found.x).astype(int))
    is_whole = all(part is not None for part in parts)
    return parts if is_whole and Placement.of(problem, parts).fits() else None


def _puts(problem: Problem) -> list[_Put]:
    table, found, first = problem.table, [], 0
    for item, owner in enumerate(problem.item_class.tolist()):
        for row in range(int(problem.starts[owner]), int(problem.starts[owner + 1])):
            size = int(table.size[row])
            filled = int(table.filled[row])
            loads = np.where(np.arange(size) < filled, table.fixed[row, -1], 0.0)
            loads[filled - 1] -= table.lack[row, -1]
            if row in table.ragged:
                loads = table.ragged[row][..., -1].max(0)
            found.append(_Put(item, row, first, len(problem.capacity) // size, loads))
            first += 1 + 2 * found[-1].blocks
    return found


def _most(problem: Problem, puts: list[_Put], number: int) -> Array:
    """(variables,) the largest value of each."""
    table, most = problem.table, np.ones(number)
    for put in puts:
        allowed = problem.allowed.get(put.item)
        size, first = int(table.size[put.row]), put.first + 1
        units = most[first + put.blocks : first + 2 * put.blocks]
        units[:] = table.units[put.row]
        if allowed is not None:
            is_open = allowed.reshape(-1, size)[:, : int(table.filled[put.row])].all(1)
            most[first : first + put.blocks] *= is_open
            units *= is_open
    return most


def _rows(problem: Problem, puts: list[_Put]) -> tuple[list[tuple[int, int, float]], Array, Array]:
    """Bytes of each rank, one family for each item, and pieces as a family has them: (row, variable, factor)."""
    table, ranks = problem.table, len(problem.capacity)
    entries: list[tuple[int, int, float]] = []
    low = [-np.inf] * ranks + [1.0] * len(problem.item_class)
    high = (problem.capacity - problem.base[:, -1]).tolist() + [1.0] * len(problem.item_class)

    def add(terms: list[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(low), variable, factor) for variable, factor in terms)
        low.append(least)
        high.append(most)

    for put in puts:
        row, size, units = put.row, int(table.size[put.row]), int(table.units[put.row])
        entries.append((ranks + put.item, put.first, 1.0))
        entries += [(rank, put.first, float(table.everywhere[row, -1])) for rank in range(ranks)]
        pieces = [put.first + 1 + block for block in range(put.blocks)]
        widths = [piece + put.blocks for piece in pieces]
        for block, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
            for place, load in enumerate(put.loads.tolist()):
                entries.append((block * size + place, piece, load))
                last = int(table.filled[row]) - 1
                less = table.lack_slope[row, -1] if place == last else 0.0
                if place <= last:
                    entries.append((block * size + place, width, float(table.slope[row, -1] - less)))
            if units:
                add([(width, 1.0), (piece, -float(table.least[row]))], 0.0, np.inf)
                add([(width, 1.0), (piece, -float(units))], -np.inf, 0.0)
        if units:
            add([*((width, 1.0) for width in widths), (put.first, -float(units))], 0.0, 0.0)
        else:
            add([*((piece, 1.0) for piece in pieces), (put.first, -float(table.pieces[row]))], 0.0, 0.0)
    return entries, np.array(low), np.array(high)


def _parts(problem: Problem, puts: list[_Put], values: Any) -> list[Part | None]:
    parts: list[Part | None] = [None] * len(problem.item_class)
    for put in puts:
        if not values[put.first]:
            continue
        first = put.first + 1
        blocks = np.flatnonzero(values[first : first + put.blocks])
        widths = values[first + put.blocks : first + 2 * put.blocks][blocks]
        if not problem.table.units[put.row]:
            widths = np.zeros_like(widths)
        order = np.argsort(-widths, kind="stable")
        parts[put.item] = Part(put.row, tuple(blocks[order].tolist()), tuple(widths[order].tolist()))
    return parts
