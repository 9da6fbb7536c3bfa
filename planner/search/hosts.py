"""Packing in two levels: each piece looks at all hosts, then at the ranks of the few best. Pure, as `planner.search`.

On thousands of ranks most of what a packing asks of each rank it can ask of each host: what its ranks carry on average.
That is a small array, so every piece can look at all hosts; only on those where it adds least are ranks looked at.
"""

from __future__ import annotations

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts, groups
from planner.search.placement import Part, Placement, even
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
_FAR = 1.1
"""So much worse than another, a placement is not evened out."""
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
    """Where pieces are, by host and by rank. A block larger than a host is looked at by host alone."""

    def __init__(self, problem: Problem, cuts: Cuts, start: Start, group: int) -> None:
        self.problem, self.cuts, self.start = problem, cuts, start
        self.group = group
        self.work = 0.0
        self.ranks: Array = problem.base.reshape(-1, self.group, problem.base.shape[1]).copy()
        self.hosts: Array = self.ranks.mean(1)
        self.least = 1e-3 * float(start.target.sum()) + 1e-30
        self.scale = np.append(np.maximum(start.target, self.least), max(float(problem.capacity.max()), 1.0))
        self.weight = np.append(np.maximum(start.target, self.least), _MEMORY * float(start.target.sum()))
        self.room = problem.capacity.reshape(-1, self.group).min(1)
        self.shared = np.append(problem.span > 1, False)
        self.weight_own, self.weight_shared = (
            np.where(self.shared, 0, self.weight),
            np.where(self.shared, self.weight, 0),
        )
        self.every_seconds: list[float] = problem.table.everywhere[cuts.row, :-1].sum(1).tolist()
        self.size = problem.table.size[cuts.row].tolist()
        # of a piece, averaged over the ranks of each host that it lies on
        small = problem.table.size[cuts.row] < self.group
        self.mean = cuts.piece * np.where(small[:, None], groups(problem)[cuts.row] / self.group, 1.0)
        self.own = np.where(self.shared, 0.0, cuts.piece)  # what a host shares is the same wherever it lies
        self.chosen = [-1] * len(problem.item_class)
        self.blocks: list[list[int]] = [[] for _ in problem.item_class]
        self.every = 0.0
        self.common = np.zeros(len(self.scale))  # of pieces that are as large as the machine
        self._known: Array | None = None  # (hosts,) their potential

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
        best: tuple[float, int, list[int]] | None = None
        if len(menu) == 1 and self.size[menu[0]] == len(self.problem.capacity) and self.cuts.number[menu[0]] == 1:
            best = 0.0, menu[0], [0]  # there is one way, and whether all fits is found out at the end
            menu = []
        for cut in menu:
            number = int(self.cuts.number[cut])
            grown, blocks = self._places(cut, max(_LOOKED_AT, 2 * number))
            if number > len(grown):
                continue
            order = np.argsort(grown, kind="stable")[:number]
            cost = float(grown[order].sum()) + self.every_seconds[cut]
            if np.isfinite(cost) and (best is None or cost < best[0]):
                best = cost, cut, blocks[order].tolist()
        if best is None:
            return False
        _, cut, found = best
        self.chosen[item], self.blocks[item] = cut, found
        self.every += float(self.problem.table.everywhere[self.cuts.row[cut], -1])
        for block in found:
            self._change(cut, block, 1.0)
        return True

    def _change(self, cut: int, block: int, sign: float) -> None:
        size = self.size[cut]
        if size == len(self.problem.capacity):
            self.common += sign * self.mean[cut]
            self._known = None
            return
        host, first = divmod(block * size, self.group)
        hosts = slice(host, host + max(1, size // self.group))
        self.hosts[hosts] += sign * self.mean[cut]
        self.ranks[hosts, first : first + size] += sign * self.own[cut]
        if self._known is not None:
            self._known[hosts] = self._potential(self.hosts[hosts])

    def _potential(self, hosts: Array) -> Array:
        """(hosts,) of these, by their mean over ranks."""
        found: Array = powered((hosts + self.common) / self.scale, _POWER) @ self.weight
        return found

    def _places(self, cut: int, most: int) -> tuple[Array, Integers]:
        """By how much the potential grows with a piece on the best block of each of some hosts; and those blocks."""
        size, load = self.size[cut], self.mean[cut]
        self.work += 16 + 0.005 * self.hosts.size
        if self._known is None:
            self._known = self._potential(self.hosts)
        grown = self._potential(self.hosts + load) - self._known
        grown[self.hosts[:, -1] + self.common[-1] + load[-1] + self.every > self.room] = np.inf
        if size > self.group:
            grown = grown.reshape(-1, size // self.group).sum(1)
        near = np.argpartition(grown, most)[:most] if most < len(grown) else np.arange(len(grown))
        near.sort()
        if size > self.group:
            return grown[near], near
        loads = self.ranks[near].reshape(len(near), -1, size, len(self.scale))
        self.work += 16 + 0.008 * loads.size
        x = (loads + self.common) / self.scale
        after = x + self.own[cut] / self.scale
        inside = ((powered(after, _POWER) - powered(x, _POWER)) @ self.weight_own).sum(2)
        full = after[..., -1].max(2) * self.scale[-1] + self.every > self.room[near][:, None]
        inside[full] = np.inf
        best = inside.argmin(1)
        y = (self.hosts[near] + self.common) / self.scale
        together = (powered(y + load / self.scale, _POWER) - powered(y, _POWER)) @ self.weight_shared
        value = inside[np.arange(len(near)), best] / self.group + together
        return np.where(np.isfinite(grown[near]), value, np.inf), near * (self.group // size) + best

    def seconds(self) -> float:
        """Of what is placed, but for set-ups."""
        rows = self.cuts.row[[cut for cut in self.chosen if cut >= 0]]
        return float((self._most() + self.problem.table.everywhere[rows].sum(0))[:-1].sum())

    def _most(self) -> Array:
        """(phases + 1,) of the slowest rank or host."""
        found: Array = np.where(self.shared, self.hosts.max(0), self.ranks.max((0, 1))) + self.common
        return found

    def even_out(self) -> None:
        """Pieces from the ranks that decide a phase to where they add less."""
        on: list[dict[tuple[int, int], None]] = [{} for _ in self.hosts]
        for item, blocks in enumerate(self.blocks):
            size = self.size[self.chosen[item]]
            if size <= self.group:
                for index, block in enumerate(blocks):
                    on[block * size // self.group][item, index] = None
        rest, phases = 0, len(self.scale) - 1
        for turn in range(_MOVES):
            self.scale[:-1] = np.maximum(self._most()[:-1], self.least)
            self._known = None
            phase = turn % phases
            at = self.hosts[:, phase].argmax() if self.shared[phase] else self.ranks[..., phase].max(1).argmax()
            rank = int(self.ranks[at, :, phase].argmax())
            rest = 0 if self._relieve(int(at), rank, phase, on) else rest + 1
            if rest >= phases:
                break

    def _relieve(self, host: int, rank: int, phase: int, on: list[dict[tuple[int, int], None]]) -> bool:
        """Put the piece of a rank elsewhere whose leaving gains most; whether there is one."""
        gain, found = 1e-7 * float(self.weight.sum()) / self.group, (-1, -1, -1)
        for item, index in on[host]:
            cut, block = self.chosen[item], self.blocks[item][index]
            size = self.size[cut]
            first = block * size % self.group
            if not self.shared[phase] and not first <= rank < first + size:
                continue
            if self.mean[cut][phase] <= 0:
                continue
            self._change(cut, block, -1.0)
            back = self._growth_at(cut, block)
            grown, blocks = self._places(cut, _LOOKED_AT)
            grown[(blocks[:, None] == np.array(self.blocks[item])).any(1)] = np.inf
            to = int(grown.argmin())
            self._change(cut, block, 1.0)
            if back - float(grown[to]) > gain:
                gain, found = back - float(grown[to]), (item, index, int(blocks[to]))
        item, index, to = found
        if item < 0:
            return False
        cut = self.chosen[item]
        self._change(cut, self.blocks[item][index], -1.0)
        self._change(cut, to, 1.0)
        self.blocks[item][index] = to
        del on[host][item, index]
        on[to * self.size[cut] // self.group][item, index] = None
        return True

    def _growth_at(self, cut: int, block: int) -> float:
        size = self.size[cut]
        host, first = divmod(block * size, self.group)
        x = (self.ranks[host, first : first + size] + self.common) / self.scale
        grown = (powered(x + self.own[cut] / self.scale, _POWER) - powered(x, _POWER)).sum(0) / self.group
        y = (self.hosts[host] + self.common) / self.scale
        shared = powered(y + self.mean[cut] / self.scale, _POWER) - powered(y, _POWER)
        return float(np.where(self.shared, shared, grown) @ self.weight)

    def placement(self) -> Placement:
        """All of it."""
        placement, units = Placement(self.problem), self.problem.table.units
        for item, (cut, blocks) in enumerate(zip(self.chosen, self.blocks, strict=True)):
            row = int(self.cuts.row[cut])
            placement.add(item, Part(row, tuple(blocks), even(int(units[row]), len(blocks))))
        self.work += 20.0 * sum(map(len, self.blocks))
        return placement
