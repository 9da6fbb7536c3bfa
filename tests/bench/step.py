"""One training step of sharded tables, TorchRec's and ours: forward, backward and the update inside it.

Both run in the same processes, on the same batches, from the same weights, in turns: a round is some steps of one and
as many of the other. A step's time is the slowest rank's; a round gives the ratio of the quickest step of each; the
result is the median of these ratios.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dmp
from tests.bench.report import Result
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import DEMO_ROWS, Workload, as_keyed, criteo_rows, make_batch, make_model, make_plan
from tests.ranks import mesh, run_ranks

RANKS, STEPS, BATCHES, CHECKED, TOLERANCE = 2, 3, 4, 3, 1e-5
MIN_ROUNDS, MAX_ROUNDS, SECONDS_OF_POINT = 7, 25, 5.0
_ALL = ("table_wise", "row_wise", "column_wise")

POINTS: dict[str, tuple[Workload, Sequence[str]]] = {
    "one id per bag, dim 64, B 2048": (Workload(criteo_rows(100_000), 64, 2048), _ALL),
    "bags of 0..8, dim 64, B 2048": (Workload(criteo_rows(100_000), 64, 2048, max_bag=8), _ALL),
    "the demo's tables, dim 16, B 256": (Workload(DEMO_ROWS, 16, 256), _ALL),
    "sequence, one id, dim 64, B 2048": (Workload(criteo_rows(100_000), 64, 2048, pooled=False), _ALL[:2]),
    "sequence, 0..8 ids, dim 64, B 512": (Workload(criteo_rows(100_000), 64, 512, 8, pooled=False), _ALL[:2]),
}


@dataclass
class Side:
    """One implementation and, for a batch's outputs, their gradients."""

    model: nn.Module
    work: Workload
    grads: dict[str, torch.Tensor]
    """Of pooled features: (B, dim) each."""

    columns: torch.Tensor | None = None
    """`grads` side by side, in the order of this side's result."""

    def step(self, features: Any, rows: list[torch.Tensor]) -> Any:
        """Forward and backward; `rows` are the gradients of unpooled results, by feature."""
        out = self.model(features)
        if self.work.pooled:
            values = out.values()
            if self.columns is None:
                self.columns = torch.cat([self.grads[key] for key in out.keys()], 1)  # noqa: SIM118
            values.backward(self.columns)
        else:
            torch.autograd.backward([out[key].values() for key in self.work.features], rows)
        return out

    def outputs(self, out: Any) -> torch.Tensor:
        """Results in the order of `Workload.features`: theirs come in an order of their own."""
        if self.work.pooled:
            by_key = out.to_dict()
            return torch.cat([by_key[key] for key in self.work.features], 1).detach()
        return torch.cat([out[key].values() for key in self.work.features]).detach()


def run(quick: bool) -> list[Result]:
    """All points; `quick` runs few rounds of each."""
    results = []
    for name, (work, layouts) in POINTS.items():
        for layout in layouts:
            of_ranks = run_ranks(RANKS, compare, work, layout, quick, timeout=240)
            theirs, ours = (quickest_of_rounds(slowest([r[i] for r in of_ranks])) for i in (0, 1))
            result = Result(f"step: {layout}, {name}", "ms", *both(theirs, ours, 1e3), 1.0, quartiles(theirs, ours))
            print(result, flush=True)
            results.append(result)
    return results


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """For each measurement the largest over the ranks."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


def quickest_of_rounds(seconds: Sequence[float]) -> list[float]:
    """The quickest step of each round: what others on the machine add is no part of it."""
    return [min(seconds[i : i + STEPS]) for i in range(0, len(seconds), STEPS)]


def both(theirs: Sequence[float], ours: Sequence[float], unit: float) -> tuple[float, float, float]:
    """Median of each in `unit`s per second, and the median of the ratios inside each round."""
    ratio = median(t / o for t, o in zip(theirs, ours, strict=True))
    return median(theirs) * unit, median(ours) * unit, ratio


def quartiles(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Of the ratios of the rounds."""
    ratios = sorted(t / o for t, o in zip(theirs, ours, strict=True))
    return ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]


def compare(work: Workload, layout: str, quick: bool) -> tuple[list[float], list[float]]:
    """On each rank: check that both give the same, then time them; seconds of every step, theirs and ours."""
    theirs, ours = make_sides(work, layout)
    batches, grads = make_batches(work)
    for i in range(CHECKED):
        start = perf_counter()
        batch, rows = batches[i % BATCHES], grads[i % BATCHES]
        a = theirs.outputs(theirs.step(as_keyed(work, batch), rows))
        b = ours.outputs(ours.step(as_keyed(work, batch), rows))
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE):
            raise AssertionError(f"outputs differ by {float((a - b).abs().max())} in step {i}: nothing to time")
    pair = torch.tensor(perf_counter() - start)  # the same on every rank, so that all run as many rounds
    dist.all_reduce(pair, dist.ReduceOp.MAX)
    rounds = min(max(int(SECONDS_OF_POINT / (STEPS * float(pair))), MIN_ROUNDS), 3 if quick else MAX_ROUNDS)
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            order = (0, 1) if i % 2 == 0 else (1, 0)
            for which in order:
                times[which].extend(timed((theirs, ours)[which], batches, grads, STEPS))
    finally:
        gc.enable()
    return times


def timed(
    side: Side, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], grads: Sequence[list[torch.Tensor]], steps: int
) -> list[float]:
    """Seconds of each step; the ranks begin each together."""
    seconds = []
    for i in range(steps):
        features, rows = as_keyed(side.work, batches[i % BATCHES]), grads[i % BATCHES]
        dist.barrier()
        start = perf_counter()
        side.step(features, rows)
        seconds.append(perf_counter() - start)
    return seconds


def make_sides(work: Workload, layout: str) -> tuple[Side, Side]:
    """TorchRec's and ours, from the same weights: loaded, for TorchRec drops those that a model comes with."""
    model = make_model(work, "meta")
    theirs = torchrec_wrap(model, torchrec_plan(model, layout, RANKS))
    theirs.load_state_dict(dict(weights(work)))
    return Side(theirs, work, make_grads(work)), Side(wrap_ours(work, layout), work, make_grads(work))


def wrap_ours(work: Workload, layout: str) -> nn.Module:
    """Our wrapper on a new model."""
    model = make_model(work, "meta")
    plan = make_plan(layout, [name for name, _ in model.named_parameters()], RANKS)
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
    ours = dmp.DistributedModelParallel(model, env=env, plan=plan, init_parameters=False)
    ours.load_state_dict(weights(work))
    return ours


@lru_cache(maxsize=1)
def weights(work: Workload) -> dict[str, torch.Tensor]:
    """Whole tables, the same on every rank."""
    return make_model(work).state_dict()


def make_grads(work: Workload) -> dict[str, torch.Tensor]:
    """For each pooled feature the (B, dim) gradient of its result."""
    generator = torch.Generator().manual_seed(7)
    return {key: torch.randn(work.batch_size, work.dim, generator=generator) for key in work.features if work.pooled}


def make_batches(work: Workload) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[list[torch.Tensor]]]:
    """This rank's batches, and for unpooled results the gradients of each feature's rows."""
    batches = [make_batch(work, 100 * i + dist.get_rank()) for i in range(BATCHES)]
    grads: list[list[torch.Tensor]] = []
    for values, lengths in batches:
        counts = lengths.view(len(work.rows), -1).sum(1).tolist()
        whole = torch.full((values.numel() if not work.pooled else 0, work.dim), 0.01)
        grads.append([part.clone() for part in whole.split(counts)] if not work.pooled else [])
    return batches, grads
