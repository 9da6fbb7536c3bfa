"""`Result`: one figure with its goal; printed as a line, kept as a row of BENCHMARKS.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """A measurement of ours beside a reference.

    Args:
        name: what was measured.
        unit: of `reference` and `ours`.
        reference: TorchRec's or the hand-written model's figure, or what is allowed; None where there is none.
        ours: our figure.
        ratio: reference / ours, larger is better; None where `ours` itself is held against the goal.
        goal: what `ratio` must reach, or `ours` must not exceed; None for information.
        spread: quartiles of the rounds' ratios.
        told: the verdict, where it is not the ratio's or the figure's alone.
    """

    name: str
    unit: str
    reference: float | None
    ours: float
    ratio: float | None
    goal: float | None
    spread: tuple[float, float] | None = None
    told: str = ""

    @property
    def verdict(self) -> str:
        """OK, MISSED, UNDECIDED where both may be true, or nothing where there is no goal."""
        if self.goal is None or self.told:
            return self.told
        met = self.ratio >= self.goal if self.ratio is not None else self.ours <= self.goal
        return "OK" if met else "MISSED"

    @property
    def aim(self) -> str:
        """The goal in words."""
        if self.goal is None:
            return "for information"
        return f"ratio >= {self.goal:g}" if self.ratio is not None else f"<= {self.goal:.4g} {self.unit}"

    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        reference = "" if self.reference is None else f"{self.reference:.4g} {self.unit}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        ratio += "" if self.spread is None else " ({:.2f}..{:.2f})".format(*self.spread)
        return self.name, reference, f"{self.ours:.4g} {self.unit}", ratio, self.aim, self.verdict

    def __str__(self) -> str:
        name, reference, ours, ratio, aim, verdict = self.cells()
        return f"{name:63} {reference:>12} {ours:>12} {ratio:>17}  {aim:18} {verdict}"


HEADER = f"{'':63} {'reference':>12} {'ours':>12} {'ratio':>17}  {'goal':18}"


def markdown(results: Sequence[Result]) -> str:
    """A table of all results."""
    lines = ["| what | reference | ours | ratio | goal | |", "| --- | ---: | ---: | ---: | --- | --- |"]
    return "\n".join(lines + ["| " + " | ".join(r.cells()) + " |" for r in results])


def rewrite(path: Path, text: str, what: str) -> None:
    """Put `text` between the two marks of the file, `<!-- what: begin -->` and `<!-- what: end -->`.

    Raises:
        ValueError: the marks are not there.
    """
    whole, begin, end = path.read_text(), f"<!-- {what}: begin -->", f"<!-- {what}: end -->"
    if begin not in whole or end not in whole:
        raise ValueError(f"{path.name} needs the lines {begin!r} and {end!r}, between which results go")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", whole))
