"""One training step of sharded tables, TorchRec's and ours: forward, backward and the update inside it.

Both run in the same processes, on the same batches, from the same weights, in turns: see rounds.py. Before they are
timed they must agree, and the peak of each one's memory is taken while they show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dmp
from sharders.embedding.lookup import fbgemm_kernel
from tests.bench import floor, pace
from tests.bench.report import Result
from tests.bench.resident import counted_elsewhere, give_back, reset_peak, resident
from tests.bench.rounds import in_turns, of_all_ranks, quickest_of_rounds, slowest
from tests.bench.step_cells import BAGS, CELLS, KINDS, OPTIMIZERS, QUICK, Cell
from tests.bench.step_report import HEADER as LINES
from tests.bench.step_report import Row, goals, table
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import Workload, as_keyed, make_batch, make_model, make_plan
from tests.ranks import close_pools, mesh, run_ranks

BATCHES, CHECKED, TOLERANCE = 4, 3, 1e-5
MIN_ROUNDS, MAX_ROUNDS, MAX_STEPS = 6, 60, 3  # rounds in threes, each third of which is a run of its own
Batch = tuple[torch.Tensor, torch.Tensor]  # ids, lengths
SECONDS, QUICK_SECONDS = 5.0, 2.5  # of both sides' steps together; large cells take their least rounds


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


class Measured(NamedTuple):
    """What one rank found, of theirs and of ours."""

    theirs: list[float]
    """Seconds of every step."""

    ours: list[float]
    steps: int
    """Of a round."""

    peaks: tuple[int, int]
    """Bytes above what was there before the model."""


def first_use() -> Result:
    """Memory that a process takes once, for what is loaded and compiled: each side in processes of its own."""
    used = []
    for ours in (False, True):
        close_pools()
        used.append(max(run_ranks(2, _first_use, ours, timeout=300)) / 1e6)
    return Result("step: first use, memory of a process", "MB", used[0], used[1], used[0] / used[1], None)


def _first_use(ours: bool) -> int:
    give_back()
    before = resident("RssAnon")
    for optimizer in OPTIMIZERS:
        for cell in _smallest(2, optimizer):
            _try(cell, wrap_ours if ours else wrap_theirs)
    give_back()
    return resident("RssAnon") - before


def run(quick: bool) -> tuple[list[Result], str]:
    """All cells, or some of them with fewer rounds: what is asked of all together, and their table."""
    print(pace.measured(), LINES, sep="\n", flush=True)
    rows = []
    for cell in QUICK if quick else CELLS:
        rows.append(row_of(cell, QUICK_SECONDS if quick else SECONDS))
        print(rows[-1], flush=True)
    results = [*goals(rows), first_use()]
    print(*results, sep="\n", flush=True)
    return results, f"{pace.measured()}\n\n{table(rows)}"


def row_of(cell: Cell, seconds: float) -> Row:
    """One cell measured, beside its bounds."""
    theirs, ours, peaks = rounds_of(cell, seconds)
    least = floor.least_bytes(cell)
    bounds = floor.stream_seconds(least), floor.rows_seconds(least, cell.work.optimizer == "rowwise_adagrad")
    ratios = [t / o for t, o in zip(theirs, ours, strict=True)]
    return Row(cell, 1e3 * median(theirs), 1e3 * median(ours), ratios, *least.means, *bounds, *peaks)


def rounds_of(cell: Cell, seconds: float) -> tuple[list[float], list[float], tuple[int, int]]:
    """Theirs and ours, seconds of each round's quickest step, and their peaks of memory.

    In processes of its own: buffers that stay between steps and models are the cell's.
    """
    close_pools()
    of_ranks = run_ranks(cell.ranks, compare, cell, seconds, timeout=300)
    steps = of_ranks[0].steps
    theirs, ours = (quickest_of_rounds(slowest([r[i] for r in of_ranks]), steps) for i in (0, 1))
    return theirs, ours, (max(r.peaks[0] for r in of_ranks), max(r.peaks[1] for r in of_ranks))


def compare(cell: Cell, seconds: float) -> Measured:
    """On each rank: check that both give the same, and take their memory; then time them."""
    work = cell.work
    batches, grads = make_batches(work)
    warm_up(cell.ranks, work.optimizer)
    weights(work), make_grads(work)
    with without_fbgemm(cell):
        ours, shown, peak = first_steps(lambda: wrap_ours(cell), work, batches, grads)
    theirs, expected, their_peak = first_steps(lambda: wrap_theirs(cell), work, batches, grads)
    for i, (a, b) in enumerate(zip(expected, shown, strict=True)):
        allowed = TOLERANCE * max(1.0, float(a.abs().max()))
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=allowed):
            raise AssertionError(f"{cell.name}: outputs differ by {float((a - b).abs().max())} in step {i}")
    del shown, expected

    def step(side: Side) -> Any:
        return lambda i: partial(side.step, as_keyed(work, batches[i % BATCHES]), grads[i % BATCHES])

    start = perf_counter()
    in_turns([step(theirs), step(ours)], 1, 1)
    pair = of_all_ranks(perf_counter() - start)
    steps = min(max(int(seconds / (MIN_ROUNDS * pair)), 1), MAX_STEPS)
    rounds = min(max(int(seconds / (steps * pair)), MIN_ROUNDS), MAX_ROUNDS)
    with without_fbgemm(cell):
        return Measured(*in_turns([step(theirs), step(ours)], rounds, steps), steps, (their_peak, peak))


def first_steps(
    make: Callable[[], nn.Module], work: Workload, batches: Sequence[Batch], grads: Sequence[list[torch.Tensor]]
) -> tuple[Side, list[torch.Tensor], int]:
    """A new side, the outputs of its first steps, and the peak of the memory that tables and steps have taken."""
    give_back()
    before, foreign = reset_peak(), counted_elsewhere()
    side = Side(make(), work, make_grads(work))
    give_back()  # what wrapping and loading took for a while
    reset_peak()
    outputs = [side.outputs(side.step(as_keyed(work, batches[i]), grads[i])) for i in range(CHECKED)]
    return side, outputs, resident("VmHWM") - before - (counted_elsewhere() - foreign)


@lru_cache
def warm_up(ranks: int, optimizer: str) -> None:
    """What is loaded and compiled at first use is no cell's."""
    for cell in _smallest(ranks, optimizer):
        _try(cell, wrap_theirs)
        _try(cell, wrap_ours)


def _smallest(ranks: int, optimizer: str) -> list[Cell]:
    """Bags of one id and of many, in each layout that has kernels of its own, and sequences; with ids that are few and
    with ids that come again and again."""
    return [
        Cell(kind, ranks, Workload((64, 64, 64), 16, batch, bag, pooled=KINDS[kind][1], optimizer=optimizer))
        for kind in ("row-wise", "mixed", "sequence, row-wise")
        for batch in (8, 512)
        for bag in BAGS
    ]


def _try(cell: Cell, wrap: Callable[[Cell], nn.Module]) -> None:
    """One step."""
    batches, grads = make_batches(cell.work)
    Side(wrap(cell), cell.work, make_grads(cell.work)).step(as_keyed(cell.work, batches[0]), grads[0])


def wrap_theirs(cell: Cell) -> nn.Module:
    """TorchRec's wrapper on a new model; weights are loaded, for it drops those that a model comes with."""
    model = make_model(cell.work, "meta")
    theirs = torchrec_wrap(model, torchrec_plan(model, cell.layout, cell.ranks), cell.hosts)
    theirs.load_state_dict(dict(weights(cell.work)))
    return theirs


def wrap_ours(cell: Cell, sharders: Sequence[dmp.ModuleSharder] | None = None) -> nn.Module:
    """Our wrapper on a new model."""
    model = make_model(cell.work, "meta")
    plan = make_plan(cell.layout, [name for name, _ in model.named_parameters()], cell.ranks)
    env = dmp.ShardingEnv.from_mesh(mesh(*cell.axes))
    ours = dmp.DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, init_parameters=False)
    ours.load_state_dict(weights(cell.work))
    return ours


def without_fbgemm(cell: Cell) -> AbstractContextManager[Any]:
    """Our side finds no FBGEMM where the cell says so; TorchRec cannot do without."""
    if cell.fbgemm:
        return nullcontext()
    return mock.patch.object(fbgemm_kernel, "problem", return_value="it is not to be used here")


def weights(work: Workload) -> dict[str, torch.Tensor]:
    """Whole tables by the names that they have in the model, the same on every rank."""
    kind = "embedding_bags" if work.pooled else "embeddings"
    return {f"tables.{kind}.t{i}.weight": value for i, value in enumerate(_tables(work.rows, work.dim))}


@lru_cache(maxsize=1)
def _tables(rows: tuple[int, ...], dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.empty(n, dim).uniform_(-(n**-0.5), n**-0.5, generator=generator) for n in rows]


@lru_cache(maxsize=1)
def make_grads(work: Workload) -> dict[str, torch.Tensor]:
    """For each pooled feature the (B, dim) gradient of its result."""
    generator = torch.Generator().manual_seed(7)
    return {key: torch.randn(work.batch_size, work.dim, generator=generator) for key in work.features if work.pooled}


def make_batches(work: Workload) -> tuple[list[Batch], list[list[torch.Tensor]]]:
    """This rank's batches, and for unpooled results the gradients of each feature's rows."""
    batches = [make_batch(work, 100 * i + dist.get_rank()) for i in range(BATCHES)]
    if work.pooled:
        return batches, [[] for _ in batches]
    generator = torch.Generator().manual_seed(7)
    grads: list[list[torch.Tensor]] = []
    for _, lengths in batches:
        counts = lengths.view(len(work.rows), -1).sum(1).tolist()
        grads.append([torch.randn(count, work.dim, generator=generator) for count in counts])
    return batches, grads
