"""A small linear programme over columns, solved by an interior-point method. Pure, as `planner.search`.

Items of a group share out among its columns; a phase takes a time between `low` and `high`, at least its mean; some
phases take so long together; memory suffices in total. What makes the step shortest is found to a small tolerance. The
bound is not the solver's word: any prices, one for each row (a phase's mean, memory, a sum of phases), give a bound
exactly, and the solver only finds good ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.cost_table import Array, Integers

_LARGE = 300
"""Columns above which most are left out at first."""
_MORE = 200
"""Columns that are solved for at once, besides the cheapest of each group."""
_TRIES = 4
_ITERATIONS, _VAIN = 40, 8
"""Steps at most, and such as better the value by no part that counts."""
_NEAR, _NEARLY = 1e-4, 2e-3
"""Part of the value to which it is found: the first, or where this is more, up to the second"""
_FAR = 0.01
"""this part of what is missing to enough."""
_ASIDE = 0.1
"""How far from the limits it begins."""
_INSIDE = 0.995
"""Part of the way to the nearest limit that a step takes."""


class Programme(NamedTuple):
    """What is solved; see [Note: columns].

    Args:
        every: (columns,) seconds.
        work: (columns, rows) a column's part of each phase's mean, then of what there is 1 of (free memory, say).
        start: (groups,) first column of each group.
        items: (groups,) how many there are of each.
        base: (rows,) work that is there already; -1 for what there is 1 of; seconds that phases take together at least.
        low: (phases,) seconds that a phase takes at least.
        high: (phases,) at most.
        times: (rows, phases) 1 where a phase's time makes room in a row: its mean's own, and those of sums of phases.
    """

    every: Array
    work: Array
    start: Integers
    items: Array
    base: Array
    low: Array
    high: Array
    times: Array

    @property
    def group(self) -> Integers:
        """(columns,) group of each."""
        return np.repeat(np.arange(len(self.start)), self.length)

    @property
    def length(self) -> Integers:
        """(groups,) columns of each."""
        return np.diff(np.append(self.start, len(self.every)))

    def value(self, price: Array) -> float:
        """The bound that prices give, exact for any that are not negative.

        Args:
            price: (rows,) weight of each phase's mean, seconds for all that there is of the others, weights of sums.
        """
        return self._value(price, np.minimum.reduceat(self.every + self.work @ price, self.start))

    def priced(self, price: Array) -> tuple[float, Array]:
        """The bound that prices give, and (columns,) by how much each costs more than the cheapest of its group."""
        cost = self.every + self.work @ price
        best = np.minimum.reduceat(cost, self.start)
        return self._value(price, best), cost - np.repeat(best, self.length)

    def _value(self, price: Array, best: Array) -> float:
        rest = self.rest(price)
        times = np.where(rest > 0, rest * self.low, rest * self.high)
        return float(self.items @ best + times.sum() + price @ self.base)

    def above(self, cost: Array) -> Array:
        """(columns,) by how much each costs more than the cheapest of its group."""
        found: Array = cost - np.repeat(np.minimum.reduceat(cost, self.start), self.length)
        return found

    def rest(self, price: Array) -> Array:
        """(phases,) what a second costs that a phase takes longer than it has to."""
        found: Array = 1 - price @ self.times
        return found


class Relaxed(NamedTuple):
    """The optimum of a programme, about.

    Args:
        price: (rows,) see `Programme.value`.
        share: (columns,) items that take each.
        seconds: (phases,) times.
        value: the bound that the prices give.
        reduced: (columns,) by how much an item with this one costs more than with its group's best, at these prices.
    """

    price: Array
    share: Array
    seconds: Array
    value: float
    reduced: Array

    def take(self, kept: NDArray[np.bool_]) -> Relaxed:
        """Of some columns."""
        return self._replace(share=self.share[kept], reduced=self.reduced[kept])


def solve(p: Programme, enough: float, near: Relaxed | None = None) -> Relaxed:
    """Good prices, and what shares they belong to; any prices that give more than `enough` seconds will do.

    Most columns of a large programme cost so much that they are out of the question at any price near the best: what is
    nearly the cheapest at known prices is solved for, then, where other columns turn out cheaper, once more with those.

    Args:
        near: of a similar programme, with the same columns.
    """
    if len(p.every) <= _LARGE:
        return _found(p, *_solve(p, enough))
    reduced = p.priced(_prices(p))[1] if near is None else p.above(near.reduced)
    chosen = np.zeros(len(p.every), dtype=bool)
    best: Relaxed | None = None
    for _ in range(_TRIES):
        last = min(len(p.start) + _MORE, len(reduced) - 1)
        chosen |= reduced <= np.partition(reduced, last)[last]
        among, *some = _solve_some(p, np.flatnonzero(chosen), enough)
        found = _found(p, *some)
        reduced = found.reduced
        if best is None or found.value > best.value:
            best = found
        if found.value >= min(enough, among - _missed(among, enough - among)):
            break
    assert best is not None
    return best


def _found(p: Programme, price: Array, share: Array, seconds: Array) -> Relaxed:
    return Relaxed(price, share, seconds, *p.priced(price))


def _prices(p: Programme) -> Array:
    """Ones of phases and memory."""
    found = np.zeros(len(p.base))
    found[: len(p.low) + 1] = 1
    return found


def _missed(value: float, spare: float) -> float:
    """By how much a value may be missed that so much is missing to."""
    return min(max(_NEAR * abs(value), _FAR * spare), _NEARLY * abs(value))


def _solve_some(p: Programme, chosen: Integers, enough: float) -> tuple[float, Array, Array, Array]:
    """The value of the optimum with some of the columns, its prices, shares and seconds.

    Groups with one column are no variables.
    """
    group = p.group[chosen]
    is_single = np.bincount(group)[group] == 1
    is_single[np.flatnonzero(group == group[0])] = False  # something is left to solve
    single, several = chosen[is_single], chosen[~is_single]
    items = p.items[p.group[single]]
    constant = float(items @ p.every[single])
    start = np.flatnonzero(np.diff(p.group[several], prepend=-1))
    part = p._replace(
        every=p.every[several],
        work=p.work[several],
        start=start,
        items=p.items[p.group[several[start]]],
        base=p.base + items @ p.work[single],
    )
    price, of_several, seconds = _solve(part, enough - constant)
    share = np.zeros(len(p.every))
    share[single], share[several] = items, of_several
    return part.value(price) + constant, price, share, seconds


def _solve(p: Programme, enough: float) -> tuple[Array, Array, Array]:
    """`solve` with all columns: prices, shares, seconds."""
    unit = max(enough, 1e-30)
    is_time = p.times.any(1)
    to_units = np.where(is_time, unit, 1.0)
    scaled = p._replace(
        every=p.every / unit, work=p.work / to_units, base=p.base / to_units, low=p.low / unit, high=p.high / unit
    )
    state = _State(scaled)
    best, price, vain = -np.inf, state.price, 0
    for _ in range(_ITERATIONS):
        value = scaled.value(state.price)
        vain = 0 if not np.isfinite(best) or value > best + _NEAR * abs(best) else vain + 1
        if value > best:
            best, price = value, state.price.copy()
        if best >= 1 or vain > _VAIN or state.is_done(best):
            break
        try:
            with np.errstate(all="ignore"):
                state.advance()
        except np.linalg.LinAlgError:
            break
        if not (np.isfinite(state.cost).all() and np.isfinite(state.inside).all()):
            break  # the numbers are too far apart; earlier prices hold
    price[~is_time] *= unit
    return price, state.x, state.seconds * unit


class _State:
    """A point inside, and Mehrotra's steps from it. It begins where items are shared out by what columns cost at prices
    of a half, and phases last as long as that takes.

    Attributes:
        inside: (columns + rows + 2 phases,) what has to stay above 0: shares, room left in rows, seconds of phases
            above the lowest, and below the highest.
        cost: what each of these costs: shares' reduced costs, rows' prices, reduced costs of seconds, and their prices.
    """

    def __init__(self, p: Programme) -> None:
        columns, rows, phases = len(p.every), len(p.base), len(p.low)
        self.p, self.group = p, p.group
        self.ends = columns, columns + rows, columns + rows + phases
        self.length = p.length
        self.width = np.maximum(p.high - p.low, 1e-9)
        aside = _ASIDE / phases
        price = np.full(rows, 0.5)
        price[phases:][p.times[phases:].any(1)] = _ASIDE
        cost = p.every + p.work @ price
        z = cost - (np.minimum.reduceat(cost, p.start) - _ASIDE / len(p.start))[self.group]
        x = 1 / z
        x *= (p.items / np.add.reduceat(x, p.start))[self.group]
        row = x @ p.work + p.base
        least = np.minimum(0.1 * self.width, aside)
        sigma = np.clip(row[:phases] - p.low + aside, least, 0.9 * self.width)
        slack = np.maximum(p.times @ (p.low + sigma) - row, aside)
        w = np.full(phases, 0.1)
        self.inside = np.concatenate([x, slack, sigma, self.width - sigma])
        self.cost = np.concatenate([z, price, p.rest(price) + w, w])
        self.missing = self._missing()

    @property
    def x(self) -> Array:
        """(columns,) shares."""
        return self.inside[: self.ends[0]]

    @property
    def price(self) -> Array:
        """(rows,) prices."""
        return self.cost[self.ends[0] : self.ends[1]]

    @property
    def seconds(self) -> Array:
        """(phases,) that phases take."""
        found: Array = self.p.low + self.inside[self.ends[1] : self.ends[2]]
        return found

    def _parts(self, values: Array) -> tuple[Array, Array, Array, Array]:
        """Of columns, of rows, and of phases two."""
        first, second, third = self.ends
        return values[:first], values[first:second], values[second:third], values[third:]

    def is_done(self, best: float) -> bool:
        """Whether the prices are as good as they get."""
        primal = float(self.p.every @ self.x + self.seconds.sum())
        missing = np.abs(self.missing[0]).max()
        return bool(missing < _NEAR) and primal - best < _missed(primal, 1 - best)

    def _missing(self) -> tuple[Array, Array, Array]:
        p = self.p
        x, slack, sigma, tau = self._parts(self.inside)
        row = x @ p.work + p.base + slack - p.times @ (p.low + sigma)
        return -row, p.items - np.add.reduceat(x, p.start), self.width - sigma - tau

    def advance(self) -> None:
        """One step: how far a plain one would get says how much of it to aim inside."""
        products = self.inside * self.cost
        mu = float(products.mean())
        factors = self._factors()
        inside, cost = self._step(factors, -products)
        along, across = _room(self.inside, inside), _room(self.cost, cost)
        after = float((self.inside + along * inside) @ (self.cost + across * cost)) / len(products)
        aim = mu * min(1.0, after / mu) ** 3
        # what the plain step would change in products counts as far as that can go
        inside, cost = self._step(factors, aim - products - along * across * inside * cost)
        along, across = _room(self.inside, inside), _room(self.cost, cost)
        self.inside = self.inside + min(1.0, _INSIDE * along) * inside
        self.cost = self.cost + min(1.0, _INSIDE * across) * cost
        self.missing = self._missing()

    def _factors(self) -> tuple[Array, ...]:
        p = self.p
        ratio = self.inside / self.cost
        d, d_row, d_sigma, d_tau = self._parts(ratio)
        d_group = np.add.reduceat(d, p.start)
        mean = np.add.reduceat(d[:, None] * p.work, p.start, axis=0) / d_group[:, None]
        apart = p.work - np.repeat(mean, self.length, axis=0)
        d_sigma = 1 / (1 / d_sigma + 1 / d_tau)
        matrix = apart.T @ (d[:, None] * apart)
        matrix.flat[:: len(matrix) + 1] += d_row
        matrix += (p.times * d_sigma) @ p.times.T
        return d, d_group, apart, d_sigma, np.linalg.inv(matrix)

    def _step(self, factors: tuple[Array, ...], change: Array) -> tuple[Array, Array]:
        """Changes that make the products so much larger, and rows, groups and widths come right."""
        p = self.p
        d, d_group, apart, d_sigma, inverse = factors
        _, slack, sigma, tau = self._parts(self.inside)
        z, price, _, w = self._parts(self.cost)
        c_x, c_slack, c_sigma, c_tau = self._parts(change)
        r_row, r_group, r_width = self.missing
        held = c_x / z
        moved = ((r_group - np.add.reduceat(held, p.start)) / d_group)[self.group]
        held += d * moved
        k_sigma = c_sigma / sigma - (c_tau - w * r_width) / tau
        right = held @ p.work + c_slack / price - r_row - p.times @ (d_sigma * k_sigma)
        dprice = inverse @ right
        towards = apart @ dprice
        dslack = (c_slack - slack * dprice) / price
        paid = dprice @ p.times
        dsigma = d_sigma * (k_sigma + paid)
        dtau = r_width - dsigma
        dw = (c_tau - w * dtau) / tau
        inside = np.concatenate([held - d * towards, dslack, dsigma, dtau])
        return inside, np.concatenate([towards - moved, dprice, dw - paid, dw])


def _room(values: Array, change: Array) -> float:
    """How far values may change before the first is 0, at most 1."""
    return float(1 / max(1.0, float((-change / values).max())))
