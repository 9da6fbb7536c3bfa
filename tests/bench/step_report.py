"""What the step's matrix found: a line for each cell, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median

from tests.bench.report import Result
from tests.bench.rounds import middle_half
from tests.bench.step_cells import Cell

COLUMNS = (
    "cell", "TorchRec ms", "ours ms", "ratio", "memory MB", "wire MB", "stream ms", "ours/stream", "rows ms",
    "ours/rows", "peak MB, TorchRec", "ours",
)  # fmt: skip
FORM = "{:66} {:>8} {:>8} {:>17} {:>7} {:>7} {:>7} {:>6} {:>7} {:>6} {:>7} {:>7}"
BY_OPTIMIZER = {"rowwise_adagrad": ("row-wise Adagrad", 2.2), "sgd": ("SGD", 1.6)}
WORST, SEQUENCES, OVER_BOUND = 1.15, 3.5, 1.3
THIRDS = 3


@dataclass(frozen=True)
class Row:
    """One cell.

    Args:
        theirs, ours: ms.
        ratios: of the rounds.
        memory, wire: least MB, mean over the ranks.
        stream, rows: seconds of the two bounds.
        their_peak, our_peak: bytes of memory, on the rank where they are most.
    """

    cell: Cell
    theirs: float
    ours: float
    ratios: Sequence[float]
    memory: float
    wire: float
    stream: float
    rows: float
    their_peak: int
    our_peak: int

    @property
    def ratio(self) -> float:
        """Of the cell."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the ratios."""
        return middle_half(self.ratios)

    @property
    def thirds(self) -> list[float]:
        """The ratio of every third of the rounds, as if each were a run of its own."""
        return [median(self.ratios[i::THIRDS]) for i in range(THIRDS)]

    @property
    def over_bounds(self) -> tuple[float, float]:
        """Our step's time by the two."""
        return self.ours / (1e3 * self.stream), self.ours / (1e3 * self.rows)

    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        ratio = "{:.2f} ({:.2f}..{:.2f})".format(self.ratio, *self.spread)
        least = [f"{self.memory:.3g}", f"{self.wire:.3g}"]
        for bound, over in zip((self.stream, self.rows), self.over_bounds, strict=True):
            least += [f"{1e3 * bound:.3g}", f"{over:.2f}"]
        peaks = (f"{self.their_peak / 1e6:.0f}", f"{self.our_peak / 1e6:.0f}")
        return self.cell.name, f"{self.theirs:.4g}", f"{self.ours:.4g}", ratio, *least, *peaks

    def __str__(self) -> str:
        return FORM.format(*self.cells())


HEADER = FORM.format(
    "", "TorchRec", "ours ms", "ratio", "memory", "wire MB", "stream", "over", "rows", "over", "peak MB", "ours"
)


def goals(rows: Sequence[Row]) -> list[Result]:
    """Means and worst cells with what they must reach; in a mean's brackets, those of three thirds of the rounds."""
    full = [row for row in rows if row.cell.fbgemm]
    results = []
    for optimizer, (what, goal) in BY_OPTIMIZER.items():
        of_optimizer = [row for row in full if row.cell.work.optimizer == optimizer]
        results += _mean(f"step: geometric mean, {what}", of_optimizer, goal)
    results += _mean("step: geometric mean, sequences", [row for row in full if not row.cell.work.pooled], SEQUENCES)
    results += _mean("step: geometric mean, our side without FBGEMM", [row for row in rows if row not in full], None)
    ours = geometric_mean([row.ours for row in rows])
    worst = min(rows, key=lambda row: row.ratio)
    results.append(
        Result(f"step: worst, {worst.cell.name}", "ms", worst.theirs, worst.ours, worst.ratio, WORST, worst.spread)
    )
    near = sum(min(row.thirds) < WORST for row in rows)
    results.append(Result(f"step: cells under {WORST} in some third of the rounds", "", None, near, None, None))
    for which, (name, goal) in enumerate((("stream", OVER_BOUND), ("rows", None))):
        bound = 1e3 * geometric_mean([getattr(row, name) for row in rows])
        results.append(Result(f"step: bound of the {name}", "ms", bound, ours, None, None))
        over = fmean(row.over_bounds[which] for row in rows)
        results.append(Result(f"step: ours by the bound of the {name}, mean", "", None, over, None, goal))
    most = max(rows, key=lambda row: row.our_peak / row.their_peak)
    peaks = most.their_peak / 1e6, most.our_peak / 1e6
    results.append(Result(f"step: peak memory, {most.cell.name}", "MB", *peaks, peaks[0] / peaks[1], 1.0))
    more = sum(row.our_peak > row.their_peak for row in rows)
    results.append(Result(f"step: cells of {len(rows)} with more memory than TorchRec", "", None, more, None, 0))
    return results


def _mean(name: str, rows: Sequence[Row], goal: float | None) -> list[Result]:
    if not rows:
        return []
    means = [geometric_mean([getattr(row, side) for row in rows]) for side in ("theirs", "ours", "ratio")]
    thirds = [geometric_mean([row.thirds[i] for row in rows]) for i in range(THIRDS)]
    return [Result(f"{name} of {len(rows)}", "ms", *means, goal, (min(thirds), max(thirds)))]


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, *(row.cells() for row in rows))]
    lines.insert(1, "| --- |" + " ---: |" * (len(COLUMNS) - 1))
    return "\n".join(lines)
