"""A small linear programme over columns, solved by an interior-point method. Pure, as `planner.search`.

Items of a group share out among its columns; a phase takes a time between `low` and `high`, at least its mean; some
phases take so long together; memory suffices in total. What makes the step shortest is found to a small tolerance. The
bound is not the solver's word: any prices, one for each row (a phase's mean, memory, a sum of phases), give a bound
exactly, and the solver only finds good ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers

_LARGE = 2000
"""Columns above which most are left out at first."""
_MORE = 1000
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
        return np.repeat(np.arange(len(self.start)), np.diff(np.append(self.start, len(self.every))))

    def value(self, price: Array) -> tuple[float, Array]:
        """The bound that prices give, exact for any that are not negative, and (columns,) reduced costs.

        Args:
            price: (rows,) weight of each phase's mean, seconds for all that there is of the others, weights of sums.
        """
        cost = self.every + self.work @ price
        best = np.minimum.reduceat(cost, self.start)
        rest = self.rest(price)
        times = np.where(rest > 0, rest * self.low, rest * self.high)
        return float(self.items @ best + times.sum() + price @ self.base), cost - best[self.group]

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
    """

    price: Array
    share: Array
    seconds: Array


def solve(p: Programme, enough: float, price: Array | None = None) -> Relaxed:
    """Good prices, and what shares they belong to; any prices that give more than `enough` seconds will do.

    Most columns of a large programme cost so much that they are out of the question at any price near the best: what is
    nearly the cheapest at known prices is solved for, then, where other columns turn out cheaper, once more with those.

    Args:
        price: of a similar programme.
    """
    if len(p.every) <= _LARGE:
        return _solve(p, enough)
    price = _resized(price, p)
    chosen = np.zeros(len(p.every), dtype=bool)
    best, result = -np.inf, Relaxed(price, np.zeros(len(p.every)), p.low)
    for _ in range(_TRIES):
        cost = p.value(price)[1]
        last = min(len(p.start) + _MORE, len(cost) - 1)
        chosen |= cost <= np.partition(cost, last)[last]
        among, found = _solve_some(p, np.flatnonzero(chosen), enough)
        value, price = p.value(found.price)[0], found.price
        if value > best:
            best, result = value, found
        if value >= min(enough, among - _missed(among, enough - among)):
            break
    return result


def _resized(price: Array | None, p: Programme) -> Array:
    """Prices of a programme with other rows after those of phases and memory."""
    found = np.zeros(len(p.base))
    known = np.ones(len(p.low)) if price is None else price[: len(p.low) + 1]
    found[: len(known)] = known
    return found


def _missed(value: float, spare: float) -> float:
    """By how much a value may be missed that so much is missing to."""
    return min(max(_NEAR * abs(value), _FAR * spare), _NEARLY * abs(value))


def _solve_some(p: Programme, chosen: Integers, enough: float) -> tuple[float, Relaxed]:
    """The optimum with some of the columns, and its value; groups with one column are no variables."""
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
    found = _solve(part, enough - constant)
    share = np.zeros(len(p.every))
    share[single], share[several] = items, found.share
    return part.value(found.price)[0] + constant, found._replace(share=share)


def _solve(p: Programme, enough: float) -> Relaxed:
    """`solve` with all columns."""
    unit = max(enough, 1e-30)
    is_time = p.times.any(1)
    to_units = np.where(is_time, unit, 1.0)
    scaled = p._replace(
        every=p.every / unit, work=p.work / to_units, base=p.base / to_units, low=p.low / unit, high=p.high / unit
    )
    state = _State(scaled)
    best, price, vain = -np.inf, state.price, 0
    for _ in range(_ITERATIONS):
        value = scaled.value(state.price)[0]
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
        if not (np.isfinite(state.price).all() and np.isfinite(state.x).all()):
            break  # the numbers are too far apart; earlier prices hold
    price[~is_time] *= unit
    return Relaxed(price, state.x, (scaled.low + state.sigma) * unit)


class _State:
    """A point inside, and Mehrotra's steps from it. It begins where items are shared out by what columns cost at prices
    of a half, and phases last as long as that takes.

    Attributes:
        x: (columns,) shares; z: their reduced costs.
        slack: (rows,) of each row; price: its price.
        sigma: (phases,) seconds above the lowest; z_sigma: their reduced costs.
        tau: (phases,) seconds below the highest; w: their price.
        y: (groups,) an item's price.
    """

    def __init__(self, p: Programme) -> None:
        self.p, self.group = p, p.group
        self.length = np.diff(np.append(p.start, len(p.every)))
        phases = len(p.low)
        aside = _ASIDE / phases
        self.price = np.full(len(p.base), 0.5)
        self.price[phases:][p.times[phases:].any(1)] = _ASIDE
        cost = p.every + p.work @ self.price
        self.y = np.minimum.reduceat(cost, p.start) - _ASIDE / len(p.start)
        self.z = cost - self.y[self.group]
        self.x = 1 / self.z
        self.x *= (p.items / np.add.reduceat(self.x, p.start))[self.group]
        row = self.x @ p.work + p.base
        self.width = np.maximum(p.high - p.low, 1e-9)
        least = np.minimum(0.1 * self.width, aside)
        self.sigma = np.clip(row[:phases] - p.low + aside, least, 0.9 * self.width)
        self.tau = self.width - self.sigma
        row -= p.times @ (p.low + self.sigma)
        self.slack = np.maximum(-row, aside)
        self.w = np.full(phases, 0.1)
        self.z_sigma = p.rest(self.price) + self.w

    def is_done(self, best: float) -> bool:
        """Whether the prices are as good as they get."""
        primal = float(self.p.every @ self.x + (self.p.low + self.sigma).sum())
        missing = np.abs(self._missing()[0]).max()
        return missing < _NEAR and primal - best < _missed(primal, 1 - best)

    def _missing(self) -> tuple[Array, Array, Array]:
        p = self.p
        row = self.x @ p.work + p.base + self.slack - p.times @ (p.low + self.sigma)
        return -row, p.items - np.add.reduceat(self.x, p.start), self.width - self.sigma - self.tau

    def advance(self) -> None:
        """One step: how far a plain one would get says how much of it to aim inside."""
        x, z, slack, price, sigma, tau, w = self.x, self.z, self.slack, self.price, self.sigma, self.tau, self.w
        number = len(x) + len(slack) + 2 * len(sigma)
        products = [x * z, slack * price, sigma * self.z_sigma, tau * w]
        mu = sum(float(c.sum()) for c in products) / number
        factors = self._factors()
        plain = self._step(factors, *(-c for c in products))
        along, across = self._lengths(plain)
        dx, dz, dslack, dprice, dsigma, dz_sigma, dtau, dw, _ = plain
        after = float((x + along * dx) @ (z + across * dz) + (slack + along * dslack) @ (price + across * dprice))
        after += float((sigma + along * dsigma) @ (self.z_sigma + across * dz_sigma))
        after += float((tau + along * dtau) @ (w + across * dw))
        aim = mu * min(1.0, after / (number * mu)) ** 3
        second = [dx * dz, dslack * dprice, dsigma * dz_sigma, dtau * dw]
        step = self._step(factors, *(aim - c - s for c, s in zip(products, second, strict=True)))
        along, across = self._lengths(step)
        dx, dz, dslack, dprice, dsigma, dz_sigma, dtau, dw, dy = step
        along, across = min(1.0, _INSIDE * along), min(1.0, _INSIDE * across)
        self.x, self.slack = x + along * dx, slack + along * dslack
        self.sigma, self.tau = sigma + along * dsigma, tau + along * dtau
        self.z, self.price, self.w = z + across * dz, price + across * dprice, w + across * dw
        self.z_sigma, self.y = self.z_sigma + across * dz_sigma, self.y + across * dy

    def _lengths(self, step: tuple[Array, ...]) -> tuple[float, float]:
        dx, dz, dslack, dprice, dsigma, dz_sigma, dtau, dw, _ = step
        along = min(map(_room, (self.x, self.slack, self.sigma, self.tau), (dx, dslack, dsigma, dtau)))
        across = min(map(_room, (self.z, self.price, self.z_sigma, self.w), (dz, dprice, dz_sigma, dw)))
        return along, across

    def _factors(self) -> tuple[Array, ...]:
        p = self.p
        d = self.x / self.z
        d_group = np.add.reduceat(d, p.start)
        mean = np.add.reduceat(d[:, None] * p.work, p.start, axis=0) / d_group[:, None]
        apart = p.work - np.repeat(mean, self.length, axis=0)
        d_sigma = 1 / (self.z_sigma / self.sigma + self.w / self.tau)
        matrix = apart.T @ (d[:, None] * apart) + np.diag(self.slack / self.price)
        matrix += (p.times * d_sigma) @ p.times.T
        return d, d_group, apart, mean, d_sigma, matrix

    def _step(
        self, factors: tuple[Array, ...], c_x: Array, c_slack: Array, c_sigma: Array, c_tau: Array
    ) -> tuple[Array, ...]:
        """Changes of all variables that make the products so much larger, and rows, groups and widths come right."""
        p = self.p
        d, d_group, apart, mean, d_sigma, matrix = factors
        r_row, r_group, r_width = self._missing()
        held = c_x / self.z
        moved = (r_group - np.add.reduceat(held, p.start)) / d_group
        held = held + d * moved[self.group]
        k_sigma = c_sigma / self.sigma - (c_tau - self.w * r_width) / self.tau
        right = held @ p.work + c_slack / self.price - r_row - p.times @ (d_sigma * k_sigma)
        dprice = np.linalg.solve(matrix, right)
        towards = apart @ dprice
        dx = held - d * towards
        dz = towards - moved[self.group]
        dslack = c_slack / self.price - self.slack / self.price * dprice
        paid = dprice @ p.times
        dsigma = d_sigma * (k_sigma + paid)
        dtau = r_width - dsigma
        dw = (c_tau - self.w * dtau) / self.tau
        dy = moved + mean @ dprice
        return dx, dz, dslack, dprice, dsigma, dw - paid, dtau, dw, dy


def _room(values: Array, change: Array) -> float:
    """How far values may change before the first is 0, at most 1."""
    return float(1 / max(1.0, float((-change / values).max())))
