"""Why an option was not taken, in words: what it would do to the step and the memory as they are."""

from __future__ import annotations

import numpy as np

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.offers import Floats
from planner.report.words import milliseconds, times

_NOTICED = 1.02
"""A ratio below this is called the same."""


def reason(figures: Figures, index: int, row: int) -> str:
    """Why parameter `index` did not get the option of `row`."""
    said = figures.offers.objections.get(row)
    if said:
        return _as_sentence(said)
    option, chosen = figures.offers.busiest[row], figures.planned.busiest[index]
    if option[-1] > figures.usable_bytes:
        return f"would put {shown_bytes(float(option[-1]))} on a rank that has {shown_bytes(figures.usable_bytes)}"
    alone = _alone(figures, option, bool(np.allclose(figures.offers.mean[row], option, rtol=0.01)))
    if alone:
        return alone
    words = _work(figures, figures.offers.mean[row], figures.planned.mean[index])
    words += _peak(option, chosen)
    if words:
        return ", ".join(words)
    return "no dearer in itself, but as the ranks are loaded the step would not be shorter"


def _as_sentence(objection: str) -> str:
    kind, _, what = objection.partition(": ")
    return f"forbidden by constraint: {what}" if kind == "constraint" else objection


def _alone(figures: Figures, option: Floats, is_everywhere: bool) -> str:
    """What one piece does to the step if its rank had nothing else; empty where that is nothing."""
    slowest = np.array(figures.phase_seconds) - np.array(figures.setup_seconds)
    longer = np.maximum(option[:-1] - slowest, 0)
    total = float(option[:-1].sum())
    if total > figures.table_seconds * _NOTICED:
        now = milliseconds(figures.table_seconds)
        if is_everywhere:
            return f"every rank would take {milliseconds(total)}, longer than all tables together now ({now})"
        return f"its largest piece alone takes {milliseconds(total)}, longer than all tables together now ({now})"
    if float(longer.sum()) <= figures.table_seconds * 0.002:
        return ""
    worst = int(longer.argmax())
    whose = "every rank would take" if is_everywhere else "its largest piece alone takes"
    return (
        f"{whose} {milliseconds(float(option[worst]))} in {figures.phases[worst]}, where the "
        f"slowest rank takes {milliseconds(float(slowest[worst]))} now"
    )


def _work(figures: Figures, option: Floats, chosen: Floats) -> list[str]:
    """How the option's work differs: what is exchanged, what is looked up, what is kept in memory."""
    exchanged = np.array(["lookup" not in name for name in figures.phases])
    parts = []
    for what, columns in (("work at the lookups", ~exchanged), ("time in exchanges", exchanged)):
        ratio = _ratio(float(option[:-1][columns].sum()), float(chosen[:-1][columns].sum()))
        parts.append((what, ratio))
    total = _ratio(float(option[:-1].sum()), float(chosen[:-1].sum()))
    dearer = [f"{times(ratio)} the {what}" for what, ratio in parts if ratio > _NOTICED]
    if total <= _NOTICED:
        return []
    (_, looked_up), (_, sent) = parts
    if sent == np.inf:
        return [f"{times(total)} the work in all: it would be exchanged, which is not needed now"]
    if sent > _NOTICED >= looked_up:
        same = "the same work at the lookups" if looked_up > 0.98 else f"{times(looked_up)} the work at the lookups"
        return [f"{same}, but {times(sent)} the time in exchanges"]
    return [f"{times(total)} the work in all ({', '.join(dearer)})"] if len(dearer) > 1 else dearer


def _peak(option: Floats, chosen: Floats) -> list[str]:
    """How much more it puts on one rank."""
    load = _ratio(float(option[:-1].sum()), float(chosen[:-1].sum()))
    size = _ratio(float(option[-1]), float(chosen[-1]))
    words = [f"{times(load)} the load on its busiest rank"] if load > _NOTICED else []
    return words + ([f"{times(size)} the memory on one"] if size > 1.5 else [])


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else (1.0 if one <= 0 else np.inf)
