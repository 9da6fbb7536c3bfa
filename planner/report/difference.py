"""What changes from one plan to another, and what that does to the step, its phases and the memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmp import PlanChange, ShardingPlan, shown_bytes
from planner.report.figures import Figures
from planner.report.words import layout, milliseconds, shape, shortened

_CHANGES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class PlanDifference:
    """From one report to another; `str()` is a screen of text.

    Args:
        before: the report of the first plan.
        after: of the second.
        changes: parameters with another layout, those with the most work first.
    """

    before: Figures
    after: Figures
    changes: tuple[PlanChange, ...]

    @classmethod
    def of(cls, before: Figures, after: Figures) -> PlanDifference:
        """What changes from one plan to another."""
        plans = [ShardingPlan(dict(zip(f.planned.names, f.planned.layouts, strict=True))) for f in (before, after)]
        work: dict[str, float] = {}
        for figures in (before, after):
            for name, seconds in zip(figures.planned.names, figures.planned.work.tolist(), strict=True):
                work[name] = max(seconds, work.get(name, 0.0))
        changes = sorted(plans[0].diff(plans[1]), key=lambda change: (-work[change.name], change.name))
        return cls(before, after, tuple(changes))

    @property
    def seconds(self) -> float:
        """What a step takes more; below zero where the second plan is faster."""
        return self.after.step_seconds - self.before.step_seconds

    def __str__(self) -> str:
        lines = [*self._figures(), *self._settings(), ""]
        total = len({*self.before.planned.names, *self.after.planned.names})
        lines.append(f"{len(self.changes):,} of {total:,} parameters change" + ":" * bool(self.changes))
        where = [{name: i for i, name in enumerate(f.planned.names)} for f in (self.before, self.after)]
        lines += [self._line(change, where) for change in self.changes[:_CHANGES_SHOWN]]
        more = len(self.changes) - _CHANGES_SHOWN
        return "\n".join(lines + [f"  and {more:,} more: difference.changes"] * (more > 0))

    def _figures(self) -> list[str]:
        a, b = self.before, self.after
        of_a, of_b = (dict(zip(f.phases, f.phase_seconds, strict=True)) for f in (a, b))
        rows = [("step", a.step_seconds, b.step_seconds)]
        rows += [(f"  {name}", of_a.get(name, 0.0), of_b.get(name, 0.0)) for name in {**of_a, **of_b}]
        rows.append(("lower bound", a.lower_bound, b.lower_bound))
        lines = [f"{'':<16}{'before':>12}{'after':>12}{'change':>10}"]
        lines += [
            f"{name:<16}{milliseconds(x):>12}{milliseconds(y):>12}{_change(x, y):>10}" for name, x, y in rows if x or y
        ]
        for name, pick in (("fullest rank", np.max), ("mean rank", np.mean)):
            x, y = (float(pick(f.rank_bytes)) if len(f.rank_bytes) else 0.0 for f in (a, b))
            lines.append(f"{name:<16}{shown_bytes(x):>12}{shown_bytes(y):>12}{_change(x, y):>10}")
        return lines

    def _settings(self) -> list[str]:
        a, b = self.before.setting, self.after.setting
        said = (
            ("mesh", a.mesh_text(), b.mesh_text()),
            ("batch", a.batch_text(), b.batch_text()),
            ("a rank", a.machine_text(), b.machine_text()),
        )
        return [f"{what}: {one} -> {other}" for what, one, other in said if one != other]

    def _line(self, change: PlanChange, where: list[dict[str, int]]) -> str:
        sides, sizes = [], ""
        for figures, index_of in zip((self.before, self.after), where, strict=True):
            index = index_of.get(change.name)
            if index is None:
                sides.append("(none)")
                continue
            sizes = shape(figures.planned.shapes[index])
            seconds = float(figures.planned.busiest[index, :-1].sum())
            sides.append(f"{layout(figures.planned.layouts[index], 32)} {milliseconds(seconds)}")
        return f"  {shortened(change.name, 30)} {sizes}: {sides[0]} -> {sides[1]}"


def _change(before: float, after: float) -> str:
    return "=" if before == after else f"{after / before - 1:+.1%}" if before > 0 else "new"
