"""Lookup kernels by themselves, on one thread: forward and update beside FBGEMM's, torch's, and the least bytes.

The bound is what must be read and written of rows, results, gradients and ids, at the speed of a large copy in the same
run. All kernels take turns, each on tables of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import geometric_mean, median
from time import thread_time

import torch
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import KERNELS, Lookup, compile_lookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented
from tests.bench.report import Result
from tests.bench.workload import criteo_rows

DIM, BATCHES = 64, 4
FASTER = {"rowwise_adagrad": 2.5, "sgd": 1.3}
"""Than FBGEMM's backward."""

ABOVE_BOUND = 1.8
SIDES = [(kernel, kind) for kernel in ("numba", "fbgemm", "torch") for kind in FASTER]
CELLS = {
    "one id, 1,024": (1024, 1, 1, True),
    "0..32 ids, 1,024": (1024, 0, 32, True),
    "one id, 4,096": (4096, 1, 1, True),
    "0..32 ids, 4,096": (4096, 0, 32, True),
    "unpooled 1..20, 1,024": (1024, 1, 20, False),
    "unpooled 1..20, 4,096": (4096, 1, 20, False),
}


@dataclass
class Batch:
    """Ids of every table, with their bags' bounds and the number for each table."""

    ids: Tensor
    offsets: Tensor
    segments: list[tuple[int, int]]
    distinct: int


def make_batch(rows: Sequence[int], bags: int, shortest: int, longest: int, seed: int) -> Batch:
    """Uniform ids."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (len(rows), bags), generator=g)
    parts = [torch.randint(0, r, (int(n.sum()),), generator=g) for r, n in zip(rows, lengths, strict=True)]
    offsets = torch.tensor([0, *accumulate(lengths.flatten().tolist())], dtype=torch.int32)
    segments = [(t, len(part)) for t, part in enumerate(parts)]
    return Batch(torch.cat(parts).int(), offsets, segments, sum(len(part.unique()) for part in parts))


def make_lookup(rows: Sequence[int], kernel: str, kind: str) -> Lookup:
    """Of tables of its own."""
    bank = Bank([[(r, DIM)] for r in rows], torch.float32, "cpu", OptimizerSpec.make(kind, lr=0.01))
    bank.weights.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(0))
    ranges = [RowRange(chunk, 0, r) for (chunk,), r in zip(bank.chunks, rows, strict=True)]
    return compile_lookup(bank, ranges, kernel=kernel)


def bytes_per_second() -> float:
    """Read and written by a copy of 256 MB."""
    source, target = torch.ones(1 << 26), torch.ones(1 << 26)
    return 2 * 4 * source.numel() / min(timed(lambda: target.copy_(source)) for _ in range(5))


def bound(batch: Batch, results: int, speed: float) -> tuple[float, float]:
    """Seconds of forward and update at least."""
    row = 4 * DIM
    ids = 4 * batch.ids.numel()
    return ((batch.distinct + results) * row + ids) / speed, ((2 * batch.distinct + results) * row + ids) / speed


def timed(what: Callable[[], object]) -> float:
    """Seconds of this thread on a CPU: what others take is not counted."""
    start = thread_time()
    what()
    return thread_time() - start


def step(lookup: Lookup, batch: Batch, grad: Tensor, pooled: bool) -> tuple[float, float]:
    """Seconds of forward and update."""
    read = Bags(batch.ids, batch.offsets) if pooled else Segmented(batch.ids, batch.segments)
    look_up, update = (lookup.pooled, lookup.update_pooled) if pooled else (lookup.rows, lookup.update_rows)
    lookup.bank.step()
    return timed(lambda: look_up(read)), timed(lambda: update(grad, read))  # type: ignore[operator]


def run(quick: bool) -> tuple[list[Result], str]:
    """A line for each cell and optimizer, the goals, which are means over the cells, and a table of all kernels."""
    cpu = torch.device("cpu")
    sides = [s for s in SIDES if KERNELS[s[0]].supports(cpu, torch.float32, None, []) is None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(sides, 3 if quick else 7)
    finally:
        torch.set_num_threads(threads)


def _run(sides: Sequence[tuple[str, str]], rounds: int) -> tuple[list[Result], str]:
    rows, speed = criteo_rows(100_000), bytes_per_second()
    lines = [
        f"Forward / update in CPU ms of one thread; a copy reads and writes {speed / 1e9:.1f} GB/s.\n",
        "| cell | bound | " + " | ".join(f"{kernel}, {kind}" for kernel, kind in sides) + " |",
        "| --- " * (2 + len(sides)) + "|",
    ]
    lookups = {side: make_lookup(rows, *side) for side in sides}
    above: list[float] = []
    faster: dict[str, list[float]] = {kind: [] for kind in FASTER}
    results: list[Result] = []
    for name, (bags, shortest, longest, pooled) in CELLS.items():
        batches = [make_batch(rows, bags, shortest, longest, seed) for seed in range(BATCHES)]
        seconds: dict[tuple[str, str], list[tuple[float, float]]] = {side: [] for side in sides}
        for i in range(rounds):
            for j, side in enumerate(sides):
                batch = batches[(i + j) % BATCHES]
                grad = torch.randn(bags, DIM * len(rows)) if pooled else torch.randn(batch.ids.numel(), DIM)
                seconds[side].append(step(lookups[side], batch, grad, pooled))
        results_here = bags * len(rows) if pooled else batches[0].ids.numel()
        least = sum(bound(batches[0], results_here, speed))
        best = {side: tuple(median(part) for part in zip(*of, strict=True)) for side, of in seconds.items()}
        cells = [f"{f * 1e3:.2f} / {b * 1e3:.2f}" for f, b in best.values()]
        lines.append(f"| {name} | {least * 1e3:.2f} | " + " | ".join(cells) + " |")
        for kind in FASTER:
            ours = best["numba", kind]
            if kind == "rowwise_adagrad":
                above.append(sum(ours) / least)
            if ("fbgemm", kind) in best:
                theirs = best["fbgemm", kind]
                faster[kind].append(theirs[1] / ours[1])
                both = sum(theirs) * 1e3, sum(ours) * 1e3
                results.append(Result(f"kernels, {name}, {kind}", "ms", *both, both[0] / both[1], None))
                print(results[-1])
    results.append(Result("kernels, step over the bound, mean", "x", None, sum(above) / len(above), None, ABOVE_BOUND))
    for kind, goal in FASTER.items():
        if faster[kind]:
            ratio = geometric_mean(faster[kind])
            results.append(Result(f"kernels, update by {kind}, FBGEMM / ours", "x", ratio, 1.0, ratio, goal))
    for result in results[-1 - len(FASTER) :]:
        print(result)
    print("\n".join(lines))
    return results, "\n".join(lines)
