"""`make bench-planner`: the planner on table sets and meshes of 8 to 4,096 ranks, with its goals; see BENCHMARKS.md."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from dmp import ShardingPlan
from sharders import default_sharders
from tests.bench.planner_cases import (
    PUBLISHED,
    QUICK,
    RANDOM,
    RANKS,
    TableSet,
    is_impossible,
    mesh,
    planner,
    table_set,
    topology,
)
from tests.bench.planner_judge import step_phases
from tests.bench.planner_pieces import Pieces, layouts_of
from tests.bench.planner_run import Run, Seen, run, warm_up
from tests.bench.planner_simple import simple_steps
from tests.bench.planner_torchrec import our_step_ms, their_plan
from tests.bench.report import HEADER, Result, markdown, rewrite

ROOT = Path(__file__).resolve().parents[2]
SECONDS, GIGABYTES = 2.0, 2.0
SMALL_GAP, LARGE_GAP = 0.01, 0.05
BY_HAND = 0.95  # a plan by hand may be that much of ours, where the two models differ


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
            return name, *cost, "", "", "no plan can fit" if self.impossible else f"NO PLAN{fault}", *[""] * 5
        step, bound = f"{self.run.step * 1e3:.4g}", f"{self.run.bound * 1e3:.4g}"
        seen = self.run.seen
        best = f"{seen.best * 1e3:.4g}" if seen else ""
        judged = (f"{seen.ours * 1e3:.4g}", f"{best} ({seen.best_name})", f"{seen.ratio:.2f}") if seen else ("", "", "")
        theirs = f"{self.their_ratio:.2f}" if self.their_ratio else ""
        by_theirs = f"{seen.their_ratio:.2f}" if seen and seen.their_ratio is not None else ""
        return name, *cost, step, bound, f"{self.run.gap:.2%}", *judged, theirs, by_theirs

    @property
    def their_ratio(self) -> float | None:
        """Under our model, TorchRec's plan to ours."""
        seen = self.run.seen
        return seen.theirs / self.run.step if seen and seen.theirs and self.run.step else None

    def __str__(self) -> str:
        return FORM.format(*self.cells())


COLUMNS = (
    "case",
    "CPU s",
    "MB",
    "step ms",
    "bound ms",
    "gap",
    "judged ms",
    "by hand ms",
    "ratio",
    "TorchRec",
    "its model",
)
FORM = "{:24} {:>7} {:>7} {:>9} {:>9} {:>8} {:>10} {:>32} {:>6} {:>8} {:>9}"


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
    warnings.simplefilter("ignore")  # of libraries, TorchRec's log too
    logging.disable(logging.WARNING)
    warm_up()
    print(FORM.format(*COLUMNS))
    cases: list[Case] = []
    for name in args.names or (QUICK if args.quick else known):
        tables = table_set(name)
        module = tables.module()
        for ranks in args.ranks:
            cases.append(Case(name, ranks, is_impossible(tables, ranks), run(tables, ranks, module, judged)))
            print(cases[-1], flush=True)
    results = goals(cases)
    print(f"\n{HEADER}", *results, sep="\n")
    if args.write:
        write(cases, results)
    return 1 if args.strict and any(r.verdict == "MISSED" for r in results) else 0


def judged(tables: TableSet, ranks: int, module: Any, plan: ShardingPlan) -> Seen:
    """The plan under the second model, beside the best of the simple ones."""
    pieces = Pieces.of(tables.tables, layouts_of(plan, tables.tables), mesh(ranks))
    ours = float(sum(step_phases(tables.tables, pieces, ranks).values()))
    by_hand = simple_steps(tables.tables, ranks)
    best = min(by_hand, key=by_hand.__getitem__, default="")
    fullest = float(pieces.weight_bytes(tables.tables, ranks).max()) / topology(ranks).usable_bytes
    seen = Seen(ours, best, by_hand.get(best, float("inf")), fullest)
    their = their_plan(tables.name, ranks)
    if their is None:
        return seen
    costing = planner(tables)  # its plan may count fewer bytes than ours: with room for both, which costs no time
    costing.topology = replace(topology(ranks), memory_bytes=1e12)
    costed = costing.plan(module, default_sharders(), mesh(ranks), pinned=their.plan)
    report = costed.report  # type: ignore[attr-defined]
    return replace(seen, theirs=report.step_seconds, their_ratio=their.step_ms / our_step_ms(tables, ranks, module))


def goals(cases: Sequence[Case]) -> list[Result]:
    """What must be true, of all cases together."""
    possible = [c for c in cases if not c.impossible]
    planned = [c for c in possible if c.run.step is not None]
    gaps = [c.run.gap for c in planned]
    results = [
        Result(
            "most CPU seconds of one plan",
            "s",
            None,
            max((c.run.seconds for c in cases if c.run.step), default=0.0),
            None,
            SECONDS,
        ),
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
    if len(planned) < len(cases):
        longest = max(c.run.seconds for c in cases if c.run.step is None)
        results.append(
            Result("most CPU seconds of saying that nothing fits, and what would", "s", None, longest, None, None)
        )
    if planned:
        close = sum(gap <= SMALL_GAP for gap in gaps) / len(gaps)
        results += [
            Result(f"share of {len(gaps)} plans within {SMALL_GAP:.0%} of the bound", "", 1.0, close, close, 0.9),
            Result("largest gap", "%", None, 100 * max(gaps), None, 100 * LARGE_GAP),
        ]
    seen = [c.run.seen for c in planned if c.run.seen]
    if seen:
        ratios = [s.ratio for s in seen]
        mean = float(np.exp(np.mean(np.log(ratios))))
        results += [
            Result(
                "a plan by hand beside ours, by the second model: least", "", 1.0, min(ratios), min(ratios), BY_HAND
            ),
            Result("a plan by hand beside ours, by the second model: geometric mean", "", 1.0, mean, mean, 1.0),
        ]
    for what, ratios in (
        ("TorchRec's plan beside ours, by our model", [c.their_ratio for c in planned]),
        ("TorchRec's plan beside our search, by its model", [c.run.seen and c.run.seen.their_ratio for c in planned]),
    ):
        known = [r for r in ratios if r is not None]
        if known:
            least = 1.0 if "our model" in what else 0.99
            results.append(Result(f"{what}: least of {len(known)}", "", 1.0, min(known), min(known), least))
            mean = float(np.exp(np.mean(np.log([r for r in known if r > 0]))))
            results.append(Result(f"{what}: geometric mean", "", 1.0, mean, mean, None))
    return results


def write(cases: Sequence[Case], results: Sequence[Result]) -> None:
    """Put both tables into BENCHMARKS.md."""
    head = f"{date.today()}, {os.cpu_count()} cores shared with others; processor seconds:"
    rows = [" | ".join(("", *cells, "")).strip() for cells in (COLUMNS, *(c.cells() for c in cases))]
    rows.insert(1, "| --- |" + " ---: |" * (len(COLUMNS) - 1))
    rewrite(ROOT / "BENCHMARKS.md", f"{head}\n\n{markdown(results)}\n\n" + "\n".join(rows), "planner")


if __name__ == "__main__":
    sys.exit(main())
