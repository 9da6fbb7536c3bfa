"""What the step's matrix found: a line for each cell, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from tests.bench.report import Result
from tests.bench.step_cells import Cell

COLUMNS = (
    "cell", "TorchRec ms", "ours ms", "ratio", "memory MB", "wire MB", "bound ms", "ours/bound", "peak MB, TorchRec",
    "ours",
)  # fmt: skip
FORM = "{:66} {:>8} {:>8} {:>17} {:>7} {:>7} {:>7} {:>6} {:>7} {:>7}"
BY_OPTIMIZER = {"rowwise_adagrad": ("row-wise Adagrad", 2.2), "sgd": ("SGD", 1.6)}
WORST, SEQUENCES, OVER_BOUND = 1.15, 3.5, 1.3


@dataclass(frozen=True)
class Row:
    """One cell.

    Args:
        theirs, ours: ms.
        ratio: median over the rounds.
        memory, wire: least MB, mean over the ranks.
        bound: seconds that these take.
        their_peak, our_peak: bytes of memory, on the rank where they are most.
    """

    cell: Cell
    theirs: float
    ours: float
    ratio: float
    spread: tuple[float, float]
    memory: float
    wire: float
    bound: float
    their_peak: int
    our_peak: int

    @property
    def over_bound(self) -> float:
        """Our step's time by its bound."""
        return self.ours / (1e3 * self.bound)

    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        ratio = "{:.2f} ({:.2f}..{:.2f})".format(self.ratio, *self.spread)
        least = (f"{self.memory:.3g}", f"{self.wire:.3g}", f"{1e3 * self.bound:.3g}", f"{self.over_bound:.2f}")
        peaks = (f"{self.their_peak / 1e6:.0f}", f"{self.our_peak / 1e6:.0f}")
        return self.cell.name, f"{self.theirs:.4g}", f"{self.ours:.4g}", ratio, *least, *peaks

    def __str__(self) -> str:
        return FORM.format(*self.cells())


HEADER = FORM.format("", "TorchRec", "ours ms", "ratio", "memory", "wire MB", "bound", "over", "peak MB", "ours")


def goals(rows: Sequence[Row]) -> list[Result]:
    """Means and worst cells with what they must reach."""
    full = [row for row in rows if row.cell.fbgemm]
    results = []
    for optimizer, (what, goal) in BY_OPTIMIZER.items():
        of_optimizer = [row for row in full if row.cell.work.optimizer == optimizer]
        results += _mean(f"step: geometric mean, {what}", of_optimizer, goal)
    results += _mean("step: geometric mean, sequences", [row for row in full if not row.cell.work.pooled], SEQUENCES)
    results += _mean("step: geometric mean, our side without FBGEMM", [row for row in rows if row not in full], None)
    worst = min(rows, key=lambda row: row.ratio)
    results.append(
        Result(f"step: worst, {worst.cell.name}", "ms", worst.theirs, worst.ours, worst.ratio, WORST, worst.spread)
    )
    bound = 1e3 * geometric_mean([row.bound for row in rows])
    ours = geometric_mean([row.ours for row in rows])
    results.append(Result("step: bound", "ms", bound, ours, None, None))
    results.append(
        Result("step: ours by the bound, mean", "", None, fmean(r.over_bound for r in rows), None, OVER_BOUND)
    )
    most = max(rows, key=lambda row: row.our_peak / row.their_peak)
    peaks = most.their_peak / 1e6, most.our_peak / 1e6
    results.append(Result(f"step: peak memory, {most.cell.name}", "MB", *peaks, peaks[0] / peaks[1], 1.0))
    return results


def _mean(name: str, rows: Sequence[Row], goal: float | None) -> list[Result]:
    if not rows:
        return []
    means = [geometric_mean([getattr(row, side) for row in rows]) for side in ("theirs", "ours", "ratio")]
    return [Result(f"{name} of {len(rows)}", "ms", *means, goal)]


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, *(row.cells() for row in rows))]
    lines.insert(1, "| --- |" + " ---: |" * (len(COLUMNS) - 1))
    return "\n".join(lines)
