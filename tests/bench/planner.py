"""`make bench-planner`: the planner on table sets and meshes of 8 to 4,096 ranks, with its goals; see BENCHMARKS.md."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.planner_cases import PUBLISHED, QUICK, RANDOM, RANKS, is_impossible, table_set
from tests.bench.planner_run import Run, run, warm_up
from tests.bench.report import HEADER, Result, markdown, rewrite

ROOT = Path(__file__).resolve().parents[2]
SECONDS, GIGABYTES = 2.0, 2.0
SMALL_GAP, LARGE_GAP = 0.01, 0.05


@dataclass(frozen=True)
class Case:
    """A set of tables on a mesh, and what planning gave.

    Args:
        impossible: no plan can fit, by bytes alone.
    """

    tables: str
    ranks: int
    impossible: bool
    run: Run

    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        name, cost = f"{self.tables} @ {self.ranks}", (f"{self.run.seconds:.2f}", f"{self.run.peak_bytes / 1e6:.0f}")
        if self.run.step is None or self.run.bound is None:
            fault = "" if self.impossible else f": {self.run.error.splitlines()[0][:90]}"
            return name, *cost, "", "", "no plan can fit" if self.impossible else f"NO PLAN{fault}"
        step, bound = f"{self.run.step * 1e3:.4g}", f"{self.run.bound * 1e3:.4g}"
        return name, *cost, step, bound, f"{self.run.gap:.2%}"

    def __str__(self) -> str:
        name, seconds, memory, step, bound, gap = self.cells()
        return f"{name:24} {seconds:>7} {memory:>7} {step:>9} {bound:>9} {gap:>9}"


COLUMNS = ("case", "CPU s", "MB", "step ms", "bound ms", "gap")


def main() -> int:
    """Run what was asked for; 1 when `--strict` and a goal is missed."""
    parser = argparse.ArgumentParser(description="The planner on table sets and meshes, with its goals.")
    parser.add_argument("names", nargs="*", metavar="SET", help=f"some of {', '.join((*PUBLISHED, *RANDOM))}")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="multiples of 8")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--strict", action="store_true", help="end with status 1 when a goal is missed")
    parser.add_argument("--write", action="store_true", help="put the table into BENCHMARKS.md")
    args = parser.parse_args()
    known = (*PUBLISHED, *RANDOM)
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"expected some of {list(known)}; got {unknown}")
    warnings.simplefilter("ignore")  # of libraries
    warm_up()
    print("{:24} {:>7} {:>7} {:>9} {:>9} {:>9}".format(*COLUMNS))
    cases: list[Case] = []
    for name in args.names or (QUICK if args.quick else known):
        tables = table_set(name)
        module = tables.module()
        for ranks in args.ranks:
            cases.append(Case(name, ranks, is_impossible(tables, ranks), run(tables, ranks, module)))
            print(cases[-1], flush=True)
    results = goals(cases)
    print(f"\n{HEADER}", *results, sep="\n")
    if args.write:
        write(cases, results)
    return 1 if args.strict and any(r.verdict == "MISSED" for r in results) else 0


def goals(cases: Sequence[Case]) -> list[Result]:
    """What must be true, of all cases together."""
    possible = [c for c in cases if not c.impossible]
    planned = [c for c in possible if c.run.step is not None]
    gaps = [c.run.gap for c in planned]
    results = [
        Result("most CPU seconds of one plan", "s", None, max(c.run.seconds for c in cases), None, SECONDS),
        Result("most memory of one plan", "GB", None, max(c.run.peak_bytes for c in cases) / 1e9, None, GIGABYTES),
        Result(
            f"cases without a plan, of {len(possible)} that may have one",
            "",
            None,
            len(possible) - len(planned),
            None,
            0,
        ),
        Result(
            "plans made where none can be",
            "",
            None,
            sum(c.run.step is not None for c in cases if c.impossible),
            None,
            0,
        ),
    ]
    if planned:
        close = sum(gap <= SMALL_GAP for gap in gaps) / len(gaps)
        results += [
            Result(f"share of {len(gaps)} plans within {SMALL_GAP:.0%} of the bound", "", 1.0, close, close, 0.9),
            Result("largest gap", "%", None, 100 * max(gaps), None, 100 * LARGE_GAP),
        ]
    return results


def write(cases: Sequence[Case], results: Sequence[Result]) -> None:
    """Put both tables into BENCHMARKS.md."""
    head = f"{date.today()}, {os.cpu_count()} cores shared with others; processor seconds:"
    rows = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, *(c.cells() for c in cases))]
    rows.insert(1, "| --- |" + " ---: |" * (len(COLUMNS) - 1))
    rewrite(ROOT / "BENCHMARKS.md", f"{head}\n\n{markdown(results)}\n\n" + "\n".join(rows), "planner")


if __name__ == "__main__":
    sys.exit(main())
