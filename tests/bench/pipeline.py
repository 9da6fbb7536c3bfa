"""One training step of a pipeline: ours against TorchRec's, and against the plain loop on the same model of ours.

Tables with an in-backward optimizer under two dense layers with Adagrad; batches are made where the step asks for them.
Rounds as in step.py. The phases of the plain loop's step and of the pipeline's stand beside each other: what a pipeline
hides of the ids' exchange is missing from its input phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dmp
from tests.bench.report import Result
from tests.bench.rounds import both, in_turns, quartiles, quickest_of_rounds, slowest
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import DEMO_ROWS, Workload, as_keyed, criteo_rows, make_batch, make_model, make_plan
from tests.ranks import mesh, run_ranks

POINTS: dict[str, Workload] = {
    "bags of 0..8, dim 64, B 2048": Workload(criteo_rows(100_000), 64, 2048, max_bag=8),
    "the demo's tables, dim 16, B 256": Workload(DEMO_ROWS, 16, 256),
}
RANKS, TOLERANCE = 2, 1e-5
LAYOUT, ROUNDS, QUICK_ROUNDS, NUM_BATCHES, CHECKED = "row_wise", 15, 3, 8, 3
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


def run(quick: bool) -> list[Result]:
    """Both comparisons at each point."""
    results = []
    for name, work in POINTS.items():
        of_ranks = run_ranks(RANKS, compare, work, QUICK_ROUNDS if quick else ROUNDS, timeout=240)
        theirs, plain, ours = (quickest_of_rounds(slowest([r[i] for r in of_ranks])) for i in range(3))
        for what, reference, goal in (("TorchRec's", theirs, None), ("the plain loop", plain, 0.97)):
            figures = both(reference, ours, 1e3)
            results.append(
                Result(f"pipeline, against {what}: {name}", "ms", *figures, goal, quartiles(reference, ours))
            )
            print(results[-1], flush=True)
        for phase, (alone, ahead) in of_ranks[0][3].items():
            figures = alone * 1e3, ahead * 1e3, alone / ahead
            results.append(Result(f"pipeline, {phase} of rank 0, against the plain loop: {name}", "ms", *figures, None))
            print(results[-1], flush=True)
    return results


def compare(work: Workload, rounds: int) -> tuple[list[float], list[float], list[float], Phases]:
    """On each rank: seconds of every step of TorchRec's pipeline, our plain loop and our pipeline; ours by phase."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    device = torch.device("cpu")
    theirs, plain, ours = make_theirs(work), make_ours(work), make_ours(work)
    pipelines = [TrainPipelineSparseDist(*theirs, device), dmp.TrainPipeline(*ours)]
    sides: list[Callable[[], Any]] = [
        stepper(pipelines[0].progress, work),
        stepper(lambda iterator: by_hand(*plain, next(iterator)), work),
        stepper(pipelines[1].progress, work),
    ]
    for i in range(CHECKED):
        a, b, c = (side() for side in sides)
        if not torch.equal(b, c) or not torch.allclose(a, c, rtol=TOLERANCE, atol=TOLERANCE):
            raise AssertionError(f"outputs differ in step {i}: nothing to time")
    theirs_s, plain_s, ours_s = in_turns([lambda i, side=side: side for side in sides], rounds)  # type: ignore[misc]
    return theirs_s, plain_s, ours_s, phases_of([(sides[1], plain[0]), (sides[2], ours[0])])


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
    model = torchrec_wrap(task, torchrec_plan(task, LAYOUT, RANKS))
    model.load_state_dict(state)
    return model, dense_optimizer(model)


def make_ours(work: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ours, likewise."""
    task = make_task(work)
    tables = [name for name, _ in task.named_parameters() if name.startswith("tables.")]
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
    model = dmp.DistributedModelParallel(task, env=env, plan=make_plan(LAYOUT, tables, RANKS))
    return model, dense_optimizer(model)


def make_task(work: Workload) -> Task:
    """The same on every call."""
    torch.manual_seed(1)
    return Task(work)


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Of what is not updated in the backward pass."""
    return torch.optim.Adagrad([p for name, p in model.named_parameters() if "over" in name], lr=0.01)
