"""What a parameter got and what it did not, with the figures and the reason of each, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.offers import Floats, Options
from planner.report.reasons import reasons
from planner.report.words import layout, milliseconds, ranks, shape, times

_OPTIONS_SHOWN = 24


class Alternative(NamedTuple):
    """An option that a parameter did not get.

    Args:
        label: what it is, in words; where it would lie is left open.
        busiest_seconds: sum over phases on the rank it loads most.
        mean_seconds: the same averaged over ranks.
        rank_bytes: on the rank it fills most.
        reason: why not.
    """

    label: str
    busiest_seconds: float
    mean_seconds: float
    rank_bytes: int
    reason: str


def alternatives(figures: Figures, index: int) -> list[Alternative]:
    """What parameter `index` did not get, a line for each family: cheapest first, then what may not be chosen."""
    options = best_of_families(figures, index)
    why = reasons(figures, [index] * len(options.row), options)
    return [
        Alternative(label_of(figures, row, pieces), float(most[:-1].sum()), float(mean[:-1].sum()), int(most[-1]), text)
        for row, pieces, most, mean, text in zip(
            options.row.tolist(), options.pieces.tolist(), options.busiest, options.mean, why, strict=True
        )
    ]


def best_of_families(figures: Figures, index: int) -> Options:
    """Of each family that parameter `index` was offered the cut that would do best, cheapest first; what it got is not
    among them. Of the family that it got, the next best cut."""
    planned, offers = figures.planned, figures.offers
    options = offers.options(int(planned.class_of[index]))
    slowest = np.array(figures.phase_seconds) - np.array(figures.setup_seconds)
    longer = np.maximum(options.busiest[:, :-1] - slowest, 0).sum(1)
    harm = longer + options.mean[:, :-1].sum(1) + 1e9 * (options.busiest[:, -1] > figures.usable_bytes)
    harm[(options.row == planned.chosen[index]) & (options.pieces == planned.cut[index])] = np.inf
    order = np.lexsort((harm, options.row))
    first = order[np.unique(options.row[order], return_index=True)[1]]
    first = first[np.isfinite(harm[first])]
    forbidden = np.array([int(row) in offers.objections for row in options.row[first]], dtype=bool)
    kept = first[np.lexsort((options.mean[first, :-1].sum(1), forbidden))]
    return options.of(kept)


def label_of(figures: Figures, row: int, pieces: int) -> str:
    """An option in words, with what was looked at besides."""
    most = int(figures.offers.most_pieces[row])
    return figures.offers.label(row, pieces) + f" of up to {most}" * (1 < pieces < most)


def explained(figures: Figures, indices: Iterable[int]) -> str:
    """The text of `PlanReport.explain` for some parameters."""
    return "\n\n".join("\n".join(_lines(figures, index)) for index in indices)


def _lines(figures: Figures, index: int) -> list[str]:
    planned = figures.planned
    got = layout(planned.layouts[index], 90)
    busiest, mean = planned.busiest[index], planned.mean[index]
    verb = "pinned" if planned.is_pinned[index] else "got"
    lines = [
        f"{planned.names[index]}  {shape(planned.shapes[index])}  {verb} {got}",
        f"  on {_where(figures, index)}; {shown_bytes(figures.total_bytes(index))} in all, "
        f"{shown_bytes(float(busiest[-1]))} on the rank that has most",
        "  " + _phases(figures, busiest, mean),
    ]
    others = alternatives(figures, index)
    if not others:
        return [*lines, "  nothing else was offered"]
    width = max(len(other.label) for other in others[:_OPTIONS_SHOWN])
    lines.append(f"  {'not':<{width}} {'busiest rank':>12} {'mean':>10} {'memory':>10}  because")
    lines += [
        f"  {other.label:<{width}} {milliseconds(other.busiest_seconds):>12} {milliseconds(other.mean_seconds):>10} "
        f"{shown_bytes(other.rank_bytes):>10}  {other.reason}"
        for other in others[:_OPTIONS_SHOWN]
    ]
    if len(others) > _OPTIONS_SHOWN:
        lines.append(f"  and {len(others) - _OPTIONS_SHOWN} more, dearer still")
    return lines


def _where(figures: Figures, index: int) -> str:
    pieces = figures.planned.pieces
    mine = (pieces.owner == index).nonzero()[0]
    held = [rank for i in mine for rank in range(int(pieces.first[i]), int(pieces.first[i] + pieces.size[i]))]
    if len(set(held)) == len(figures.rank_bytes):
        return f"all {len(figures.rank_bytes):,} ranks"
    return f"{'rank' if len(set(held)) == 1 else 'ranks'} {ranks(held, 8)}"


def _phases(figures: Figures, busiest: Floats, mean: Floats) -> str:
    total, average = float(busiest[:-1].sum()), float(mean[:-1].sum())
    parts = ", ".join(
        f"{name} {milliseconds(float(s))}" for name, s in zip(figures.phases, busiest, strict=False) if s > 0
    )
    spread = f", {times(total / average)} the mean of all ranks" if average > 0 and total > average * 1.01 else ""
    return f"{milliseconds(total)} a step on the rank that it loads most{spread}: {parts or 'nothing'}"
