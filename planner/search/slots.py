"""Starts that say beforehand how long a rank may take for each phase. Pure, as `planner.search`.

[Note: slots]
Where there are about as many pieces as ranks, no rank is loaded evenly: a phase takes as long as its largest piece, or
two or three of them, and what shares a rank with another wastes what the other leaves. So a start is made the other
way round. Each phase that ranks have for themselves gets a *limit*; of a piece, so many fit on a rank beside each other
as the least of limit / load over phases, and it takes that part of the rank's *slot*. Of each item the cut is taken
that costs least everywhere and in phases that ranks share, with a price on slots at which all together have enough of
them. What that costs with the limits is a function of these few, which is lowered one limit at a time.

[Note: closed hosts] A piece that takes all slots of its hosts leaves nobody room for the rest of what their ranks
share, and one that takes most of that leaves their slots to few. Where pieces are large that is much of all there is,
where they are small hosts have something of everything. So starts are made both ways: with hosts that are *closed* by
such pieces, which then cost as much as if they took all, and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts
from planner.search.placement import Placement
from planner.search.potential import ranks_together
from planner.search.problem import Problem, Ranks
from planner.search.starts import setup_sets

_FILLED = ((0.95, 1.06), (0.85, 1.06), (0.95, 1.15), (0.85, 1.15), (0.7, 1.1))
"""Share of the slots that pieces are expected to take, and by how much the fullest host is above the mean."""
_LONGER = 1.7
"""Limits to begin with are those of the relaxed optimum, so much longer; or a placement's."""
_STEPS = (0.25, 0.08)
"""By which a limit changes, in turn;"""
_HOPE = 1.03
"""By how much what the first leads to may be above what is of interest."""
_WIDER = 1.1
"""By how much limits are above those for slots that are filled more, to begin with."""
_TURNS = 4
"""so often at most, each."""
_SAMPLED = 128
"""Largest classes that are looked at while limits change, and about as many of the others, each for several."""
_KEPT, _NEAR = 40, 1.25
"""Cuts of a class that are looked at while limits change: those that cost least with limits so much longer;"""
_BESIDE = 8.0
"""of more pieces beside each other than so many it does not matter how many;"""
_BARRED = 1e6
"""what is added where a piece is longer."""
_OPEN = 0.5
"""Of what hosts share, from which on a piece leaves slots to few."""
_CLOSED, _ANEW = 0.9, 3
"""Share of the hosts that may be closed; how often it is found anew how much they have then."""
_ALIKE = 0.01
"""Of the largest load, by which phases may differ that have one limit together."""
_HALVES, _SOON = 10, 5
"""How often the range of the price of slots is halved; while limits change."""
_LEAST = 1e-3
"""Of the sum of limits, each at least."""
_ROUNDING = 1e-9


class Slots(NamedTuple):
    """A start, see [Note: slots].

    Args:
        seconds: of a placement that is as even as expected.
        limit: (groups,) of the phases of each group, bytes last.
        cut: (classes,) of each class.
        load: (shared groups,) expected of the fullest host.
    """

    seconds: float
    limit: Array
    cut: Integers
    load: Array


class Loads:
    """What cuts put on ranks, by groups of phases that are in proportion.

    Attributes:
        own: (cuts, groups of phases that ranks have for themselves, then bytes) of a piece.
        shared: (cuts, groups of phases that ranks share) of a piece.
        mean: (cuts, groups of phases that ranks share) averaged over ranks.
        everywhere: (cuts,) seconds on all ranks.
        ranks: (cuts,) that have a piece; 0 where all have.
        is_open: (cuts,) whether hosts are as many as pieces, of which each gets its own.
        group: ranks in a host.
        room: bytes of a rank.
        work: done so far, in about microseconds.
    """

    def __init__(self, problem: Problem, cuts: Cuts, placement: Placement) -> None:
        self.problem, self.cuts, self.group = problem, cuts, ranks_together(problem)
        row, phases = cuts.row, np.arange(len(problem.span))
        every = problem.table.everywhere[row]
        filled = problem.table.filled[row]
        is_whole = (filled >= len(problem.capacity))[:, None]
        piece, mean = np.where(is_whole, 0.0, cuts.piece), np.where(is_whole, 0.0, cuts.mean - every)
        own = _in_proportion(piece, phases[problem.span == 1])
        shared = _in_proportion(piece, phases[problem.span > 1])
        none = np.zeros((len(row), 0))
        self.groups = [*own, np.array([len(phases)]), *shared]
        self.own = np.column_stack([piece[:, g].sum(1) for g in self.groups[: len(own) + 1]])
        self.shared = np.column_stack([none, *(piece[:, g].sum(1) for g in shared)])
        self.mean = np.column_stack([none, *(mean[:, g].sum(1) for g in shared)])
        self.everywhere = every[:, :-1].sum(1) + np.where(is_whole, cuts.piece, 0.0)[:, :-1].sum(1)
        self.ranks = np.where(is_whole[:, 0], 0, filled * cuts.number).astype(np.float64)
        hosts = cuts.number * np.maximum(problem.table.size[row], self.group)
        self.is_open = is_whole[:, 0] | (hosts <= len(problem.capacity))
        self.room = float((problem.capacity - problem.base[:, -1]).min()) - float(placement.every[-1])
        self.counts = np.bincount(problem.item_class, minlength=len(cuts.start) - 1).astype(np.float64)
        self.work = 200 + 0.2 * len(row)
        with np.errstate(divide="ignore"):
            self.inverse = 1 / np.column_stack([self.own, self.shared])

    def limit(self, seconds: Array) -> Array:
        """(groups,) limits of some (phases,) seconds; of bytes, all there are."""
        found: Array = np.array([seconds[g].sum() if g[0] < len(seconds) else 0.0 for g in self.groups])
        found = np.maximum(found, _LEAST * float(found.sum()) + 1e-30)
        found[self.own.shape[1] - 1] = max(self.room, 1e-30)
        return found


def slots(loads: Loads, optimum: Array, placement: Placement, worth: float, most: float) -> Iterator[Slots]:
    """Starts, for each of `_FILLED`, near one limit after another.

    Args:
        optimum: (phases,) seconds of the relaxed optimum, see `bound`.
        placement: that is good.
        worth: seconds above which a start is of no interest.
        most: work of the loads after which there are no more.
    """
    sample, every, found = _sample(loads), np.flatnonzero(loads.counts), []
    is_time = np.array([group[0] < len(optimum) for group in loads.groups])
    begun = [loads.limit(_LONGER * optimum), loads.limit(placement.local[:, :-1].max(0))]
    for used in setup_sets(loads.problem, loads.cuts):
        menu = _Menu(loads, used, *sample)
        for number, limit in enumerate(begun if menu.is_one else []):
            found.append((*menu.narrow(limit).lower(limit, _STEPS[:1], _FILLED[0]), used, number))
    for seconds, limit, used, _ in sorted(found, key=lambda f: (f[0], f[2:])):
        if seconds > _HOPE * worth:
            return
        few = _Menu(loads, used, *sample).narrow(limit)
        all_of = _Menu(loads, used, every, loads.counts[every])
        pairs = [(limit, few, all_of), (limit, few.closing(), all_of.closing())]
        for number, filled in enumerate(_FILLED):
            last, pairs = pairs, []
            for limit, menu, whole in last:
                _, limit = menu.lower(np.where(is_time & (number > 0), _WIDER, 1.0) * limit, _STEPS, filled)
                start = whole.start(limit, filled)
                if loads.work > most:
                    return
                if start is not None and start.seconds <= worth:
                    pairs.append((limit, menu, whole))
                    yield start


class _Menu:
    """The cuts of some classes, as arrays (classes, most cuts of one).

    Args:
        used: set-ups that may be, a bit each.
        classes: those looked at.
        weight: (classes,) items that each stands for.
    """

    def __init__(self, loads: Loads, used: int, classes: Integers, weight: Array) -> None:
        problem, cuts = loads.problem, loads.cuts
        self.loads, self.classes, self.weight = loads, classes, weight
        number = np.diff(cuts.start)[classes]
        which = np.arange(int(number.max(initial=1)))
        is_one = which < number[:, None]
        self.at = np.where(is_one, cuts.start[classes][:, None] + which, 0)
        is_one &= loads.is_open[self.at] & (problem.table.kinds[cuts.row[self.at]] & ~used == 0)
        self.is_one = bool(is_one.any(1).all())
        self.own, self.inverse = loads.own.shape[1], np.moveaxis(loads.inverse[self.at], 2, 0).copy()
        self.everywhere = np.where(is_one, loads.everywhere[self.at], np.inf)
        self.ranks, self.mean = loads.ranks[self.at], loads.mean[self.at]
        self.total = self.mean.sum(2)
        hosts = cuts.number * -(-problem.table.filled[cuts.row] // loads.group) * loads.group / len(problem.capacity)
        self.part = np.where(self.ranks > 0, hosts[self.at], 0.0)  # of the hosts, that have a piece
        self.closes, self.closed, self.host = False, 0.0, np.zeros(self.mean.shape[2])
        self.each = np.arange(len(classes))
        self.paid = float(problem.setups[[k for k in range(len(problem.setups)) if used >> k & 1]].sum())
        self.price = 0.0

    def closing(self) -> _Menu:
        """The same with closed hosts, see [Note: closed hosts]."""
        found = copy(self)
        found.closes = True
        return found

    def narrow(self, limit: Array) -> _Menu:
        """Of each class those cuts alone that cost least near some limits."""
        if self.at.shape[1] <= _KEPT:
            return self
        self._taken(limit, _FILLED[0], _SOON)
        fit = (_NEAR * limit[:, None, None] * self.inverse).min(0)
        is_open = fit >= 1
        slots = self.ranks / np.clip(np.floor(fit), 1, _BESIDE)
        cost = self.everywhere + self.total + self.price * slots
        cost = np.where(is_open, cost, cost + _BARRED * (1 + 1 / np.maximum(fit, 1e-9)))
        kept = np.sort(np.argpartition(cost, _KEPT, axis=1)[:, :_KEPT], axis=1)
        found, at = copy(self), (self.each[:, None], kept)
        found.at, found.everywhere, found.ranks = self.at[at], self.everywhere[at], self.ranks[at]
        found.mean, found.total, found.part = self.mean[at], self.total[at], self.part[at]
        found.inverse = np.take_along_axis(self.inverse, kept[None], 2)
        self.loads.work += 0.05 * cost.size
        return found

    def start(self, limit: Array, filled: tuple[float, float]) -> Slots | None:
        """What is taken with some limits; None where a class has nothing that keeps to them."""
        self.closed, self.host = 0.0, limit[self.own :]
        for _ in range(_ANEW if self.closes else 1):
            seconds, taken, load = self._taken(limit, filled, _HALVES)
        cut = np.zeros(len(self.loads.counts), np.int64)
        cut[self.classes] = self.at[self.each, taken]
        return Slots(seconds, limit, cut, load) if np.isfinite(seconds) else None

    def lower(self, limit: Array, steps: tuple[float, ...], filled: tuple[float, float]) -> tuple[float, Array]:
        """Limits that cost less, one changed at a time; and what they cost."""
        self.closed, self.host = 0.0, limit[self.own :]
        best = self._taken(limit, filled, _SOON)[0]
        changed = [g for g in range(len(limit)) if g != self.own - 1]
        for step in steps:
            for _ in range(_TURNS):
                before = best
                for group in changed:
                    for factor in (1 + step, 1 / (1 + step)):
                        while True:
                            other = limit.copy()
                            other[group] *= factor
                            seconds = self._taken(other, filled, _SOON)[0]
                            if not seconds < best * (1 - 1e-5):
                                break
                            best, limit = seconds, other
                if best == before:
                    break
        return best, limit

    def _taken(self, limit: Array, filled: tuple[float, float], halves: int) -> tuple[float, Integers, Array]:
        """Seconds, the cut of each class among its own, and the load of the fullest host by group.

        Args:
            halves: of the range of the price.
        """
        share, above = filled
        beside = limit[0] * self.inverse[0]  # pieces that fit on a rank
        for group in range(1, self.own):
            np.minimum(beside, limit[group] * self.inverse[group], out=beside)
        with np.errstate(divide="ignore"):
            slots = self.ranks / np.floor(beside * (1 + _ROUNDING))
        for group in range(self.own, len(limit)):
            slots[limit[group] * self.inverse[group] < 1 - _ROUNDING] = np.inf
        is_open, total = np.isfinite(slots), self.total
        slots[~is_open] = 0.0
        if self.closes:
            slots, total, is_closed = self._closed(slots)
        cost = np.where(is_open, self.everywhere + above / (1 - self.closed) * total, np.inf)
        room = share * len(self.loads.problem.capacity)
        self.loads.work += 35 + 0.008 * slots.size
        taken, needed = self._cheapest(cost, slots, 0.0)
        if not np.isfinite(cost[self.each, taken]).all():
            return np.inf, taken, limit[self.own :]
        if needed > room:
            if float(self.weight @ np.where(is_open, slots, np.inf).min(1)) > room:
                return np.inf, taken, limit[self.own :]
            # Beside the bytes of much memory a few microseconds are rounded to none, four times which is none again.
            low, high = 0.0, self.price or max(float(limit.sum() - limit[self.own - 1]) / room, 1e-30)
            while True:
                taken, needed = self._cheapest(cost, slots, high)
                if needed <= room or high > 1e30:
                    break
                low, high = high, 4 * high
            if needed > room:
                return np.inf, taken, limit[self.own :]
            for _ in range(halves):
                middle = (low + high) / 2
                other, needed = self._cheapest(cost, slots, middle)
                low, high, taken = (low, middle, other) if needed <= room else (middle, high, taken)
            self.price = high
        others = self.weight
        if self.closes:
            alone = is_closed[self.each, taken]
            closed = above * float((others * self.part[self.each, taken])[alone].sum())
            self.closed, others = min(closed, _CLOSED), np.where(alone, 0.0, others)
        load = above / (1 - self.closed) * (others[:, None] * self.mean[self.each, taken]).sum(0)
        largest = (1 / self.inverse[self.own :, self.each, taken]).max(1, initial=0.0)
        self.host = load = np.maximum(load, largest)
        own = float(limit[: self.own - 1].sum())
        every = float((self.weight * self.everywhere[self.each, taken]).sum())
        return own + float(load.sum()) + every + self.paid, taken, load

    def _closed(self, slots: Array) -> tuple[Array, Array, Ranks]:
        """Slots and seconds of what hosts share, with what nobody else can have; and whether a cut closes its hosts."""
        whole = self.part * len(self.loads.problem.capacity)
        is_closed = (self.part > 0) & (slots >= whole * (1 - _ROUNDING))
        total = np.where(is_closed, np.maximum(self.part * float(self.host.sum()), self.total), self.total)
        load = np.zeros_like(slots)
        for group, seconds in enumerate(np.maximum(self.host, 1e-30).tolist(), self.own):
            np.maximum(load, 1 / np.maximum(seconds * self.inverse[group], 1e-9), out=load)
        slots = slots + np.clip(load - _OPEN, 0, 1 - _OPEN) * np.maximum(whole - slots, 0)
        self.loads.work += 0.006 * slots.size
        return slots, total, is_closed

    def _cheapest(self, cost: Array, slots: Array, price: float) -> tuple[Integers, float]:
        """(classes,) the cheapest cut of each; and the slots of all."""
        taken = (cost + price * slots if price else cost).argmin(1)
        self.loads.work += 10 + 0.001 * cost.size
        return taken, float((self.weight * slots[self.each, taken]).sum())


def _sample(loads: Loads) -> tuple[Integers, Array]:
    """Classes, and how many items each stands for."""
    least = np.minimum.reduceat(loads.cuts.mean[:, :-1].sum(1), loads.cuts.start[:-1])
    order = np.argsort(-least, kind="stable")
    order = order[loads.counts[order] > 0]
    step = max(1, -(-(len(order) - _SAMPLED) // _SAMPLED))
    of = np.arange(len(order))
    of = np.where(of < _SAMPLED, of, _SAMPLED + (of - _SAMPLED) // step)
    begin = np.flatnonzero(np.diff(of, prepend=-1))
    chosen = (begin + np.append(begin[1:], len(order)) - 1) // 2
    weight = np.bincount(of, loads.counts[order]).astype(np.float64)
    classes: Integers = order[chosen]
    return classes, weight


def _in_proportion(piece: Array, phases: Integers) -> list[Integers]:
    """The phases that some piece takes time in, those together that are in proportion."""
    found: list[list[int]] = []
    scaled = piece / np.maximum(piece.max(0, initial=0.0), 1e-300)
    for phase in phases.tolist():
        if not scaled[:, phase].any():
            continue
        for group in found:
            if np.abs(scaled[:, phase] - scaled[:, group[0]]).max() <= _ALIKE:
                group.append(phase)
                break
        else:
            found.append([phase])
    return [np.array(group) for group in found]
