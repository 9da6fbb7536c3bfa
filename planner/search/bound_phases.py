"""`Phases`: which phases are one to the bound, as every rank's loads in them are in proportion. Pure, as
`planner.search`.

Results and their gradients are as many bytes: the rank that is slowest in the one is so in the other, by the same
factor. Their times are no two things to find out, and the sum of the phases may stand for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array, Integers
from planner.search.problem import Problem

_ROUNDING = 1e-12


class Phases(NamedTuple):
    """What the phases of a problem are in one that has fewer.

    Args:
        of: (phases,) that which each belongs to.
        part: (phases,) of its seconds.
    """

    of: Integers
    part: Array

    def apart(self, seconds: Array) -> Array:
        """(phases,) seconds of each, of seconds of those that they belong to."""
        found: Array = seconds[self.of] * self.part
        return found


def joined(problem: Problem) -> tuple[Problem, Phases]:
    """The problem whose phases are sums of those in proportion; it costs the same, whatever is put where."""
    table = problem.table
    loads = [table.fixed, table.slope, table.lack, table.lack_slope, problem.base]
    loads += [part.reshape(-1, part.shape[-1]) for part in table.ragged.values()]
    every = np.concatenate(loads)[:, :-1]
    whole = every.sum(0)
    of, first = np.zeros(len(whole), dtype=np.int64), list[int]()
    for phase, total in enumerate(whole.tolist()):
        for number, other in enumerate(first):
            apart = np.abs(every[:, phase] * whole[other] - every[:, other] * total)
            is_some = min(total, whole[other]) > 0  # what takes no time is in proportion to everything
            if is_some and problem.span[phase] == problem.span[other] and _is_same(apart, every[:, other] * total):
                of[phase] = number
                break
        else:
            of[phase] = len(first)
            first.append(phase)
    part = whole / np.maximum(np.bincount(of, whole)[of], 1e-300)
    phases = Phases(of, np.where(whole > 0, part, 1.0))
    if len(first) == len(whole):
        return problem, phases
    sums = np.zeros((len(whole) + 1, len(first) + 1))
    sums[np.arange(len(whole)), of] = sums[-1, -1] = 1
    names = "fixed", "slope", "everywhere", "lack", "lack_slope"
    fewer = replace(
        table,
        ragged={row: part @ sums for row, part in table.ragged.items()},
        **{name: getattr(table, name) @ sums for name in names},
    )
    small = replace(
        problem,
        items=(),
        table=fewer,
        base=problem.base @ sums,
        setups=problem.setups @ sums[:-1, :-1],
        span=problem.span[first],
    )
    return small, phases


def _is_same(apart: Array, beside: Array) -> bool:
    return bool((apart <= _ROUNDING * beside).all())
