"""From a solution to a `PlanReport`: the load of what was chosen, and words for what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dmp import Layout, shown_bytes
from planner.candidates.candidates import Candidates
from planner.candidates.costed import ClassLayouts, CostedLayout
from planner.costs.protocol import BYTES
from planner.dense.decide import Dense
from planner.report.report import Alternative, ParameterReport, PlanReport
from planner.search.option_costs import totals
from planner.search.problem import Option, Problem
from planner.search.solve import Solution


class Load(NamedTuple):
    """What an option puts on ranks, wherever it goes."""

    busiest_seconds: float
    """Summed over phases, on the rank it loads most."""
    mean_seconds: float
    """The same, averaged over ranks."""
    rank_bytes: int
    """On the rank it fills most."""


def summarise(
    candidates: Candidates,
    layouts: Mapping[str, Layout],
    problem: Problem,
    solution: Solution,
    dense: Dense,
    planning_seconds: float,
) -> PlanReport:
    """The report of a plan.

    Args:
        layouts: of every parameter, in its place.
        planning_seconds: wall time that it took.
    """
    num_ranks = len(problem.capacity)
    room = float((problem.capacity - problem.base[:, BYTES]).max())

    @cache  # alike parameters share their options: each is looked at once
    def load(option: Option) -> Load:
        mean, most, _, _ = totals([option], num_ranks)
        rank_bytes = int(np.ceil(option.loads[..., BYTES].max() + option.everywhere[BYTES]))
        return Load(float(most[0]), float(mean[0]), rank_bytes)

    @cache
    def alternatives(offered: ClassLayouts, chosen: CostedLayout) -> tuple[Alternative, ...]:
        others = [(layout, load(layout.option)) for layout in offered.choices if layout is not chosen]
        return _alternatives(others, load(chosen.option), room, offered.rejected)

    parameters = {}
    for name, kept in candidates.pinned.items():
        parameters[name] = ParameterReport(name, layouts[name], True, *load(kept.option))
    for group, choice in zip(candidates.groups, solution.choices, strict=True):
        for name, chosen in zip(group.members, group.rows[choice.option], strict=True):
            rest = alternatives(candidates.offered[name], chosen)
            parameters[name] = ParameterReport(name, layouts[name], False, *load(chosen.option), rest)
    return PlanReport(
        parameters=tuple(parameters[name] for name in sorted(parameters)),
        rank_seconds=tuple(tuple(row) for row in solution.load[:, :BYTES].tolist()),
        rank_bytes=tuple(int(b) for b in solution.load[:, BYTES].tolist()),
        usable_bytes=int(problem.capacity.max()),
        phase_seconds=tuple(solution.phase_seconds.tolist()),
        lower_bound=solution.lower_bound,
        is_cut_short=solution.is_cut_short,
        planning_seconds=planning_seconds,
        dense=dense.blocks,
        notes=dense.notes,
        dense_seconds=dense.seconds,
        dense_bytes=dense.training_bytes,
    )


def _alternatives(
    others: Sequence[tuple[CostedLayout, Load]], own: Load, room: float, rejected: Sequence[CostedLayout]
) -> tuple[Alternative, ...]:
    """Cheapest first, then those that may not be chosen."""
    by_cost = sorted(others, key=lambda other: (other[1].mean_seconds, other[1].busiest_seconds))
    found = [Alternative(layout.movable.layout, *load, _reason(load, own, room)) for layout, load in by_cost]
    return (*found, *(Alternative(r.movable.layout, None, None, None, r.objection) for r in rejected))


def _reason(load: Load, own: Load, room: float) -> str:
    """Why an option was not taken, in words.

    Args:
        own: of the option that was.
        room: bytes on the rank that has most.
    """
    if load.rank_bytes > room:
        return f"does not fit: {shown_bytes(load.rank_bytes)} on one rank, which has {shown_bytes(room)}"
    compared = (
        ("work in all", load.mean_seconds, own.mean_seconds),
        ("load on one rank", load.busiest_seconds, own.busiest_seconds),
        ("memory", load.rank_bytes, own.rank_bytes),
    )
    words = [f"{it / chosen:.3g}x the {what}" for what, it, chosen in compared if chosen > 0 and it > chosen * 1.005]
    return ", ".join(words) or "the same cost or less for itself, but no better for the step as the ranks are loaded"
