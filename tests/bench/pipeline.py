"""One training step of a pipeline: ours against TorchRec's, and against the plain loop on the same model of ours.

Tables with an in-backward optimizer under two dense layers with Adagrad; batches are made where the step asks for them.
Rounds as in step.py, but for ours against the plain loop of near ranks: 3 % of a step of 5 ms are less than it varies
by, so there the plain loop also runs beside a copy of itself, and both are told apart as against_itself.py says. The
phases of the plain loop's step and of the pipeline's stand beside each other: what a pipeline hides of the ids'
exchange is missing from its input phase.

What can be hidden is waiting. Ranks of one host that share its memory wait for each other alone, and where each has one
core, all that is done takes its time whenever it is done: there the pipeline begins nothing ahead, and can but not be
slower. So the same step also runs with exchanges that take their time while no core works on them, as between hosts:
`Far` has what comes be there some ms after it was asked for. Of the four waits of a step (headers, ids, results,
gradients) a pipeline can hide what comes before the lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import dmp
from sharders import EmbeddingBagCollectionSharder
from sharders.channel import over_group
from tests.bench.against_itself import Beside, figures_of, interval, told_apart
from tests.bench.report import Result
from tests.bench.rounds import both, in_turns, quartiles, quickest_of_rounds, slowest
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import DEMO_ROWS, Workload, as_keyed, criteo_rows, make_batch, make_model, make_plan
from tests.ranks import close_pools, mesh, run_ranks

POINTS: dict[str, Workload] = {
    "bags of 0..8, dim 64, B 2048": Workload(criteo_rows(100_000), 64, 2048, max_bag=8),
    "the demo's tables, dim 16, B 256": Workload(DEMO_ROWS, 16, 256),
}
TOLERANCE = 1e-5
LAYOUT, ROUNDS, QUICK_ROUNDS, NUM_BATCHES, CHECKED = "row_wise", 15, 3, 8, 3
NEAR_GOAL, NEAR_S, QUICK_NEAR_S = 0.97, 60.0, 5.0
"""Of ours against the plain loop; for so long at most it is looked at."""

RANKS, DELAYS_MS = (2, 4), (0.0, 10.0)
PHASE_STEPS = 20
Phases = dict[str, list[float]]  # seconds, of the plain loop and of the pipeline


class Task(nn.Module):
    """The tables and two dense layers; losses and an output, as pipelines take them."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tables = make_model(work).tables
        self.over = nn.Sequential(nn.Linear(len(work.rows) * work.dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses, and what they are of."""
        out = self.over(self.tables(features).values())
        return out.pow(2).mean(), out.detach()


class Far:
    """A channel on which what comes is there `seconds` after it was asked for, and no core works meanwhile."""

    tells_sizes = False
    """As between hosts: ids follow their headers."""

    def __init__(self, channel: Any, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def all_to_all(self, *args: Any, **options: Any) -> Late:
        """See `Channel`."""
        return Late(self._channel.all_to_all(*args, **options), monotonic() + self._seconds)

    def landing(self, *of: Any) -> None:
        """See `Channel`: an answer is an exchange like others, as late."""


class Late(NamedTuple):
    """A transfer whose end is not before a time of the clock."""

    transfer: Any
    not_before: float

    def wait(self) -> torch.Tensor:
        """See `Transfer`."""
        self.until_then()
        return self.transfer.wait()  # type: ignore[no-any-return]

    def part(self, rank: int) -> torch.Tensor:
        """See `Transfer`."""
        self.until_then()
        return self.transfer.part(rank)  # type: ignore[no-any-return]

    def end(self) -> None:
        """See `Transfer`."""
        self.transfer.end()

    def until_then(self) -> None:
        """Sleep what is left."""
        sleep(max(self.not_before - monotonic(), 0.0))


def far(seconds: float, *of: Any) -> Any:
    """A transport of such channels between more than one rank."""
    channel = over_group(*of)
    return channel if channel.size == 1 else Far(channel, seconds)


class Figures(NamedTuple):
    """What one rank found: seconds of every step, and of our phases."""

    reference: list[float]
    """The plain loop's of far ranks, TorchRec's of near ones."""

    ours: list[float]
    beside: Beside | None
    """The plain loop, its copy and ours, of near ranks; the same on all."""

    phases: Phases


def run(quick: bool) -> list[Result]:
    """Each point, on two and four ranks, near and far from each other."""
    results = []
    for name, work in POINTS.items():
        for ranks in RANKS:
            for delay_ms in DELAYS_MS:
                close_pools()
                rounds = QUICK_ROUNDS if quick else ROUNDS
                seconds = QUICK_NEAR_S if quick else NEAR_S
                of_ranks = run_ranks(ranks, compare, work, rounds, seconds, delay_ms * 1e-3, timeout=300)
                found = results_of(f"{name}, W {ranks}", delay_ms, of_ranks)
                print(*found, sep="\n", flush=True)
                results += found
    return results


def results_of(name: str, delay_ms: float, of_ranks: list[Figures]) -> list[Result]:
    """Ours beside the plain loop and TorchRec's; ours must hide the ids' way where there is one, and cost nothing."""
    reference, ours = (quickest_of_rounds(slowest([of[i] for of in of_ranks])) for i in range(2))
    figures, spread, beside = both(reference, ours, 1e3), quartiles(reference, ours), of_ranks[0].beside
    results = []
    if beside is None:
        name += f", exchanges take {delay_ms:g} ms"
        hidden = 1e3 * median(p - o for p, o in zip(reference, ours, strict=True))
        results.append(Result(f"pipeline, against the plain loop: {name}", "ms", *figures, None, spread))
        results.append(Result(f"pipeline, hidden: {name}", "ms", delay_ms, hidden, hidden / delay_ms, 0.8))
    else:
        results.append(Result(f"pipeline, against TorchRec's: {name}", "ms", *figures, None, spread))
        results += against_the_plain_loop(name, beside)
    for phase, (alone, ahead) in of_ranks[0].phases.items():
        figures = alone * 1e3, ahead * 1e3, alone / ahead
        results.append(Result(f"pipeline, {phase} of rank 0: {name}", "ms", *figures, None))
    return results


def against_the_plain_loop(name: str, beside: Beside) -> list[Result]:
    """Of near ranks: the plain loop beside its copy, and ours beside both; in brackets where the medians are."""
    one, other = median(beside.reference) * 1e3, median(beside.copy) * 1e3
    itself, ours = beside.of_itself(), beside.of_ours()
    what, goal = f"{name}, {len(ours)} rounds", NEAR_GOAL
    shown = figures_of(beside, 1e3)
    return [
        Result(
            f"pipeline, plain loop against its copy: {what}", "ms", one, other, median(itself), None, interval(itself)
        ),
        Result(
            f"pipeline, against the plain loop: {what}", "ms", *shown, goal, interval(ours), told=beside.verdict(goal)
        ),
    ]


def compare(work: Workload, rounds: int, seconds: float, delay: float) -> Figures:
    """On each rank: seconds of every step of our pipeline, and of the plain loop or, if they are near, of TorchRec's
    pipeline; ours beside the plain loop, for so many seconds; ours by phase."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    plain, copy, ours = (make_ours(work, delay) for _ in range(3))
    pipeline = dmp.TrainPipeline(*ours)
    by_loop, by_copy = (stepper(lambda i, made=made: by_hand(*made, next(i)), work) for made in (plain, copy))
    by_ours, reference = stepper(pipeline.progress, work), by_loop
    if not delay:
        theirs = TrainPipelineSparseDist(*make_theirs(work), torch.device("cpu"))
        reference = stepper(theirs.progress, work)
    for i in range(CHECKED):
        a, b, c = by_loop(), by_copy(), by_ours()
        d = reference() if not delay else a
        if not torch.equal(a, c) or not torch.equal(b, c) or not torch.allclose(d, c, rtol=TOLERANCE, atol=TOLERANCE):
            raise AssertionError(f"outputs differ in step {i}: nothing to time")
    beside = None if delay else told_apart(by_loop, by_copy, by_ours, NEAR_GOAL, seconds)
    times = in_turns([lambda i: reference, lambda i: by_ours], rounds)
    return Figures(times[0], times[1], beside, phases_of([(by_loop, plain[0]), (by_ours, ours[0])]))


def phases_of(sides: list[tuple[Callable[[], Any], nn.Module]]) -> Phases:
    """Median seconds of each phase of each side's step, in turns."""
    seconds: list[dict[str, list[float]]] = [{} for _ in sides]
    for _ in range(PHASE_STEPS):
        for (step, model), found in zip(sides, seconds, strict=True):
            dist.barrier()
            step()
            for name, of in dmp.step_phases(model).items():
                found.setdefault(name, []).append(of.seconds)
    return {name: [median(found[name]) for found in seconds] for name in seconds[0]}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, features: Any) -> torch.Tensor:
    """A step of the plain loop."""
    optimizer.zero_grad()
    losses, output = model(features)
    losses.backward()
    optimizer.step()
    return output  # type: ignore[no-any-return]


def stepper(progress: Callable[[Iterator[Any]], Any], work: Workload) -> Callable[[], Any]:
    """A step on the next of batches without end."""
    held = [make_batch(work, 100 * i + dist.get_rank()) for i in range(NUM_BATCHES)]
    iterator = (as_keyed(work, held[i % NUM_BATCHES]) for i in count())
    return lambda: progress(iterator)


def make_theirs(work: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    """TorchRec's wrapper with the values of `Task`, which it drops."""
    task = make_task(work)
    state = {name: value.clone() for name, value in task.state_dict().items()}
    model = torchrec_wrap(task, torchrec_plan(task, LAYOUT, dist.get_world_size()))
    model.load_state_dict(state)
    return model, dense_optimizer(model)


def make_ours(work: Workload, delay: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ours, likewise; exchanges of its tables take so many seconds longer."""
    task, ranks = make_task(work), dist.get_world_size()
    tables = [name for name, _ in task.named_parameters() if name.startswith("tables.")]
    env = dmp.ShardingEnv.from_mesh(mesh((ranks,), ("dp",)))
    base = EmbeddingBagCollectionSharder
    sharded = {"sharded_type": staticmethod(partial(base.sharded_type, transport=partial(far, delay)))}
    sharders = [type(base.__name__, (base,), sharded)()] if delay else None
    model = dmp.DistributedModelParallel(task, env=env, plan=make_plan(LAYOUT, tables, ranks), sharders=sharders)
    return model, dense_optimizer(model)


def make_task(work: Workload) -> Task:
    """The same on every call."""
    torch.manual_seed(1)
    return Task(work)


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Of what is not updated in the backward pass."""
    return torch.optim.Adagrad([p for name, p in model.named_parameters() if "over" in name], lr=0.01)
