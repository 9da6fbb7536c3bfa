"""One planning, in a process of its own: processor seconds, peak memory, and what came out."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import process_time
from typing import Any

from dmp import PlanError, ShardingPlan
from tests.bench.planner_cases import TableSet, mesh, planner
from tests.bench.resident import reset_peak, resident

LIMIT_S = 120  # of processor time, after which a case is given up


@dataclass(frozen=True)
class Seen:
    """What a second look at a plan says.

    Args:
        ours: its seconds under the second model.
        best_name, best: of the simple plans, the one that is quickest there, and its seconds.
        full: share of the usable memory that weights take on the fullest rank.
        theirs: seconds of TorchRec's plan under our model; None where its planner had none in time.
        their_ratio: by TorchRec's model, its plan's cost to that of what our search makes of that model.
    """

    ours: float
    best_name: str
    best: float
    full: float
    theirs: float | None = None
    their_ratio: float | None = None

    @property
    def ratio(self) -> float:
        """Of the simple plan to ours; above 1 ours is quicker."""
        return self.best / self.ours


@dataclass(frozen=True)
class Run:
    """What planning one set for one mesh took and gave.

    Args:
        seconds: of the processor, from `plan`'s call to its return.
        peak_bytes: resident memory above what there was before.
        step: modelled seconds of the plan; None where none was made.
        bound: seconds that no plan goes below.
        error: why there is no plan.
        seen: a second look at the plan.
    """

    seconds: float
    peak_bytes: int
    step: float | None = None
    bound: float | None = None
    error: str = ""
    seen: Seen | None = None

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of it."""
        return self.step / self.bound - 1 if self.step and self.bound else float("inf")


Then = Callable[[TableSet, int, Any, ShardingPlan], Seen]


def warm_up() -> None:
    """Plan something small, so that what is imported at first use is there in every process to come."""
    small = TableSet("small", _some(4))
    planner(small).plan(small.module(), _sharders(), mesh(16))


def run(tables: TableSet, ranks: int, module: Any, then: Then | None = None) -> Run:
    """Plan in a child of this process.

    Args:
        module: of the tables, made once for all meshes.
        then: called in the child with the plan, after the clock has stopped.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(there, tables, ranks, module, then))
    child.start()
    there.close()
    try:
        found: Run = here.recv()
    except EOFError:
        child.join()
        killed = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Run(LIMIT_S, 0, error=f"no plan in {LIMIT_S} CPU s" if killed else f"died with {child.exitcode}")
    child.join()
    return found


def _child(there: Connection, tables: TableSet, ranks: int, module: Any, then: Then | None) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 10))
    ours, sharders, env = planner(tables), _sharders(), mesh(ranks)
    gc.collect()
    before = reset_peak()
    begin = process_time()
    try:
        plan = ours.plan(module, sharders, env)
    except PlanError as error:
        there.send(Run(process_time() - begin, resident("VmHWM") - before, error=str(error)))
        return
    except Exception as error:
        there.send(Run(process_time() - begin, resident("VmHWM") - before, error=f"{type(error).__name__}: {error}"))
        return
    seconds, peak = process_time() - begin, resident("VmHWM") - before
    report = ours.report
    assert report is not None
    seen = None if then is None else then(tables, ranks, module, plan)
    there.send(Run(seconds, peak, report.step_seconds, report.lower_bound, seen=seen))


def _sharders() -> list[Any]:
    from sharders import default_sharders

    return list(default_sharders())


def _some(count: int) -> tuple[Any, ...]:
    from tests.bench.planner_cases import Table

    return tuple(Table(10_000 * (i + 1), 64, (3.0,)) for i in range(count))
