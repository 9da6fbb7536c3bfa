"""What is said of how tables are trained: what those whose gradients are dense would gain by an optimizer in the
backward pass, and which are frozen.

Without one, every step fills a gradient of all rows of a table and hands it on, though a batch looks up a few of them:
of a large table that is most of the step, and a copy of the table in memory. Whoever forgot it sees a slow plan and no
reason; so the report says what the same layouts would take with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dmp import Layout, ParameterInfo, PlanError, shown_bytes
from planner.candidates.candidates import Leeway
from planner.candidates.request import Request
from planner.costs.protocol import BYTES
from planner.report.report import PlanReport

_SAVES = 0.2
"""Part of the step, or of the fullest rank's memory, that must be saved for a word."""
_ASSUMED, _WITHOUT_STATE = "adam", "sgd"
"""The optimizer whose state was counted, as nobody knows it, and one for where none was: what is saved is gradients."""


def said_of_frozen(infos: Iterable[ParameterInfo]) -> tuple[str, ...]:
    """A sentence on tables that take no gradient, if there are any: who trains them later needs more memory."""
    count = sum(not info.trained for info in infos)
    what = "1 table is" if count == 1 else f"{count} tables are"
    return (f"{what} frozen, and planned without gradients and optimizer state",) * (count > 0)


def in_backward_advice(
    request: Request, layouts: Mapping[str, Layout], leeway: Leeway, report: PlanReport
) -> tuple[str, ...]:
    """A sentence on what an optimizer in the backward pass would save, where that is much; else nothing.

    Args:
        request: what the plan was asked with.
        layouts: of its tables.
        leeway: what was given up for it.
        report: of the plan.
    """
    assumed = _WITHOUT_STATE if leeway.no_state else _ASSUMED
    parameters, names = dict(request.parameters), []
    for name, (sharder, info) in request.parameters.items():
        is_asked_for = request.constraints[name].kernel is not None
        if info.optimizer is None and info.trained and info.kind == "table" and not is_asked_for:
            parameters[name] = sharder, replace(info, optimizer=assumed, state_bytes=None, mixes_columns=None)
            names.append(name)
    if not names:
        return ()
    try:
        asked = replace(request, parameters=parameters, pinned=layouts)
        problem = asked.candidates(leeway).problem(request.dense_bytes)
    except PlanError:  # layouts that the sharder offers no table with such an optimizer
        return ()
    paid = problem.setups[sorted(problem.base_kinds)].sum()
    tables = float(problem.base[:, :BYTES].max(0).sum() + paid)
    step, fullest = report.step_seconds - report.table_seconds + tables, int(problem.base[:, BYTES].max())
    before = int(report.rank_bytes.max(initial=0))
    if step > (1 - _SAVES) * report.step_seconds and fullest > (1 - _SAVES) * before:
        return ()
    return (
        f"{len(names)} {'table has' if len(names) == 1 else 'tables have'} no optimizer in the backward pass, so that "
        f"each step fills gradients of all their rows, such as {names[0]!r}; with apply_optimizer_in_backward a step "
        f"of the same layouts would take {step * 1e3:.3g} ms instead of {report.step_seconds * 1e3:.3g} or more, and "
        f"tables {shown_bytes(fullest)} of the fullest rank instead of {shown_bytes(before)}",
    )
