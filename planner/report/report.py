"""`PlanReport`: why a plan is as it is. Plain data, printed as text or written as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dmp import Layout, ParameterSharding, PlanError, ShardingPlan
from planner.candidates.constraints import named_by
from planner.report.difference import PlanDifference
from planner.report.explained import Alternative, alternatives, explained
from planner.report.figures import Figures
from planner.report.page import render
from planner.report.stored import figures_from_json, to_json
from planner.report.text import parameter_lines, report_text

_EXPLAINED_AT_ONCE = 10
_PLAN_LINES = 36


class ParameterReport:
    """What a parameter got, and what it did not; made when it is asked for."""

    def __init__(self, figures: Figures, index: int) -> None:
        self._figures, self._index = figures, index
        planned = figures.planned
        self.name: str = planned.names[index]
        self.layout: Layout = planned.layouts[index]
        """Chosen, in its place."""
        self.shape: tuple[int, ...] = planned.shapes[index]
        """Of the unsharded parameter."""
        self.is_pinned = bool(planned.is_pinned[index])
        """Given by the user."""
        self.busiest_seconds = float(planned.busiest[index, :-1].sum())
        """Sum over phases on the rank that it loads most."""
        self.mean_seconds = float(planned.work[index])
        """The same averaged over ranks."""
        self.rank_bytes = int(planned.busiest[index, -1])
        """On the rank it fills most."""

    @property
    def alternatives(self) -> list[Alternative]:
        """Cheapest first, then those that may not be chosen."""
        return alternatives(self._figures, self._index)


@dataclass(frozen=True, eq=False)
class PlanReport(Figures):
    """Why a plan is as it is: `str()` is one screen, `explain` says why a parameter went where, `save_html` a page.

    Ranks are table ranks; seconds and bytes are the cost model's. The fields are those of `Figures`.
    """

    @property
    def parameters(self) -> tuple[ParameterReport, ...]:
        """What each parameter got, by name."""
        return tuple(ParameterReport(self, index) for index in range(len(self.planned.names)))

    def by_work(self) -> list[ParameterReport]:
        """Parameters, those with the most work first."""
        return [ParameterReport(self, index) for index in self.planned.by_work()]

    def explain(self, name: str) -> str:
        """What parameters got, what they were offered besides, and why they did not get it, as text.

        Args:
            name: of a parameter, a module or table, or a pattern of these, as in constraints.

        Raises:
            KeyError: nothing that was planned answers to it.
        """
        index_of = {of: index for index, of in enumerate(self.planned.names)}
        matched, hint = named_by(name, self.planned.names)
        if not matched:
            dense = "; dense weights are by block: print(report)" if self.dense else ""
            raise KeyError(f"no planned parameter answers to {name!r}; {hint}{dense}")
        shown = matched[:_EXPLAINED_AT_ONCE]
        text = explained(self, [index_of[each] for each in shown])
        more = len(matched) - len(shown)
        return text + f"\n\nand {more:,} more that {name!r} names" * (more > 0)

    def diff(self, other: PlanReport | ShardingPlan) -> PlanDifference:
        """What changes from this plan to another, and what that does to step, phases and memory; `str()` says it.

        Args:
            other: a report, or a plan that has one.

        Raises:
            PlanError: a plan without a report.
        """
        report = other.report if isinstance(other, ShardingPlan) else other
        if not isinstance(report, Figures):
            raise PlanError(
                "PlanReport.diff compares with another report, or a plan that a planner made; a plan without a "
                "report: plan.diff(other)"
            )
        return PlanDifference.of(self, report)

    def __str__(self) -> str:
        return report_text(self)

    def plan_text(self, plan: Mapping[str, ParameterSharding]) -> str:
        """A plan of these parameters as a table with shapes, bytes and milliseconds, one screen, in the order given."""
        index_of = {name: index for index, name in enumerate(self.planned.names)}
        known = [name for name in plan if name in index_of]
        lines = parameter_lines(self, [index_of[name] for name in known[:_PLAN_LINES]]) if known else []
        dense: dict[str, list[str]] = {}
        for name in plan:
            if name not in index_of:
                repeated = ".".join("*" if word.isdigit() else word for word in name.split("."))
                dense.setdefault(f"{repeated}  {plan[name]}", []).append(name)
        shown = list(dense.items())[: max(6, _PLAN_LINES - len(lines))]
        lines += [
            f"{len(names)} x {text}" if len(names) > 1 else f"{names[0]}  {plan[names[0]]}" for text, names in shown
        ]
        more = len(plan) - min(len(known), _PLAN_LINES) - sum(len(names) for _, names in shown)
        return "\n".join(lines + [f"and {more:,} more: plan[name]"] * (more > 0))

    def to_json(self) -> str:
        """The report as text, with a format version."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> PlanReport:
        """Inverse of `to_json`.

        Raises:
            PlanError: not a report, or one of another version.
        """
        return cls(**figures_from_json(text))

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, for `PlanReport.load`."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PlanReport:
        """Read what `save` wrote.

        Raises:
            PlanError: not a report, or one of another version.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def save_html(self, path: str | Path) -> None:
        """Write the report as one page without outside references.

        Raises:
            ModuleNotFoundError: Jinja2 is not installed.
        """
        Path(path).write_text(render(self), encoding="utf-8")
