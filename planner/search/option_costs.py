"""`OptionCosts`: what the options of all items cost, wherever they go, as arrays. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.problem import Array, Option, Problem

NEVER = 1e30
"""A cost that no option has; finite, so that it may be multiplied by zero."""


@dataclass(frozen=True, eq=False)
class OptionCosts:
    """Each (items, options), filled up with `NEVER` where an item has fewer options.

    Args:
        mean: seconds summed over phases, averaged over ranks.
        most: the same on the busiest rank.
        least: the same on the idlest rank.
        size: bytes on all ranks together.
        peak: bytes on the fullest rank.
    """

    mean: Array
    most: Array
    least: Array
    size: Array
    peak: Array

    @classmethod
    def of(cls, problem: Problem) -> OptionCosts:
        """Costs of a problem's options; items that share their options are looked at once."""
        width = max(len(item.options) for item in problem.items)
        known: dict[tuple[Option, ...], Array] = {}
        rows = []
        for item in problem.items:
            if item.options not in known:
                row = np.full((5, width), NEVER)
                count = len(item.options)
                row[:4, :count] = totals(item.options, len(problem.capacity))
                row[4, :count] = [float(o.loads[..., -1].max() + o.everywhere[-1]) for o in item.options]
                known[item.options] = row
            rows.append(known[item.options])
        return cls(*np.stack(rows, axis=1))

    def without(self, problem: Problem, kinds: frozenset[int]) -> OptionCosts:
        """The same where options that need one of these set-ups cost `NEVER`."""
        width = self.mean.shape[1]
        known: dict[tuple[Option, ...], list[float]] = {}
        for item in problem.items:
            if item.options not in known:
                known[item.options] = [NEVER * bool(o.kinds & kinds) for o in item.options]
                known[item.options] += [0.0] * (width - len(item.options))
        barred = np.array([known[item.options] for item in problem.items])
        return OptionCosts(*(np.maximum(f, barred) for f in (self.mean, self.most, self.least, self.size, self.peak)))


def totals(options: Sequence[Option], num_ranks: int) -> tuple[Array, Array, Array, Array]:
    """What options cost wherever they go.

    Returns:
        Each (options,): seconds summed over phases and averaged over ranks; of the busiest rank; of the idlest rank;
        bytes on all ranks together.
    """
    mean, most, least, size = [], [], [], []
    for o in options:
        common = float(o.everywhere[:-1].sum())
        ranks = o.loads[..., :-1].sum(-1)
        mean.append(float(ranks.sum()) / num_ranks + common)
        most.append(float(ranks.max()) + common)
        least.append(common + (float(ranks.min()) if ranks.size == num_ranks else 0.0))
        size.append(float(o.loads[..., -1].sum()) + float(o.everywhere[-1]) * num_ranks)
    return np.array(mean), np.array(most), np.array(least), np.array(size)
