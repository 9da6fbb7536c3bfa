"""Where the time of our step and our wrapper goes: `run.py --profile`.

Functions of the data path are timed from outside, each less the timed functions that it calls. Before each collective
of torch's the ranks meet, so that waiting for the slower rank is told apart from the transfer; in shared memory the
other rank is all that is waited for. What other work hides of a transfer shows nowhere.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.bench import step, wrap
from tests.bench.step_cells import QUICK, Cell
from tests.bench.workload import as_keyed
from tests.ranks import run_ranks

STEPS = 20
WAIT, TRANSFER = "wait for the other rank", "transfer in "

PHASES = {
    "sharders.embedding.data_path.engine:_Lookup.forward": "lookup and output dist, the rest",
    "sharders.embedding.data_path.engine:_Lookup.backward": "gradients, the rest",
    "sharders.embedding.data_path.engine:check_batch": "check",
    "sharders.embedding.batches.keyed_ids:keyed_ids": "parse",
    "sharders.embedding.ids.input_dist:InputDist.send": "input dist",
    "sharders.embedding.ids.input_dist:InputDist._split": "input dist: sort by row block",
    "sharders.embedding.ids.input_dist:InputDist.receive": "receive",
    "sharders.embedding.ids.input_dist:Received.slot_major": "receive: slot-major order",
    "sharders.embedding.ids.header:Handshake.exchange": "header",
    "sharders.embedding.lookup.numba_kernel:NumbaLookup.pooled": "lookup kernel",
    "sharders.embedding.lookup.numba_kernel:NumbaLookup.rows": "lookup kernel",
    "sharders.embedding.lookup.numba_kernel:NumbaLookup.order_pooled": "ids sorted for the update",
    "sharders.embedding.lookup.numba_kernel:NumbaLookup.order_rows": "ids sorted for the update",
    "sharders.embedding.lookup.numba_kernel:NumbaLookup.update_pooled": "update kernel",
    "sharders.shared_memory.memory_channel:poll_memory": WAIT,
    "sharders.shared_memory.memory_channel:wake": "the other rank is woken",
    "sharders.embedding.lookup.fbgemm_kernel:FbgemmLookup.pooled": "lookup kernel",
    "sharders.embedding.lookup.fbgemm_kernel:FbgemmLookup.update_pooled": "update kernel",
    "sharders.embedding.lookup.fbgemm_kernel:FbgemmLookup.update_rows": "update kernel",
    "sharders.embedding.results.pooled_output:PooledOutputDist.forward": "output: placing",
    "sharders.embedding.results.pooled_output:PooledOutputDist.backward": "gradients: pack",
    "sharders.embedding.exchange.output_dist:ResultExchange.wait": "wait for a transfer begun before",
    "sharders.embedding.results.unpooled_output:UnpooledOutputDist.forward": "output: placing",
    "sharders.embedding.results.unpooled_output:UnpooledOutputDist.backward": "gradients: pack",
}


class Clock:
    """Seconds of each phase, less the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        start = perf_counter()
        self._open.append((name, 0.0))
        try:
            yield
        finally:
            _, inner = self._open.pop()
            whole = perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - inner
            if self._open:
                self._open[-1] = (self._open[-1][0], self._open[-1][1] + whole)

    def timed(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`fn` as a phase."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return fn(*args, **kwargs)

        return run

    def exchange(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A collective as a phase named by the one that it is in, after the ranks have met."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(WAIT):
                dist.barrier()
            with self.phase(TRANSFER + (self._open[-1][0] if self._open else "the engine")):
                return fn(*args, **kwargs)

        return run


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Time the functions of `PHASES` and every all-to-all."""
    patches = []
    for where, name in PHASES.items():
        module, path = where.split(":")
        owner: Any = import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if last not in vars(owner or object):
            print(f"not timed, for it is no longer there: {where}")
            continue
        given = vars(owner)[last]
        fn = clock.timed(given.__func__ if isinstance(given, staticmethod) else given, name)
        patches.append(mock.patch.object(owner, last, staticmethod(fn) if isinstance(given, staticmethod) else fn))
    patches.append(mock.patch.object(dist, "all_to_all_single", clock.exchange(dist.all_to_all_single)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def run() -> None:
    """Print the phases of some cells of the step, then what the wrapper's time is spent on."""
    for cell in QUICK:
        phases, operators = run_ranks(cell.ranks, profile_step, cell, timeout=240)[0]
        print(f"\n== {cell.name}: rank 0, ms per step, {sum(phases.values()):.2f} in all")
        for phase, ms in sorted(phases.items(), key=lambda item: -item[1]):
            print(f"{ms:9.3f}  {phase}")
        print("   operators: " + ", ".join(f"{op} {ms:.2f}" for op, ms in operators))
    for layout in ("table_wise", "row_wise", None):
        print(f"\n== wrap 1,000 tables on meta, {layout or 'the planner'}: rank 0, seconds under the profiler")
        print(run_ranks(wrap.RANKS, profile_wrap, layout, timeout=300)[0])


def profile_step(cell: Cell) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """On each rank: ms per step of each phase; and of the costliest operators, measured apart."""
    work = cell.work
    batches, grads = step.make_batches(work)
    side = step.Side(step.wrap_ours(cell), work, step.make_grads(work))
    for i in range(5):
        side.step(as_keyed(work, batches[i % step.BATCHES]), grads[i % step.BATCHES])
    clock = Clock()
    with watched(clock):
        for i in range(STEPS):
            features = as_keyed(work, batches[i % step.BATCHES])
            dist.barrier()
            with clock.phase("autograd and the rest"):
                side.step(features, grads[i % step.BATCHES])
    with torch.profiler.profile() as profiler:
        for i in range(5):
            side.step(as_keyed(work, batches[i % step.BATCHES]), grads[i % step.BATCHES])
    top = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)[:10]
    operators = [(e.key, e.self_cpu_time_total / 5e3) for e in top]
    return {name: 1e3 * s / STEPS for name, s in clock.seconds.items()}, operators


def profile_wrap(layout: str | None) -> str:
    """On each rank: the functions in which our wrapper spends most."""
    wrap.wrap_ours(layout, "meta")  # imports and first uses apart
    make = wrap.prepare_ours(layout, "meta")
    profiler = cProfile.Profile()
    profiler.runcall(make)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("cumtime").print_stats(25)
    stats.sort_stats("tottime").print_stats(15)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())
