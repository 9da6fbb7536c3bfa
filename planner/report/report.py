"""`PlanReport`: why a plan is as it is. Plain data, printed as text or written as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmp import Layout, shown_bytes
from planner.costs.cost_model import PHASES
from planner.dense.block import DenseBlock
from planner.report.page import render

_RANKS_SHOWN = 16
_PARAMETERS_SHOWN = 20


@dataclass(frozen=True)
class Alternative:
    """A layout that a parameter did not get.

    Args:
        layout: as offered, in any place.
        busiest_seconds: sum over phases on the rank it loads most; None where it may not be chosen.
        mean_seconds: the same averaged over ranks.
        rank_bytes: on the rank it fills most.
        reason: why not.
    """

    layout: Layout
    busiest_seconds: float | None
    mean_seconds: float | None
    rank_bytes: int | None
    reason: str


@dataclass(frozen=True)
class ParameterReport:
    """What a parameter got, and what it did not.

    Args:
        name: of the parameter.
        layout: chosen.
        is_pinned: given by the user.
        busiest_seconds: sum over phases on the rank that it loads most.
        mean_seconds: the same averaged over ranks.
        rank_bytes: on the rank it fills most.
        alternatives: cheapest first, then those that may not be chosen.
    """

    name: str
    layout: Layout
    is_pinned: bool
    busiest_seconds: float
    mean_seconds: float
    rank_bytes: int
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class PlanReport:
    """Modelled figures of a plan (`str()` is a table). Ranks are table ranks; seconds and bytes are the cost model's.

    Args:
        parameters: by name.
        rank_seconds: for each rank its seconds in each of `phases`, without latencies.
        rank_bytes: memory of tables and their buffers on each rank.
        usable_bytes: memory that a rank has for them.
        phase_seconds: slowest rank of each phase, latencies included; their sum is the step.
        lower_bound: seconds that no choice among the same layouts goes below.
        is_cut_short: the time budget ended the search before its work was done.
        planning_seconds: wall time of planning.
        dense: dense weights, by block.
        notes: what sharders say of their choice for dense weights, and what is taken for granted of them.
        dense_seconds: of a step on every rank, by what they go to (`planner.dense.block.SECONDS`), besides the phases.
        dense_bytes: on every rank, by part (`planner.dense.block.PARTS`), besides `rank_bytes`.
    """

    parameters: tuple[ParameterReport, ...]
    rank_seconds: tuple[tuple[float, ...], ...]
    rank_bytes: tuple[int, ...]
    usable_bytes: int
    phase_seconds: tuple[float, ...]
    lower_bound: float
    is_cut_short: bool
    planning_seconds: float
    phases: tuple[str, ...] = PHASES
    dense: tuple[DenseBlock, ...] = ()
    notes: tuple[str, ...] = ()
    dense_seconds: Mapping[str, float] = field(default_factory=dict)
    dense_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Weights on the fullest rank: `tables` (with buffers and optimizer state), and dense ones by kind."""
        found = {"tables": max(self.rank_bytes, default=0)}
        for block in self.dense:
            for kind, size in block.rank_bytes.items():
                found[kind] = found.get(kind, 0) + size
        return found

    @property
    def step_seconds(self) -> float:
        """Modelled time of a step: tables' phases and the dense part, after each other."""
        return self.table_seconds + sum(self.dense_seconds.values())

    @property
    def table_seconds(self) -> float:
        """Modelled time of the tables' phases."""
        return sum(self.phase_seconds)

    @property
    def gap(self) -> float:
        """How far the tables' seconds are above their lower bound, as a share of it; the best is at most so far off."""
        return self.table_seconds / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    def explain(self, name: str) -> str:
        """What a parameter got and what it did not, as text.

        Raises:
            KeyError: not a planned parameter.
        """
        found = {p.name: p for p in self.parameters}.get(name)
        if found is None:
            raise KeyError(f"no parameter {name!r} in this plan; it has {[p.name for p in self.parameters[:5]]} ...")
        return "\n".join(_explained(found))

    def __str__(self) -> str:
        lines = [
            f"step {self.step_seconds * 1e3:.3f} ms: tables {self.table_seconds * 1e3:.3f} ms, "
            f"lower bound {self.lower_bound * 1e3:.3f} ms, gap {self.gap:.1%}; "
            f"planned in {self.planning_seconds:.2f} s"
            + (", cut short by the time budget" if self.is_cut_short else ""),
            "",
            f"{'':>6}" + "".join(f"{p:>13}" for p in self.phases) + f"{'sum':>13}{'memory':>12}{'':>9}",
            f"{'step':>6}" + "".join(f"{s * 1e3:>10.3f} ms" for s in (*self.phase_seconds, self.table_seconds)),
        ]
        for rank in range(min(len(self.rank_bytes), _RANKS_SHOWN)):
            seconds, size = self.rank_seconds[rank], self.rank_bytes[rank]
            lines.append(
                f"{rank:>6}"
                + "".join(f"{s * 1e3:>10.3f} ms" for s in (*seconds, sum(seconds)))
                + f"{shown_bytes(size):>12} ({size / max(1, self.usable_bytes):>4.0%})"
            )
        if len(self.rank_bytes) > _RANKS_SHOWN:
            lines.append(f"{'':>6} and {len(self.rank_bytes) - _RANKS_SHOWN} more ranks")
        lines += _dense_lines(self)
        lines += ["", "parameters, those with the most work first, and what they did not get:"]
        for p in self.by_work()[:_PARAMETERS_SHOWN]:
            lines += _explained(p)
        if len(self.parameters) > _PARAMETERS_SHOWN:
            lines.append(f"and {len(self.parameters) - _PARAMETERS_SHOWN} more: report.explain(name)")
        return "\n".join(lines)

    def by_work(self) -> list[ParameterReport]:
        """Parameters, those with the most work first."""
        return sorted(self.parameters, key=lambda p: (-p.mean_seconds, p.name))

    def save_html(self, path: str | Path) -> None:
        """Write the report as one page without outside references.

        Raises:
            ModuleNotFoundError: Jinja2 is not installed.
        """
        Path(path).write_text(render(self), encoding="utf-8")


def _dense_lines(report: PlanReport) -> list[str]:
    if not report.dense:
        return []
    kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in report.bytes_by_kind.items())
    seconds = ", ".join(f"{what} {s * 1e3:.3f} ms" for what, s in report.dense_seconds.items())
    parts = ", ".join(f"{part} {shown_bytes(size)}" for part, size in report.dense_bytes.items())
    lines = ["", f"dense part of the step: {seconds}", f"of a rank's memory: {parts}", f"weights on a rank: {kinds}"]
    for block in report.dense:
        parts = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in block.rank_bytes.items())
        name = f"{block.count} x {block.name}" if block.name else "the rest"
        took = f"{sum(block.seconds.values()) * 1e3:.3f} ms"
        lines.append(f"{name}: {block.num_parameters:,} parameters, on a rank {parts or 'nothing'}; {took}")
    return lines + [f"note: {note}" for note in report.notes]


def _explained(p: ParameterReport) -> list[str]:
    lines = [f"{p.name} = {p.layout}{' (pinned)' if p.is_pinned else ''}: {_costs(p)}"]
    for other in p.alternatives:
        costs = "" if other.busiest_seconds is None else f"; {_costs(other)}"
        lines.append(f"    not {other.layout}: {other.reason}{costs}")
    return lines


def _costs(of: Any) -> str:
    seconds = f"busiest rank {of.busiest_seconds * 1e6:.1f} us, mean {of.mean_seconds * 1e6:.1f} us"
    return f"{seconds}, {shown_bytes(of.rank_bytes)}"
