"""Packing in two levels: each piece looks at all hosts, then at the ranks of the few best. Pure, as `planner.search`.

On thousands of ranks most of what a packing asks of each rank it can ask of each host: what its ranks carry on average.
That is a small array, so every piece can look at all hosts; only on those where it adds least are ranks looked at.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts, groups
from planner.search.placement import PUT, Part, Placement, even
from planner.search.potential import powered
from planner.search.problem import Problem
from planner.search.starts import Start

MANY_HOSTS = 128
"""From so many on, it is better than to look at all ranks where items are few;"""
SEVERAL_HOSTS = 64
"""from so many on where they are many, and as good and quicker for starts like the optimum."""
SOME_HOSTS = 8
"""from so many on it is quick for such starts of few items, besides."""
_POWER = 8
_MENU = 3
"""Cuts of an item to choose from."""
_WORSE = 1.25
"""By how much they may cost more than the best."""
_LOOKED_AT = 12
"""Hosts whose ranks are looked at."""
_MOVES = 300
_LARGEST = 6
"""Pieces of a rank of which one passes to another."""
_FAR = 1.1
"""So much worse than another, a placement is not evened out."""
_COMPARED = 0.3
"""Work for each cut, of all that there are."""
_MEMORY = 0.1
"""Weight of memory, against the sum of the target."""


def can_pack(problem: Problem, group: int, hosts: int = MANY_HOSTS) -> bool:
    """Whether a problem has many alike hosts, and nothing that minds which one it gets.

    Args:
        group: ranks in a host.
        hosts: so many at least.
    """
    return len(problem.capacity) // group >= hosts and not (problem.allowed or problem.spread or problem.table.ragged)


def pack_hosts(
    problem: Problem, cuts: Cuts, start: Start, group: int, known: float = np.inf
) -> tuple[Placement | None, float]:
    """A placement of all items, and the work, in about microseconds.

    None where an item does not fit, or where the placement is far worse than one that is known.

    Args:
        group: ranks in a host.
        known: seconds of that.
    """
    packer = _HostPacker(problem, cuts, start, group)
    if not packer.place() or packer.seconds() > _FAR * known:
        return None, packer.work
    packer.even_out()
    placement = packer.placement()
    return (placement if placement.fits() else None), packer.work


class _HostPacker:
    """Where pieces are, by host and by rank. A block larger than a host is looked at by host alone.

    Loads are in scales, the same all the time: another scale is another weight.
    """

    def __init__(self, problem: Problem, cuts: Cuts, start: Start, group: int) -> None:
        self.problem, self.cuts, self.start = problem, cuts, start
        self.group = group
        self.work = _COMPARED * len(cuts.row)
        self.least = 1e-3 * float(start.target.sum()) + 1e-30
        self.scale = np.append(np.maximum(start.target, self.least), max(float(problem.capacity.max()), 1.0))
        self.ranks: Array = problem.base.reshape(-1, self.group, problem.base.shape[1]) / self.scale
        self.hosts: Array = self.ranks.mean(1)
        self.weight = np.append(np.maximum(start.target, self.least), _MEMORY * float(start.target.sum()))
        self.shared = np.append(problem.span > 1, False)
        self.room = problem.capacity.reshape(-1, self.group).min(1) / self.scale[-1]
        self.least_room, self.fullest = float(self.room.min()), float(self.ranks[..., -1].max())
        self.every_seconds: list[float] = problem.table.everywhere[cuts.row, :-1].sum(1).tolist()
        self.every_bytes: list[float] = (problem.table.everywhere[cuts.row, -1] / self.scale[-1]).tolist()
        self.size: list[int] = problem.table.size[cuts.row].tolist()
        self.filled: list[int] = problem.table.filled[cuts.row].tolist()
        self.number: list[int] = cuts.number.tolist()
        # of a piece, averaged over the ranks of each host that it lies on
        small = problem.table.filled[cuts.row] < self.group
        self.mean = cuts.piece * np.where(small[:, None], groups(problem)[cuts.row] / self.group, 1.0)
        self.own = np.where(self.shared, 0.0, cuts.piece)  # what a host shares is the same wherever it lies
        self.chosen = [-1] * len(problem.item_class)
        self.blocks: list[list[int]] = [[] for _ in problem.item_class]
        self.every = 0.0
        self.common: Array | None = None  # of pieces that are as large as the machine, where not yet added
        self.before, self.after = powered(self.hosts, _POWER), np.empty_like(self.hosts)
        self._weigh(self.weight)

    def _weigh(self, weight: Array) -> None:
        """Take weights for phases."""
        self.weight = weight
        self.weight_own = np.where(self.shared, 0, weight) / self.group
        self.weight_shared = np.where(self.shared, weight, 0)

    def place(self) -> bool:
        """All items, largest first."""
        cuts, start = self.cuts, self.start
        order = np.lexsort((start.cost, cuts.owner))
        turn = np.arange(len(order)) - cuts.start[cuts.owner[order]]
        is_close = start.cost[order] <= _WORSE * start.cost[start.first][cuts.owner[order]] + 1e-30
        taken = order[(turn < _MENU) & is_close]
        edges = np.searchsorted(cuts.owner[taken], np.arange(len(cuts.start))).tolist()
        size = self.problem.table.size[cuts.row[start.first]]
        share = (self.mean[start.first] / self.scale).max(1) * np.maximum(1, size // self.group) ** 2
        for item in np.argsort(-share[cuts.item], kind="stable").tolist():
            owner = int(cuts.item[item])
            if not self._put(item, taken[edges[owner] : edges[owner + 1]].tolist()):
                return False
        return True

    def _put(self, item: int, menu: list[int]) -> bool:
        best: tuple[float, int, Integers] | None = None
        if len(menu) == 1 and self.filled[menu[0]] == len(self.problem.capacity) and self.number[menu[0]] == 1:
            best = 0.0, menu[0], np.zeros(1, np.int64)  # there is one way; whether all fits is found out at the end
            menu = []
        for cut in menu:
            number = self.number[cut]
            grown, blocks = self._places(cut, max(_LOOKED_AT, 2 * number))
            if number > len(grown):
                continue
            order = grown.argsort(kind="stable")[:number] if number > 1 else np.array([grown.argmin()])
            cost = float(grown[order].sum()) + self.every_seconds[cut]
            if isfinite(cost) and (best is None or cost < best[0]):
                best = cost, cut, blocks[order]
        if best is None:
            return False
        _, cut, found = best
        self.chosen[item], self.blocks[item] = cut, found.tolist()
        self.every += self.every_bytes[cut]
        self._change(cut, found, 1.0)
        return True

    def _change(self, cut: int, blocks: Integers, sign: float) -> None:
        """Put pieces on blocks, or take them away; at most one on a host."""
        size, filled, width = self.size[cut], self.filled[cut], len(self.scale)
        mean = self.mean[cut] * (sign / self.scale)
        if filled == len(self.problem.capacity):
            self.common = mean if self.common is None else self.common + mean
            return
        ranks = self.ranks.reshape(-1, size, width)
        ranks[blocks, :filled] += self.own[cut] * (sign / self.scale)
        if sign > 0:
            self.fullest = max(self.fullest, float(ranks[blocks, :filled, -1].max()))
        if size > self.group:
            shape, reached = (-1, size // self.group, width), -(-filled // self.group)
            self.hosts.reshape(shape)[blocks, :reached] += mean
            self.before.reshape(shape)[blocks] = powered(self.hosts.reshape(shape)[blocks], _POWER)
            return
        at = blocks * size // self.group
        after = self.hosts[at] + mean
        self.hosts[at] = after
        self.before[at] = powered(after, _POWER)

    def _add_common(self) -> None:
        """Add what whole machines got since the last time."""
        if self.common is not None:
            self.hosts += self.common
            self.ranks += self.common
            self.fullest += float(self.common[-1])
            self.common = None
            self.before = powered(self.hosts, _POWER)

    def _places(self, cut: int, most: int) -> tuple[Array, Integers]:
        """By how much the potential grows with a piece on the best block of each of some hosts; and those blocks."""
        size, load, own = self.size[cut], self.mean[cut] / self.scale, self.own[cut] / self.scale
        filled = self.filled[cut]
        self.work += 14 + 0.004 * self.hosts.size
        self._add_common()
        np.add(self.hosts, load, out=self.after)
        for _ in range(3):
            np.multiply(self.after, self.after, out=self.after)
        self.after -= self.before
        grown: Array = self.after @ self.weight
        is_tight = self.fullest + max(float(load[-1]), float(own[-1])) + self.every > self.least_room
        if is_tight:
            grown[self.hosts[:, -1] + load[-1] + self.every > self.room] = np.inf
        if size > self.group:
            grown = grown.reshape(-1, size // self.group)[:, : -(-filled // self.group)].sum(1)
        if most < len(grown):
            near = grown.argpartition(most)[:most]
            near.sort()
        else:
            near = np.arange(len(grown))
        if size > self.group:
            return grown[near], near
        x = self.ranks[near]
        self.work += 14 + 0.008 * x.size
        put = own if filled == size else own * (np.arange(size) < filled)[:, None]
        after = x.reshape(len(near), -1, size, len(self.scale)) + put
        full = after[..., -1].max(2) + self.every > self.room[near][:, None] if is_tight else None
        inside: Array = (
            powered(after, _POWER) @ self.weight_own - (powered(x, _POWER) @ self.weight_own).reshape(after.shape[:3])
        ).sum(2)
        if full is not None:
            inside[full] = np.inf
        best = inside.argmin(1)
        value: Array = inside.min(1) + self.after[near] @ self.weight_shared
        if is_tight:
            value[np.isinf(grown[near])] = np.inf
        return value, near * (self.group // size) + best

    def seconds(self) -> float:
        """Of what is placed, but for set-ups."""
        rows = self.cuts.row[[cut for cut in self.chosen if cut >= 0]]
        self._add_common()
        most = self._peaks(slice(None)).max(0)
        return float((most * self.scale + self.problem.table.everywhere[rows].sum(0))[:-1].sum())

    def even_out(self) -> None:
        """Pieces from the ranks that decide a phase to where they add less."""
        on: list[dict[tuple[int, int], None]] = [{} for _ in self.hosts]
        for item, blocks in enumerate(self.blocks):
            size = self.size[self.chosen[item]]
            if size <= self.group:
                for index, block in enumerate(blocks):
                    on[block * size // self.group][item, index] = None
        rest, phases, weight = 0, len(self.scale) - 1, self.weight
        self._add_common()
        peaks = self._peaks(slice(None))
        for turn in range(_MOVES):
            most = np.append(np.maximum(peaks.max(0)[:-1], self.least / self.scale[:-1]), 1.0)
            self._weigh(weight * powered(1 / most, _POWER))
            self.work += 20 + 0.003 * peaks.size
            phase = turn % phases
            at = int(peaks[:, phase].argmax())
            rank = int(self.ranks[at, :, phase].argmax())
            changed = self._relieve(at, rank, phase, on, 1e-7 * float(weight.sum()) / self.group)
            peaks[changed] = self._peaks(changed)
            rest = 0 if changed else rest + 1
            if rest >= phases:
                break

    def _peaks(self, hosts: slice | list[int]) -> Array:
        """(hosts, phases + 1) of the slowest rank of each, in scales."""
        found: Array = np.where(self.shared, self.hosts[hosts], self.ranks[hosts].max(1))
        return found

    def _relieve(
        self, host: int, rank: int, phase: int, on: list[dict[tuple[int, int], None]], gain: float
    ) -> list[int]:
        """Put the piece of a rank elsewhere whose leaving gains most, and so much at least; the hosts that changed."""
        found, there = (-1, -1, -1), []
        for item, index in on[host]:
            cut = self.chosen[item]
            first = self.blocks[item][index] * self.size[cut] % self.group
            if (self.shared[phase] or first <= rank < first + self.filled[cut]) and self.mean[cut][phase] > 0:
                there.append((-float(self.mean[cut][phase]), item, index))
        for _, item, index in sorted(there)[:_LARGEST]:
            cut, block = self.chosen[item], self.blocks[item][index]
            here = np.array([block])
            self._change(cut, here, -1.0)
            back = self._growth_at(cut, block)
            grown, blocks = self._places(cut, _LOOKED_AT)
            grown[(blocks[:, None] == np.array(self.blocks[item])).any(1)] = np.inf
            to = int(grown.argmin())
            self._change(cut, here, 1.0)
            if back - float(grown[to]) > gain:
                gain, found = back - float(grown[to]), (item, index, int(blocks[to]))
        item, index, to = found
        if item < 0:
            return []
        cut = self.chosen[item]
        self._change(cut, np.array([self.blocks[item][index]]), -1.0)
        self._change(cut, np.array([to]), 1.0)
        self.blocks[item][index] = to
        other = to * self.size[cut] // self.group
        del on[host][item, index]
        on[other][item, index] = None
        return [host, other]

    def _growth_at(self, cut: int, block: int) -> float:
        size = self.size[cut]
        host, first = divmod(block * size, self.group)
        x = self.ranks[host, first : first + self.filled[cut]]
        grown = ((powered(x + self.own[cut] / self.scale, _POWER) - powered(x, _POWER)) @ self.weight_own).sum()
        y = self.hosts[host]
        shared = (powered(y + self.mean[cut] / self.scale, _POWER) - powered(y, _POWER)) @ self.weight_shared
        return float(grown + shared)

    def placement(self) -> Placement:
        """All of it."""
        parts, units = [], self.problem.table.units
        for cut, blocks in zip(self.chosen, self.blocks, strict=True):
            row = int(self.cuts.row[cut])
            parts.append(Part(row, tuple(blocks), even(int(units[row]), len(blocks))))
        self.work += PUT * sum(map(len, self.blocks))
        return Placement.of(self.problem, parts)
