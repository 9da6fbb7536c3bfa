"""Packing: the cut and the blocks of one item where they add least to the potential. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts
from planner.search.placement import Part, Placement, even
from planner.search.potential import ALL_IN_SCOPE, Potential
from planner.search.problem import Problem, Ranks


class Menu(NamedTuple):
    """The cuts of a class that are worth a look, each (cuts,) or (cuts, phases + 1), by size of block.

    Args:
        rows: of the table.
        numbers: of pieces.
        loads: of the largest piece.
        every: what is put on all ranks.
        sizes: (size of a block, ranks of it that are filled, first cut, last cut + 1).
    """

    rows: Integers
    numbers: Integers
    loads: Array
    every: Array
    sizes: tuple[tuple[int, int, int, int], ...]


def menus(problem: Problem, cuts: Cuts, cost: Array, most: int) -> list[Menu]:
    """A menu for every class: the cuts that cost least.

    Args:
        cost: (cuts,) by which they are compared; infinity for those that are in no menu.
        most: cuts in a menu.
    """
    table, found = problem.table, []
    order = np.lexsort((cost, cuts.owner))
    rank = np.arange(len(order)) - cuts.start[cuts.owner[order]]
    taken = order[(rank < most) & np.isfinite(cost[order])]
    row = cuts.row[taken]
    taken = taken[np.lexsort((cuts.number[taken], row, table.filled[row], table.size[row], cuts.owner[taken]))]
    ends = np.searchsorted(cuts.owner[taken], np.arange(len(cuts.start)))
    for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        at = taken[low:high]
        size, filled = table.size[cuts.row[at]], table.filled[cuts.row[at]]
        edges = [0, *(np.flatnonzero(np.diff(size) | np.diff(filled)) + 1).tolist(), len(at)]
        sizes = tuple((int(size[a]), int(filled[a]), a, b) for a, b in pairwise(edges) if b > a)
        rows = cuts.row[at]
        found.append(Menu(rows, cuts.number[at], cuts.piece[at], table.everywhere[rows], sizes))
    return found


class Packer:
    """Puts items down, one at a time, where they add least to the potential.

    Args:
        menus: of every class.
        item: (items,) menu of each; its class's by default.
        wide: makes menus for items that do not fit with those.
    """

    def __init__(
        self,
        potential: Potential,
        menus: list[Menu],
        wide: Callable[[], list[Menu]] | None = None,
        item: Integers | None = None,
    ) -> None:
        self.potential = potential
        self.placement: Placement = potential.placement
        self.problem: Problem = self.placement.problem
        self.menus = menus
        self._wide = wide
        self._item = self.problem.item_class if item is None else item
        self._wider: list[Menu] | None = None

    def build(self, order: list[int], kept: Array, power: int, out_of_time: Callable[[], bool]) -> int | None:
        """Put down all items; returns the first that fits nowhere, or that the time did not suffice for.

        Args:
            kept: (items,) bytes that each will put on every rank: those before leave room for them.
            power: of the potential.
        """
        every = 16 * (1 + len(self.problem.capacity) // 512)
        later = np.maximum(0.0, float(kept.sum()) - np.cumsum(kept[order])).tolist()
        self.potential.aim(power, is_building=True)
        for number, item in enumerate(order):
            if number % every == every - 1:
                self.potential.weigh(is_building=True)
            self.potential.reserve(later[number])
            if not self.insert(item) or out_of_time():
                return item
        self.potential.reserve(0.0)
        return None

    def insert(self, item: int) -> bool:
        """Put an item down; False where no cut of its menu fits, nor one of the wide menu, if there is one."""
        if self._insert(item, self.menus[int(self._item[item])]):
            return True
        if self._wide is None:
            return False
        if self._wider is None:
            self._wider = self._wide()
        return self._insert(item, self._wider[int(self._item[item])])

    def draw(self, item: int, random: np.random.Generator) -> bool:
        """Put an item down in a cut of its menu that is drawn at random; False where it does not fit."""
        menu = self.menus[int(self._item[item])]
        cut = int(random.integers(len(menu.rows)))
        open_ranks = self.placement.open_ranks(item)
        self.potential.work += 40
        self.potential.look(int(menu.numbers[cut]), open_ranks)
        part = self._part(menu, cut, open_ranks)
        if part is not None:
            self.placement.add(item, part)
        return part is not None

    def _insert(self, item: int, menu: Menu) -> bool:
        self.potential.work += 30 + 6 * len(menu.rows)
        open_ranks = self.placement.open_ranks(item)
        self.potential.look(int(menu.numbers.max()), open_ranks)
        order = self._by_cost(menu, open_ranks)
        for cost, cut in order:
            part = self._part(menu, cut, open_ranks) if np.isfinite(cost) else None
            if part is not None:
                self.placement.add(item, part)
                return True
        return False

    def _by_cost(self, menu: Menu, open_ranks: Ranks | None) -> list[tuple[float, int]]:
        """Cuts, the best first, with what they are thought to add."""
        potential = self.potential
        room = float((potential.limit - self.placement.local[:, -1]).min()) - self.placement.every[-1]
        spill = (menu.every[:, -1] > max(room, 0.0)) & (menu.every[:, -1] > 0)  # the fullest rank gets it too
        extra = np.where(spill, np.inf, menu.every[:, :-1].sum(1))
        peaks: Array | None = None
        found = []
        for size, filled, low, high in menu.sizes:
            if size > potential.group and potential.num_ranks > ALL_IN_SCOPE:
                peaks = potential.peaks() if peaks is None else peaks
                costs = potential.large_costs(menu.loads[low:high], size, filled, peaks)
                self._bar_large(costs, menu, low, (size, filled), open_ranks)
            else:
                costs = self._costs(menu, low, high, (size, filled), open_ranks)
            for cut, number in enumerate(menu.numbers[low:high].tolist(), low):
                least = _least(costs[cut - low], number, size, potential)
                found.append((least + float(extra[cut]), cut))
        return sorted(found)

    def _costs(self, menu: Menu, low: int, high: int, shape: tuple[int, int], open_ranks: Ranks | None) -> Array:
        """(cuts, blocks of the scope) with infinity where a piece does not fit or may not be."""
        (size, filled), potential, ragged = shape, self.potential, self.problem.table.ragged
        loads = menu.loads[low:high]
        if ragged and any(row in ragged for row in menu.rows[low:high].tolist()):
            rows = menu.rows[low:high].tolist()  # whether they fit is found out when they are put down
            return np.stack([self._ragged_costs(row, load, size) for row, load in zip(rows, loads, strict=True)])
        costs = potential.costs(loads, size, filled)
        room = potential.room.reshape(-1, size)[:, :filled].min(1)
        costs[room < (loads[:, -1] + menu.every[low:high, -1])[:, None]] = np.inf
        if open_ranks is not None:
            costs[:, ~open_ranks[potential.ranks].reshape(-1, size)[:, :filled].all(1)] = np.inf
        return costs

    def _ragged_costs(self, row: int, load: Array, size: int) -> Array:
        ragged = self.problem.table.ragged.get(row)
        loads = load[None] if ragged is None else ragged
        costs: Array = self.potential.costs(loads, size).mean(0)
        return costs

    def _bar_large(self, costs: Array, menu: Menu, low: int, shape: tuple[int, int], open_ranks: Ranks | None) -> None:
        (size, filled), placement, potential = shape, self.placement, self.potential
        room = potential.limit - placement.local[:, -1] - placement.every[-1]
        room = room.reshape(-1, size)[:, :filled].min(1)
        high = low + len(costs)
        costs[room < (menu.loads[low:high, -1] + menu.every[low:high, -1])[:, None]] = np.inf
        if open_ranks is not None:
            costs[:, ~open_ranks.reshape(-1, size)[:, :filled].all(1)] = np.inf

    def _part(self, menu: Menu, cut: int, open_ranks: Ranks | None) -> Part | None:
        """Blocks for a cut, its widest piece first; None where they do not fit."""
        table, potential = self.problem.table, self.potential
        row, number = int(menu.rows[cut]), int(menu.numbers[cut])
        size, units = int(table.size[row]), int(table.units[row])
        widths = even(units, number)
        order = range(number)
        if row in table.ragged:
            order = np.argsort(-table.ragged[row][..., :-1].sum((1, 2)), kind="stable").tolist()
        blocks = [0] * number
        used: list[int] = []
        for place, index in enumerate(order):
            costs = self._piece_costs(row, index, widths[index], size, open_ranks)
            costs[used] = np.inf
            block = int(costs.argmin())
            if not np.isfinite(costs[block]):
                for done in list(order)[:place]:
                    self.placement.put(row, done, blocks[done], widths[done], -1)
                return None
            used.append(block)
            whole = self._is_large(size)
            blocks[index] = block if whole else int(potential.ranks[block * size]) // size
            if number > 1:
                self.placement.put(row, index, blocks[index], widths[index], 1)
                potential.again()
        if number > 1:
            for index in order:
                self.placement.put(row, index, blocks[index], widths[index], -1)
        return Part(row, tuple(blocks), widths)

    def _is_large(self, size: int) -> bool:
        return size > self.potential.group and self.potential.num_ranks > ALL_IN_SCOPE

    def _piece_costs(self, row: int, index: int, width: int, size: int, open_ranks: Ranks | None) -> Array:
        """(blocks,) what a piece adds, with all its ranks as they are; infinity where it may not be."""
        table, potential, placement = self.problem.table, self.potential, self.placement
        ragged, filled = table.ragged.get(row), int(table.filled[row])
        loads = (table.fixed[row] + width * table.slope[row])[None] if ragged is None else ragged[index][None]
        held = True if ragged is None else ragged[index][:, -1] > 0
        if ragged is None and filled < size:
            mask = self.problem.partly_filled[size, filled]
            loads, held = loads[:, None] * mask, mask[:, -1]
        costs: Array
        if self._is_large(size):
            most = loads if loads.ndim == 2 else loads.max(1)
            costs = potential.large_costs(most, size, filled, potential.peaks())[0]
            room = potential.limit - placement.local[:, -1] - placement.every[-1]
            is_open = open_ranks
        else:
            costs, room = potential.costs(loads, size)[0], potential.room
            is_open = None if open_ranks is None else open_ranks[potential.ranks]
        needed = loads[..., -1] + table.everywhere[row, -1]
        costs[(room.reshape(-1, size) < needed.reshape(1, -1)).any(1)] = np.inf
        if is_open is not None:
            costs[(~is_open.reshape(-1, size) & held).any(1)] = np.inf
        return costs


def _least(costs: Array, number: int, size: int, potential: Potential) -> float:
    """What the pieces of a cut add at least: those on one group's blocks count as if they were on several."""
    if number == 1:
        return float(costs.min())
    per_group = potential.group // size if size < potential.group else 1
    if per_group > 1 and len(costs) // per_group >= number:
        costs = costs.reshape(-1, per_group).min(1)
    if len(costs) < number:
        return np.inf
    return float(np.sort(costs)[:number].sum())
