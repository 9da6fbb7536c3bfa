"""What a step costs before there is work: 26 tables at batch 8, TorchRec's and ours, as in step.py."""

from __future__ import annotations

from tests.bench import step
from tests.bench.report import Result
from tests.bench.workload import Workload, criteo_rows
from tests.ranks import run_ranks

LAYOUTS = ("table_wise", "row_wise", "column_wise")
WORK, GOAL = Workload(criteo_rows(10_000), 64, 8), 2.0


def run(quick: bool) -> list[Result]:
    """Each layout."""
    results = []
    for layout in LAYOUTS:
        of_ranks = run_ranks(step.RANKS, step.compare, WORK, layout, quick, timeout=240)
        theirs, ours = (step.quickest_of_rounds(step.slowest([r[i] for r in of_ranks])) for i in (0, 1))
        figures = step.both(theirs, ours, 1e3)
        result = Result(f"fixed cost: {layout}, batch 8", "ms", *figures, GOAL, step.quartiles(theirs, ours))
        print(result, flush=True)
        results.append(result)
    return results
