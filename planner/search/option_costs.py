"""`OptionCosts`: what the options of all items cost, wherever they go, as arrays. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from planner.search.problem import Array, Option, Problem

NEVER = 1e30
"""A cost that no option has; finite, so that it may be multiplied by zero."""


class OptionCosts(NamedTuple):
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

        @cache
        def rows(options: tuple[Option, ...]) -> Array:
            found, count = np.full((5, width), NEVER), len(options)
            found[:4, :count] = totals(options, len(problem.capacity))
            found[4, :count] = [float(o.loads[..., -1].max() + o.everywhere[-1]) for o in options]
            return found

        return cls(*np.stack([rows(item.options) for item in problem.items], axis=1))

    def without(self, problem: Problem, kinds: frozenset[int]) -> OptionCosts:
        """The same where options that need one of these set-ups cost `NEVER`."""

        @cache
        def barred(options: tuple[Option, ...]) -> list[float]:
            return [NEVER * bool(o.kinds & kinds) for o in options] + [0.0] * (self.mean.shape[1] - len(options))

        least = np.array([barred(item.options) for item in problem.items])
        return OptionCosts(*(np.maximum(costs, least) for costs in self))


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
