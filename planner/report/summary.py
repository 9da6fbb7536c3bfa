"""From a solution to a `PlanReport`: figures of what was chosen, and words for what was not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dmp import Layout
from planner.candidates.dense import Dense
from planner.candidates.offers import Menu, Offers
from planner.costs.cost_model import BYTES
from planner.report.report import Alternative, ParameterReport, PlanReport
from planner.search.figures import totals
from planner.search.problem import Option, Problem
from planner.search.solve import Solution
from planner.text import show_bytes


def summarise(
    offers: Offers,
    layouts: Mapping[str, Layout],
    problem: Problem,
    solution: Solution,
    dense: Dense,
    planning_seconds: float,
) -> PlanReport:
    """The report of a plan."""
    num_ranks, room = len(problem.capacity), float((problem.capacity - problem.base[:, BYTES]).max())
    known: dict[tuple[int, int], tuple[Alternative, ...]] = {}
    figures: dict[int, tuple[float, float, int]] = {}

    def of(option: Option) -> tuple[float, float, int]:
        if id(option) not in figures:
            figures[id(option)] = _figures(option, num_ranks)
        return figures[id(option)]

    parameters = {}
    for name, offer in offers.pinned.items():
        parameters[name] = ParameterReport(name, layouts[name], True, *of(offer.option))
    for slot, choice in zip(offers.slots, solution.choices, strict=True):
        for name, chosen in zip(slot.members, slot.rows[choice.option], strict=True):
            menu, mine = offers.menus[name], of(chosen.option)
            key = id(menu), id(chosen.option)
            if key not in known:
                known[key] = _alternatives(menu, chosen.option, mine, room, num_ranks)
            parameters[name] = ParameterReport(name, layouts[name], False, *mine, known[key])
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
    )


def _figures(option: Option, num_ranks: int) -> tuple[float, float, int]:
    """Seconds on the busiest rank, mean seconds, bytes on the fullest rank."""
    mean, most, _, _ = totals([option], num_ranks)
    return float(most[0]), float(mean[0]), int(np.ceil(option.loads[..., BYTES].max() + option.everywhere[BYTES]))


def _alternatives(
    menu: Menu, chosen: Option, mine: tuple[float, float, int], room: float, num_ranks: int
) -> tuple[Alternative, ...]:
    found = []
    for offer in menu.offers:
        if offer.option is not chosen:
            figures = _figures(offer.option, num_ranks)
            found.append(Alternative(offer.sketch.layout, *figures, _reason(figures, mine, room)))
    found.sort(key=lambda a: (a.mean_seconds or 0.0, a.busiest_seconds or 0.0))
    return (*found, *(Alternative(r.sketch.layout, None, None, None, r.reason) for r in menu.rejected))


def _reason(figures: tuple[float, float, int], mine: tuple[float, float, int], room: float) -> str:
    """Why an option was not taken, in words."""
    most, mean, size = figures
    if size > room:
        return f"does not fit: {show_bytes(size)} on one rank, which has {show_bytes(room)}"
    words = [
        f"{theirs / own:.3g}x the {what}"
        for what, theirs, own in (
            ("work in all", mean, mine[1]),
            ("load on one rank", most, mine[0]),
            ("memory", size, mine[2]),
        )
        if own > 0 and theirs > own * 1.005
    ]
    return ", ".join(words) or "the same cost or less for itself, but no better for the step as the ranks are loaded"
