"""`Potential`: what a placement costs, made smooth, so that every rank near the slowest counts. Pure.

[Note: potential]
The slowest rank of a phase is replaced by a norm over ranks of a high power: sum over phases of scale * (sum over ranks
of (load / scale)^power)^(1 / power). It falls whenever load leaves a rank near the slowest, also while others stay as
slow, so that a search that takes one piece at a time sees where to go. The power rises as the search goes on. Memory
counts as one more phase, of little weight until a rank is nearly full.

Of many ranks only a *scope* is looked at: the idlest groups of ranks, a group being what shares a phase. Blocks that
are larger than a group are looked at by the most loaded rank of each of their groups.
"""

from __future__ import annotations

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.placement import SLACK, Placement
from planner.search.problem import Problem, Ranks

ALL_IN_SCOPE = 256
"""Up to so many ranks all are looked at."""
_GROUPS = 12


def powered(x: Array, power: int, out: Array | None = None) -> Array:
    """x ** power for a power of two; `out` may be x itself."""
    if power > 1:
        x = np.multiply(x, x, out=out)
    while power > 2:
        np.multiply(x, x, out=x)
        power //= 2
    return x


class Potential:
    """The potential of a placement, see [Note: potential].

    Args:
        target: (phases,) seconds by phase that a good placement may have.
        memory: weight of memory, against the sum of the target.

    Attributes:
        group: ranks in a group.
        ranks: (scope,) those in scope, ascending, whole groups.
        x: (scope, phases + 1) load in scales.
        work: done so far, in about microseconds: a measure of time that is the same on every machine.
    """

    def __init__(self, placement: Placement, target: Array, memory: float) -> None:
        self.placement = placement
        problem = placement.problem
        self.num_ranks = len(problem.capacity)
        self.group = ranks_together(problem)
        self.target = np.maximum(target, 1e-3 * float(target.sum()) + 1e-30)
        self.memory = memory
        self.limit = self._whole = problem.capacity * (1 + SLACK)
        self.scale = np.append(self.target, max(float(problem.capacity.max()), 1.0))
        self.power = 4
        self.weight = np.ones(len(self.scale))
        self.ranks: Integers = np.arange(self.num_ranks)
        self.x = self.xq = np.zeros((0, len(self.scale)))
        self.room = np.zeros(0)
        self._most = self._mean = np.zeros((0, len(self.scale)))
        self.work = 0.0
        self._span = np.append(problem.span, 1).astype(np.float64)
        self._known: tuple[int, Array, Array] | None = None  # what the sums of groups are of
        self._summed = np.zeros((0, len(self.scale)))
        self._stale: set[int] = set()  # groups whose sums are to be made anew

    def reserve(self, size: float) -> None:
        """Keep so many bytes of every rank free, for what is put down later."""
        self.limit = self._whole - size

    def aim(self, power: int, is_building: bool = False) -> None:
        """Take a power, and what is placed now as the scale.

        Args:
            is_building: weigh phases as if all ranks were as loaded as the target.
        """
        self.power = power
        if is_building:
            self.scale[:-1] = self.target
        else:
            now = self.placement.local[:, :-1].max(0) + self.placement.every[:-1]
            # Where all is taken away rounding is left, of either sign: no scale.
            total = max(float(now.sum()), 1e-6 * float(self.target.sum()))
            self.scale[:-1] = np.maximum(now, 1e-3 * total + 1e-30)
        self.weigh(is_building)

    def weigh(self, is_building: bool = False) -> float:
        """Work out by how much each phase's norm grows with its sum over ranks; returns the potential."""
        sums = self._sums()
        least = float(self.num_ranks) if is_building else 1.0
        floored = np.maximum(sums, least)
        self.weight = self.scale / self.power * floored ** (1 / self.power - 1)
        total = float(self.scale[:-1].sum())
        # Of no weight it would leave no number of a piece that takes many times what a rank has.
        self.weight[-1] = max(self.memory * total / self.power / self.num_ranks, 1e-300)
        value = float((self.scale[:-1] * sums[:-1] ** (1 / self.power)).sum())
        return value + float(self.weight[-1] * sums[-1]) + self._setups()

    def _sums(self) -> Array:
        """(phases + 1,) sums over ranks of their loads, in scales, to the power."""
        if self.num_ranks <= ALL_IN_SCOPE:
            x = (self.placement.local + self.placement.every) / self.scale
            self.work += 25 + 0.006 * x.size
            found: Array = powered(x, self.power).sum(0)
            return found
        self._update()
        every, known = self.placement.every, self._known
        if known is None or known[0] != self.power or (known[1] != self.scale).any() or (known[2] != every).any():
            self._known = self.power, self.scale.copy(), every.copy()
            self._summed = np.zeros((self.num_ranks // self.group, len(self.scale)))
            self._stale = set(range(len(self._summed)))
        stale = np.fromiter(sorted(self._stale), np.int64, len(self._stale))
        self._stale = set()
        local = self.placement.local.reshape(-1, self.group, len(self.scale))[stale]
        x = (local + every) / self.scale
        self._summed[stale] = powered(x, self.power).sum(1)
        self.work += 35 + 0.001 * self._summed.size + 0.01 * x.size
        total: Array = self._summed.sum(0)
        return total

    def _setups(self) -> float:
        placement = self.placement
        return float(placement.problem.setups[placement.users > 0].sum())

    def multiple(self, size: int) -> Array:
        """(phases + 1,) by how much a block's ranks are fewer than those that its load is added to."""
        return np.maximum(1.0, self._span / size)

    def look(self, pieces: int = 1, open_ranks: Ranks | None = None, also: Integers | None = None) -> None:
        """Take a scope, for so many pieces.

        Args:
            open_ranks: (ranks,) the only ones of interest.
            also: ranks whose groups belong to it in any case.
        """
        if self.num_ranks > ALL_IN_SCOPE:
            groups = self.coolest(max(_GROUPS, pieces), open_ranks)
            if also is not None:
                groups = np.union1d(groups, also // self.group)
            self.ranks = (groups[:, None] * self.group + np.arange(self.group)).ravel()
        self.again()

    def again(self) -> None:
        """Look at the same scope again, after something was put on it."""
        placement = self.placement
        local = placement.local if self.num_ranks <= ALL_IN_SCOPE else placement.local[self.ranks]
        self.x = (local + placement.every) / self.scale
        limit = self.limit if self.num_ranks <= ALL_IN_SCOPE else self.limit[self.ranks]
        self.room = limit - local[:, -1] - placement.every[-1]
        self.xq = powered(self.x, self.power)
        self.work += 9 + 0.005 * self.x.size

    def peaks(self) -> Array:
        """(groups, phases + 1) of the most loaded rank of each group, by phase, in scales."""
        self._update()
        peaks: Array = (self._most + self.placement.every) / self.scale
        self.work += 20 + 0.003 * peaks.size
        return peaks

    def _update(self) -> None:
        """Bring what is known of groups up to date."""
        placement, group, width = self.placement, self.group, len(self.scale)
        if not len(self._most):
            self._most = np.zeros((self.num_ranks // group, width))
            self._mean = np.zeros((self.num_ranks // group, width))
            placement.touched.append((0, self.num_ranks))
        touched: set[int] = set()
        for low, high in placement.touched:
            touched.update(range(low // group, -(-high // group)))
        placement.touched.clear()
        if touched:
            self._stale |= touched
            at = np.fromiter(touched, np.int64, len(touched))
            loads = placement.local.reshape(-1, group, width)[at]
            self._most[at] = loads.max(1)
            self._mean[at] = loads.sum(1) / group
            self.work += 12 + 0.012 * loads.size

    def coolest(self, number: int, open_ranks: Ranks | None = None) -> Integers:
        """The groups that are idlest on average, ascending."""
        self._update()
        heat = powered((self._mean + self.placement.every) / self.scale, 4) @ self.weight
        self.work += 25 + 0.005 * self._mean.size
        if open_ranks is not None:
            heat = np.where(open_ranks.reshape(-1, self.group).any(1), heat, np.inf)
        return np.sort(np.argsort(heat, kind="stable")[:number])

    def costs(self, loads: Array, size: int, filled: int | None = None) -> Array:
        """(cuts, blocks) by how much the potential grows when a piece is put on each block of the scope.

        Args:
            loads: (cuts, phases + 1), or with ranks of the block in the middle.
            filled: ranks of a block that get them; all by default.
        """
        if filled is not None and filled < size:
            loads = loads[:, None] * self.placement.problem.partly_filled[size, filled]
        num, width = len(loads), loads.shape[-1]
        weight = self.weight * self.multiple(size)
        scaled = loads / self.scale
        blocks = len(self.x) // size
        if scaled.ndim == 3:
            x = self.x.reshape(1, blocks, size, width) + scaled[:, None]
            grown = (powered(x, self.power).reshape(num, blocks * size, width) - self.xq) @ weight
        else:
            grown = (powered(self.x + scaled[:, None], self.power) - self.xq) @ weight
        self.work += 12 + 0.004 * grown.size * width
        found: Array = grown.reshape(num, blocks, size).sum(2)
        return found

    def large_costs(self, loads: Array, size: int, filled: int, peaks: Array) -> Array:
        """The same for blocks that are larger than a group, for all ranks."""
        grown = (powered(peaks + (loads / self.scale)[:, None], self.power) - powered(peaks, self.power)) @ self.weight
        self.work += 15 + 0.008 * grown.size * loads.shape[-1]
        reached = -(-filled // self.group)
        found: Array = self.group * grown.reshape(len(loads), -1, size // self.group)[:, :, :reached].sum(2)
        return found


def ranks_together(problem: Problem) -> int:
    """Ranks in a group: every block must be a part of one, or be made of some."""
    num_ranks, span = len(problem.capacity), int(problem.span.max(initial=1))
    sizes = np.unique(problem.table.size)
    for group in (max(span, 8), span, 4, 2):
        if group >= span and num_ranks % group == 0 and ((group % sizes == 0) | (sizes % group == 0)).all():
            return group
    return num_ranks
