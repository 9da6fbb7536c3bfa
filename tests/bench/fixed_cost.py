"""What a step costs before there is work: 26 tables at batch 8, TorchRec's and ours, as in step.py."""

from __future__ import annotations

from tests.bench import step
from tests.bench.report import Result
from tests.bench.rounds import both, quartiles
from tests.bench.step_cells import Cell
from tests.bench.workload import Workload, criteo_rows

KINDS = ("table-wise", "row-wise", "column-wise")
WORK, GOAL = Workload(criteo_rows(10_000), 64, 8), 2.0


def run(quick: bool) -> tuple[list[Result], str]:
    """Each layout."""
    results = []
    for kind in KINDS:
        theirs, ours, _ = step.rounds_of(Cell(kind, 2, WORK), step.QUICK_SECONDS if quick else step.SECONDS)
        name = f"fixed cost: {kind}, batch 8"
        results.append(Result(name, "ms", *both(theirs, ours, 1e3), GOAL, quartiles(theirs, ours)))
        print(results[-1], flush=True)
    return results, ""
