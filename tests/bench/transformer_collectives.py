"""Collectives of a training step, ours and by hand, by operation."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from tests.bench.report import Result
from tests.bench.transformer_workload import MESHES, MODES, Workload, env_of, make_sides
from tests.ranks import run_ranks

WORK = Workload(dim=32, layers=3, heads=4, kv_heads=2, hidden=64, vocab=64, length=8, batch_size=2)
Counts = dict[str, int]


def run(quick: bool) -> list[Result]:
    """Each mesh and mode: no more than by hand, the step of the optimizer included."""
    results = []
    for mesh_name, mode in points():
        theirs, ours = (sum(sum(c.values()) for c in both) for both in counts(WORK, mesh_name, mode))
        name = f"collectives of a step: {mesh_name}{'' if mode == 'plain' else ', ' + mode}"
        results.append(Result(name, "", theirs, ours, None, theirs))
        print(results[-1], flush=True)
    return results


def points() -> list[tuple[str, str]]:
    """(mesh, mode): the modes where there is a tensor axis."""
    return [(name, mode) for name in MESHES for mode in (MODES if "tp" in MESHES[name][1] else ["plain"])]


def counts(work: Workload, mesh_name: str, mode: str) -> tuple[tuple[Counts, Counts], tuple[Counts, Counts]]:
    """By hand and ours: counts of forward and backward, and of the optimizer's step, which are those of every rank."""
    first, *others = run_ranks(prod(MESHES[mesh_name][0]), count, work, mesh_name, mode)
    assert all(other == first for other in others), [first, *others]
    return first


def count(work: Workload, mesh_name: str, mode: str) -> tuple[tuple[Counts, Counts], tuple[Counts, Counts]]:
    """On each rank, in the tenth step: the first two set up what others have, the first eight compare samples, and
    before the ninth ranks look at copies of weights."""
    found = []
    for side in make_sides(work, mesh_name, mode):
        batch = work.batch(env_of(mesh_name).data_rank, 0)
        for _ in range(9):
            side.backward(*batch)
            side.update()
        found.append((_counted(side.backward, *batch), _counted(side.update)))
    return found[0], found[1]


def _counted(run: Callable[..., Any], *args: Any) -> Counts:
    with CommDebugMode() as counter:
        run(*args)
    return {str(op).rpartition(".")[2]: n for op, n in counter.get_comm_counts().items()}
