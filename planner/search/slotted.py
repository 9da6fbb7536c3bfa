"""Packing of a start that says how long ranks may take, see [Note: slots]. Pure, as `planner.search`.

First each piece gets a host, by what the host's ranks have left of their slots and by what they share; then pieces
change hosts until the fullest is no fuller than it must be; then each gets ranks of its host.
"""

from __future__ import annotations

import numpy as np

from planner.search.cost_table import Integers
from planner.search.placement import PUT, Part, Placement, even
from planner.search.potential import powered
from planner.search.problem import Ranks
from planner.search.slots import Loads, Slots

_POWER = 8
_OVER = 1e3
"""What it costs to put more on a host than its ranks have slots for."""
_LARGEST = 4
"""Pieces of the fullest host of which one goes elsewhere."""
_MOVES = 300
_ROUNDING = 1e-9


def pack_slots(loads: Loads, start: Slots) -> Placement:
    """A placement of all items, that may not fit; what it takes is added to the work of the loads."""
    packer = _SlotPacker(loads, start)
    packer.to_hosts()
    packer.even_out()
    packer.to_ranks()
    return packer.placement()


class _SlotPacker:
    """Pieces on hosts, and then on ranks.

    Attributes:
        own: (items, groups) of a piece on each of its ranks, in limits.
        slots: (items,) parts of a host that a piece takes.
        load: (items,) of it in what ranks share, in loads of the fullest host.
        used, full: (hosts,) sums of these.
        blocks: of each item.
        item, host: of each piece that is no larger than a host.
    """

    def __init__(self, loads: Loads, start: Slots) -> None:
        self.loads, self.group = loads, loads.group
        problem, cut = loads.problem, start.cut[loads.problem.item_class]
        self.problem, self.row = problem, loads.cuts.row[cut]
        self.size, self.number = problem.table.size[self.row], loads.cuts.number[cut]
        self.filled = problem.table.filled[self.row]
        self.ranks, self.hosts = len(problem.capacity), len(problem.capacity) // self.group
        own = loads.own.shape[1]
        self.own = loads.own[cut] / start.limit[:own]
        self.load = (loads.shared[cut] / np.maximum(start.load, 1e-30)).max(1, initial=0.0)
        beside = np.maximum(np.floor(1 / np.maximum(self.own.max(1), 1e-9) * (1 + _ROUNDING)), 1)
        self.slots = np.minimum(self.filled, self.group) / self.group / beside
        self.used, self.full = np.zeros(self.hosts), np.zeros(self.hosts)
        self.blocks: list[list[int]] = [[] for _ in cut]
        self.item = self.host = np.zeros(0, np.int64)

    def to_hosts(self) -> None:
        """Large blocks first, then large pieces, each where it adds least."""
        order = np.lexsort((-np.maximum(self.slots, self.load), -np.maximum(self.size, self.group)))
        sizes, numbers, reached = self.size.tolist(), self.number.tolist(), (-(-self.filled // self.group)).tolist()
        slots, loads = self.slots.tolist(), self.load.tolist()
        items: list[int] = []
        hosts: list[Integers] = []
        before = np.zeros(self.hosts)
        for item in order.tolist():
            size, number, slot, load = sizes[item], numbers[item], slots[item], loads[item]
            if self.filled[item] >= self.ranks:
                self.blocks[item] = [0]
            elif size > self.group:
                width = size // self.group
                most = np.maximum(self.used, self.full).reshape(-1, width)[:, : reached[item]].max(1)
                at = np.argsort(most, kind="stable")[:number]
                self.blocks[item] = at.tolist()
                at = (at[:, None] * width + np.arange(reached[item])).ravel()
                self.used[at] += slot
                self.full[at] += load
                before = powered(self.full, _POWER) + powered(self.used, _POWER)
            else:
                used = self.used + slot
                grown = powered(self.full + load, _POWER) + powered(used, _POWER) - before
                grown[used > 1 + _ROUNDING] += _OVER
                at = grown.argpartition(number - 1)[:number] if number < self.hosts else np.arange(self.hosts)
                self.used[at] += slot
                self.full[at] += load
                before[at] = powered(self.full[at], _POWER) + powered(self.used[at], _POWER)
                items.append(item)
                hosts.append(at)
        self.loads.work += (14 + 0.02 * self.hosts) * len(items)
        if items:
            self.item = np.repeat(np.array(items), [len(at) for at in hosts])
            self.host = np.concatenate(hosts)

    def even_out(self) -> None:
        """Pieces of the fullest host change places with others, or go to another host."""
        if not len(self.item):
            return
        has = np.zeros((len(self.row), self.hosts), dtype=np.bool_)
        has[self.item, self.host] = True
        every, slots, load = np.arange(self.hosts), self.slots[self.item], self.load[self.item]
        for _ in range(_MOVES):
            here = int(self.full.argmax())
            mine = np.flatnonzero(self.host == here)
            mine = mine[np.argsort(-load[mine], kind="stable")[:_LARGEST]]
            if not len(mine):
                return
            self.loads.work += 50 + 0.008 * len(mine) * (len(self.item) + self.hosts)
            item, slot, own = self.item[mine][:, None], slots[mine][:, None], load[mine][:, None]
            most = np.where((self.used + slot <= 1 + _ROUNDING) & ~has[item, every], self.full + own, np.inf)
            most = np.maximum(most, self.full[here] - own)
            more, gained = slots - slot, load - own  # here, were they exchanged
            may = (self.used[here] + more <= 1 + _ROUNDING) & (self.used[self.host] - more <= 1 + _ROUNDING)
            may &= ~has[self.item, here] & ~has[item, self.host]
            swapped = np.where(may, np.maximum(self.full[here] + gained, self.full[self.host] - gained), np.inf)
            moved, to = divmod(int(most.argmin()), self.hosts)
            one, other = divmod(int(swapped.argmin()), len(self.item))
            if min(most[moved, to], swapped[one, other]) >= self.full[here] * (1 - _ROUNDING):
                return
            if most[moved, to] <= swapped[one, other]:
                self._move(int(mine[moved]), to, has)
            else:
                there = int(self.host[other])
                self._move(int(mine[one]), there, has)
                self._move(other, here, has)

    def _move(self, piece: int, to: int, has: Ranks) -> None:
        item, before = int(self.item[piece]), int(self.host[piece])
        has[item, before], has[item, to] = False, True
        self.host[piece] = to
        for of, part in ((self.used, self.slots[item]), (self.full, self.load[item])):
            of[before] -= part
            of[to] += part

    def to_ranks(self) -> None:
        """Of each host the largest piece first, where the fullest rank is least full; one of all hosts at a time."""
        x = np.zeros((self.hosts, self.group, self.own.shape[1]))
        for item in np.flatnonzero((self.size > self.group) & (self.filled < self.ranks)).tolist():
            width, reached = int(self.size[item]) // self.group, -(-int(self.filled[item]) // self.group)
            x.reshape(-1, width, *x.shape[1:])[self.blocks[item], :reached] += self.own[item]
        if not len(self.item):
            return
        size, filled = self.size[self.item], self.filled[self.item]
        order = np.lexsort((-self.own[self.item].max(1), -size, self.host))
        turn = np.arange(len(order)) - np.searchsorted(self.host[order], self.host[order])
        block = np.zeros(len(order), np.int64)
        for now in range(int(turn.max()) + 1):
            pieces = order[turn == now]
            for width in np.unique(size[pieces]).tolist():
                of = pieces[size[pieces] == width]
                hosts, own = self.host[of], self.own[self.item[of]]
                blocks = x.reshape(self.hosts, self.group // width, width, -1)
                lanes = (np.arange(width) < filled[of][:, None])[..., None]
                after = (blocks[hosts] + own[:, None, None]) * lanes[:, None]
                at = after.max((2, 3)).argmin(1)
                blocks[hosts, at] += own[:, None] * lanes
                block[of] = hosts * (self.group // width) + at
                self.loads.work += 25 + 0.01 * after.size
        for piece, item in enumerate(self.item.tolist()):
            self.blocks[item].append(int(block[piece]))

    def placement(self) -> Placement:
        """All of it."""
        units = self.problem.table.units[self.row].tolist()
        each = zip(self.row.tolist(), self.blocks, units, strict=True)
        parts = [Part(row, tuple(blocks), even(number, len(blocks))) for row, blocks, number in each]
        self.loads.work += PUT * sum(map(len, self.blocks))
        return Placement.of(self.problem, parts)
