"""Packing by memory alone, for what fits no other way; and what is short where nothing does. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.search.cost_table import Array
from planner.search.cuts import Cuts
from planner.search.exact import exact
from planner.search.placement import SLACK, Part, Placement, even
from planner.search.problem import Infeasible, Problem, Ranks

_AGAIN = 30
"""How often a few items are put down anew, each time with the one that did not fit before the others."""
_FEW = 200


def pour(problem: Problem, cuts: Cuts) -> list[Part | None]:
    """Parts of all items, those of most bytes first, each in the family of least bytes that fits.

    Raises:
        Infeasible: nothing of an item's class fits what is left.
    """
    problem = _reserved(problem)
    table = problem.table
    whole = cuts.mean[:, -1]
    least = np.minimum.reduceat(whole, cuts.start[:-1])
    peak = cuts.piece[:, -1] + table.everywhere[cuts.row, -1]
    hopeless = np.minimum.reduceat(np.where(peak <= 0, 0, peak), cuts.start[:-1])
    alone = Placement(problem)
    room = float((problem.capacity - problem.base[:, -1]).max())
    for item in np.flatnonzero(hopeless[problem.item_class] > room * (1 + SLACK)).tolist():
        if _put(alone, item) is None:
            raise _short(alone, item)
    widest = np.minimum.reduceat(peak, cuts.start[:-1])
    order = np.lexsort((-least[problem.item_class], -widest[problem.item_class])).tolist()
    fault: Infeasible | None = None
    for is_spread in (False, True):
        poured = _poured(problem, list(order), is_spread)
        if not isinstance(poured, Infeasible):
            return poured
        fault = fault or poured
    found = exact(problem)
    if found is not None:
        return found
    assert fault is not None
    raise fault


def _reserved(problem: Problem) -> Problem:
    """The same with what items put on every rank at least there beforehand: those before leave room for it."""
    table, least = problem.table, np.full(len(problem.starts) - 1, np.inf)
    is_whole = table.filled == len(problem.capacity)
    is_whole[list(table.ragged)] = False
    fixed, everywhere, base = table.fixed.copy(), table.everywhere.copy(), problem.base.copy()
    np.minimum.at(least, table.owner, everywhere[:, -1] + np.where(is_whole, fixed[:, -1], 0.0))
    base[:, -1] += least[problem.item_class].sum()
    common = np.minimum(everywhere[:, -1], least[table.owner])
    everywhere[:, -1] -= common
    fixed[:, -1] -= np.where(is_whole, least[table.owner] - common, 0.0)
    return replace(problem, items=(), base=base, table=replace(table, fixed=fixed, everywhere=everywhere))


def _poured(problem: Problem, order: list[int], is_spread: bool) -> list[Part | None] | Infeasible:
    """All items put down in turn, some times anew with the one that did not fit before the others."""
    fault: Infeasible | None = None
    for _ in range(_AGAIN if len(order) <= _FEW else 1):
        placement = Placement(problem)
        for item in order:
            part = _put(placement, item, is_spread)
            if part is None:
                break
            placement.add(item, part)
        else:
            return placement.parts
        fault = fault or _short(placement, item)
        order.remove(item)
        order.insert(0, item)
    assert fault is not None
    return fault


def _put(placement: Placement, item: int, is_spread: bool = False) -> Part | None:
    """A part in the family of least bytes (of a rank, if `is_spread`) that fits; None where none does."""
    problem = placement.problem
    owner = problem.item_class[item]
    rows = np.arange(int(problem.starts[owner]), int(problem.starts[owner + 1]))
    table = problem.table
    width = np.maximum(table.units[rows], table.pieces[rows])
    total = (table.fixed[rows, -1] * np.where(table.units[rows] > 0, 1, table.pieces[rows])) + np.where(
        table.units[rows] > 0, width * table.slope[rows, -1], 0
    )
    total = total * table.filled[rows] + table.everywhere[rows, -1] * len(problem.capacity)
    if is_spread:
        total = table.fixed[rows, -1] + table.slope[rows, -1] * table.least[rows] + table.everywhere[rows, -1]
    for row in rows[np.argsort(total, kind="stable")].tolist():
        part = in_family(placement, item, row)
        if part is not None:
            return part
    return None


def in_family(placement: Placement, item: int, row: int) -> Part | None:
    """Pieces of a family, as few as there must be, on the emptiest blocks."""
    problem, table = placement.problem, placement.problem.table
    size, filled, units = int(table.size[row]), int(table.filled[row]), int(table.units[row])
    room = problem.capacity * (1 + SLACK) - placement.local[:, -1] - placement.every[-1] - table.everywhere[row, -1]
    if table.everywhere[row, -1] > 0 and (room < 0).any():
        return None
    ranks = placement.open_ranks(item)
    if row in table.ragged:
        return _ragged(table.ragged[row], row, room, ranks, size)
    if ranks is not None:
        room = np.where(ranks, room, -np.inf)
    room = room.reshape(-1, size)[:, :filled].min(1)
    order = np.argsort(-room, kind="stable")
    fixed, slope = float(table.fixed[row, -1]), float(table.slope[row, -1])
    if not units:
        number = int(table.pieces[row])
        if len(order) < number or room[order[number - 1]] < fixed:
            return None
        return Part(row, tuple(order[:number].tolist()), (0,) * number)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(slope > 0, np.floor((room[order] - fixed) / slope), units)
    most = np.where(room[order] >= fixed, np.minimum(np.nan_to_num(most, posinf=units), units), 0).astype(np.int64)
    return _widths(row, order.tolist(), most.tolist(), units, int(table.least[row]))


def _widths(row: int, blocks: list[int], most: list[int], units: int, least: int) -> Part | None:
    """The fewest pieces that hold all units; blocks come with the most that each may hold, falling."""
    for number in range(1, min(len(blocks), units // least) + 1):
        if most[number - 1] < least:
            return None
        if sum(most[:number]) < units:
            continue
        widths, left = [0] * number, units
        for i in range(number - 1, -1, -1):  # the fullest block first: what it cannot take, the others do
            widths[i] = max(least, min(most[i], left // (i + 1)))
            left -= widths[i]
        if left == 0:
            order = sorted(range(number), key=lambda i: (-widths[i], i))
            return Part(row, tuple(blocks[i] for i in order), tuple(widths[i] for i in order))
    return None


def _ragged(loads: Array, row: int, room: Array, ranks: Ranks | None, size: int) -> Part | None:
    blocks: list[int] = [0] * len(loads)
    used: list[int] = []
    rooms = room.reshape(-1, size)
    for index in np.argsort(-loads[..., -1].max(1), kind="stable").tolist():
        needed = loads[index, :, -1]
        lack = (needed - rooms).max(1)
        if ranks is not None:
            lack = np.where((~ranks.reshape(-1, size) & (needed > 0)).any(1), np.inf, lack)
        lack[used] = np.inf
        block = int(lack.argmin())
        if lack[block] > 0:
            return None
        blocks[index] = block
        used.append(block)
    return Part(row, tuple(blocks), even(0, len(loads)))


def _rest(problem: Problem, row: int, free: Array, ranks: Ranks | None) -> float:
    """Bytes of a divisible family that find no room when all blocks are filled."""
    table, size = problem.table, int(problem.table.size[row])
    slope = float(table.slope[row, -1])
    if not table.units[row] or slope <= 0:
        return 0.0
    room = np.where(ranks, free, 0.0) if ranks is not None else free
    room = room.reshape(-1, size)[:, : int(table.filled[row])].min(1)
    room = room - table.fixed[row, -1] - table.everywhere[row, -1]
    units = np.floor(np.maximum(room, 0.0) / slope)
    return float(table.units[row] - units[units >= table.least[row]].sum()) * slope


def _short(placement: Placement, item: int) -> Infeasible:
    """What an item that does not fit lacks: the family, the rank and the bytes that come nearest."""
    problem, table = placement.problem, placement.problem.table
    owner = int(problem.item_class[item])
    first = int(problem.starts[owner])
    found: list[tuple[int, int, int]] = []
    ranks = placement.open_ranks(item)
    free = problem.capacity - placement.local[:, -1] - placement.every[-1]
    for row in range(first, int(problem.starts[owner + 1])):
        size = int(table.size[row])
        needed = table.fixed[row, -1] + table.least[row] * table.slope[row, -1]
        pieces = 1 if table.units[row] else int(table.pieces[row])
        even = np.tile(np.where(np.arange(size) < table.filled[row], needed, 0.0), (pieces, 1))
        loads = table.ragged[row][..., -1] if row in table.ragged else even
        if len(free) // size < len(loads):
            continue
        piece = loads[int(loads.max(1).argmax())] + table.everywhere[row, -1]
        lack = piece - free.reshape(-1, size)
        is_open = np.ones(len(lack), dtype=bool)
        if ranks is not None:
            is_open = ~(~ranks.reshape(-1, size) & (piece > 0)).any(1)
        if is_open.sum() < len(loads):
            continue
        most = np.where(is_open, lack.max(1), np.inf)
        block = int(np.argsort(most, kind="stable")[len(loads) - 1 if row not in table.ragged else 0])
        short = max(float(most[block]), _rest(problem, row, free, ranks))
        found.append((max(1, int(np.ceil(short))), row - first, block * size + int(lack[block].argmax())))
    if not found:
        return Infeasible(item, None, None, 0, placement.load)
    short, option, rank = min(found)
    return Infeasible(item, option, rank, short, placement.load)
