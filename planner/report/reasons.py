"""Why options were not taken, in words: what each would do to the step and the memory as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.offers import Options
from planner.report.words import milliseconds, times

_NOTICED = 1.02
"""A ratio below this is called the same."""


class _Compared(NamedTuple):
    """An option beside what was taken instead."""

    rank_bytes: float
    alone: float
    """Seconds of the rank that it loads most, if that had nothing else."""
    longer: float
    """What the slowest ranks of all phases would take more for that."""
    worst: int
    """The phase where that is most."""
    in_worst: float
    is_everywhere: bool
    work: float
    """Ratios to what was taken: all work, lookups, exchanges, load and memory of the busiest rank."""
    looked_up: float
    sent: float
    load: float
    memory: float


def reasons(figures: Figures, indices: Sequence[int], options: Options) -> list[str]:
    """Why each of these parameters did not get the option beside it."""
    slowest = np.array(figures.phase_seconds) - np.array(figures.setup_seconds)
    found = []
    for compared, row in zip(_compared(figures, indices, options, slowest), options.row.tolist(), strict=True):
        said = figures.offers.objections.get(row)
        found.append(_as_sentence(said) if said else _reason(figures, compared, slowest))
    return found


def _compared(
    figures: Figures, indices: Sequence[int], options: Options, slowest: NDArray[np.float64]
) -> list[_Compared]:
    """All at once, for there may be thousands."""
    at = np.array(indices, dtype=np.int64)
    option, mean = options.busiest, options.mean
    chosen, chosen_mean = figures.planned.busiest[at].astype(np.float64), figures.planned.mean[at].astype(np.float64)
    looks_up = np.array(["lookup" in name for name in figures.phases])
    longer = np.maximum(option[:, :-1] - slowest, 0)
    worst = longer.argmax(1)
    columns = (
        option[:, -1],
        option[:, :-1].sum(1),
        longer.sum(1),
        worst,
        option[np.arange(len(at)), worst],
        np.isclose(mean, option, rtol=0.01).all(1),
        _ratio(mean[:, :-1].sum(1), chosen_mean[:, :-1].sum(1)),
        _ratio(mean[:, :-1][:, looks_up].sum(1), chosen_mean[:, :-1][:, looks_up].sum(1)),
        _ratio(mean[:, :-1][:, ~looks_up].sum(1), chosen_mean[:, :-1][:, ~looks_up].sum(1)),
        _ratio(option[:, :-1].sum(1), chosen[:, :-1].sum(1)),
        _ratio(option[:, -1], chosen[:, -1]),
    )
    return [_Compared(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]


def _ratio(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    none = np.where(one > 0, np.inf, 1.0)
    return np.where(other > 0, one / np.where(other > 0, other, 1.0), none)


def _as_sentence(objection: str) -> str:
    kind, _, what = objection.partition(": ")
    return f"forbidden by constraint: {what}" if kind == "constraint" else objection


def _reason(figures: Figures, of: _Compared, slowest: NDArray[np.float64]) -> str:
    if of.rank_bytes > figures.usable_bytes:
        return f"would put {shown_bytes(of.rank_bytes)} on a rank that has {shown_bytes(figures.usable_bytes)}"
    whose = "every rank would take" if of.is_everywhere else "its largest piece alone takes"
    if of.alone > figures.table_seconds * _NOTICED:
        now = milliseconds(figures.table_seconds)
        return f"{whose} {milliseconds(of.alone)}, longer than all tables together now ({now})"
    if of.longer > figures.table_seconds * 0.002:
        now = milliseconds(float(slowest[of.worst]))
        phase = figures.phases[of.worst]
        return f"{whose} {milliseconds(of.in_worst)} in {phase}, where the slowest rank takes {now} now"
    words = _work(of)
    if of.load > _NOTICED:
        words.append(f"{times(of.load)} the load on its busiest rank")
    if of.memory > 1.5:
        words.append(f"{times(of.memory)} the memory there" if words else f"{times(of.memory)} the memory on a rank")
    return ", ".join(words) or "no dearer in itself, but as the ranks are loaded the step would not be shorter"


def _work(of: _Compared) -> list[str]:
    """How the option's work differs: what is looked up, and what is exchanged."""
    if of.work <= _NOTICED:
        return []
    if of.sent == np.inf:
        return [f"{times(of.work)} the work in all: it would be exchanged, which is not needed now"]
    if of.sent > _NOTICED >= of.looked_up:
        same = "the same work at the lookups" if of.looked_up > 0.98 else f"{times(of.looked_up)} the lookups' work"
        return [f"{same}, but {times(of.sent)} the time in exchanges"]
    if abs(of.sent / of.work - 1) < 0.05:
        return [f"{times(of.work)} the work"]
    if of.sent > _NOTICED:
        return [f"{times(of.work)} the work ({times(of.looked_up)} at the lookups, {times(of.sent)} in exchanges)"]
    return [f"{times(of.work)} the work, {times(of.looked_up)} at the lookups"]
