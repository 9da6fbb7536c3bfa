"""The whole training step of two DLRMs, TorchRec's wrapper and ours in turns: the demo's, and TorchRec's own script's.

Dense layers take most of such a step, and both sides run the same ones; so the same model also trains with results of
the tables that are simply there (*dense part*). What it takes is subtracted for the ratio of the tables' parts. Then
our step's phases are shown.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmp
from tests.bench.report import Result
from tests.bench.rounds import Step, both, in_turns, quartiles, quickest_of_rounds, slowest
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import DEMO_ROWS, LEARNING_RATE, make_plan
from tests.ranks import close_pools, mesh, run_ranks

RANKS, ROUNDS, QUICK_ROUNDS, BATCHES, CHECKED, TOLERANCE, PHASED = 2, 15, 5, 4, 3, 1e-5, 10
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT_FLAGS = [
    *("--adagrad", "--interaction_type", "dcn", "--dcn_low_rank_dim", "64", "--num_embeddings", "100000"),
    *("--dense_arch_layer_sizes", "256,64", "--over_arch_layer_sizes", "256,64,1", "--batch_size", "512"),
]


class Batch(NamedTuple):
    """Of click logs."""

    dense: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Task:
    """A model and how it is trained.

    Args:
        make: the model with its values, the same on every call; tables have their optimizer in the backward pass.
        tables: path of their collection.
        layout: of all tables.
        batch: of this rank, by number.
        steps: given a model, whether it is ours and which batches it gets, a training step; the loss comes.
    """

    make: Callable[[], nn.Module]
    tables: str
    layout: str
    batch: Callable[[int], Batch]
    steps: Callable[[nn.Module, bool, Iterator[Batch]], Callable[[], torch.Tensor]]


def run(quick: bool) -> tuple[list[Result], str]:
    """Both models; what their phases take is printed."""
    results = []
    for name in TASKS:
        close_pools()
        of_ranks = run_ranks(RANKS, compare, name, QUICK_ROUNDS if quick else ROUNDS, timeout=300)
        found = results_of(name, [times for times, _ in of_ranks], [phases for _, phases in of_ranks])
        print(*found, sep="\n", flush=True)
        results += found
    return results, ""


def results_of(
    name: str, of_ranks: Sequence[tuple[Sequence[float], ...]], phases: Sequence[Mapping[str, float]]
) -> list[Result]:
    """The step, what is left of it without the dense part, and the share of each phase.

    Args:
        of_ranks: on each rank, seconds of every step of theirs, ours and the dense part alone.
        phases: on each rank, seconds of ours by phase.
    """
    theirs, ours, dense = (quickest_of_rounds(slowest([r[i] for r in of_ranks])) for i in range(3))
    *means, ratio = both(theirs, ours, 1e3)
    without = 1e3 * median(dense)
    parts = [mean - without for mean in means]
    of_parts = parts[0] / parts[1] if min(parts) > 0 else None
    results = [
        Result(f"training: {name}", "ms", *means, ratio, 1.0, quartiles(theirs, ours)),
        Result(f"training: {name}, less the dense part", "ms", *parts, of_parts, None),
    ]
    of_phases = {phase: 1e3 * fmean(rank.get(phase, 0.0) for rank in phases) for phase in phases[0]}
    for what, ms in {**of_phases, "dense part": without}.items():
        results.append(Result(f"training: {name}, {what}, {ms / means[1]:.0%}", "ms", None, ms, None, None))
    return results


def compare(name: str, rounds: int) -> tuple[tuple[list[float], ...], dict[str, float]]:
    """On each rank: seconds of every step of theirs, ours and the dense part alone; of our steps' phases."""
    task = TASKS[name]()
    models = [_theirs(task), _ours(task), _dense_alone(task)]
    sides = [task.steps(model, model is models[1], _endless(task)) for model in models]
    for i in range(CHECKED):
        a, b = sides[0](), sides[1]()
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE):
            raise AssertionError(f"{name}: losses {float(a)} and {float(b)} in step {i}: nothing to time")
    sides[2]()

    def timed(side: Callable[[], object]) -> Step:
        return lambda _: side

    times = in_turns([timed(side) for side in sides], rounds)
    phases: dict[str, float] = {}
    for _ in range(PHASED):
        dist.barrier()
        sides[1]()
        for phase, of in dmp.step_phases(models[1]).items():
            phases[phase] = phases.get(phase, 0.0) + of.seconds / PHASED
    return times, phases


def _endless(task: Task) -> Iterator[Batch]:
    held = [task.batch(i) for i in range(BATCHES)]
    return (held[i % BATCHES] for i in count())


def _theirs(task: Task) -> nn.Module:
    model = task.make()
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    wrapped = torchrec_wrap(model, torchrec_plan(model, task.layout, RANKS, task.tables))
    wrapped.load_state_dict(values)
    return wrapped


def _ours(task: Task) -> nn.Module:
    model = task.make()
    tables = [name for name, _ in model.named_parameters() if name.startswith(task.tables)]
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
    return dmp.DistributedModelParallel(model, env=env, plan=make_plan(task.layout, tables, RANKS))


class _Ready(nn.Module):
    """In the place of the tables: results that are there, and take gradients."""

    def __init__(self, samples: int, features: int, dim: int) -> None:
        super().__init__()
        self.values = torch.randn(samples, features, dim, requires_grad=True)

    def forward(self, features: Any) -> torch.Tensor:
        return self.values


def _dense_alone(task: Task) -> nn.Module:
    model = task.make()
    parent = task.tables.rpartition(".")[0]
    configs = model.get_submodule(task.tables).embedding_bag_configs()  # type: ignore[operator]
    ready = _Ready(len(task.batch(0).labels), len(configs), configs[0].embedding_dim)
    model.get_submodule(parent.rpartition(".")[0]).register_module(parent.rpartition(".")[2], ready)
    return DistributedDataParallel(model)


def _demo() -> Task:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    sys.path.insert(0, str(EXAMPLES / "dlrm"))
    of_demo = importlib.import_module("model")

    def make() -> nn.Module:
        model = of_demo.make_dlrm(DEMO_ROWS, 16, seed=1)
        tables, _ = of_demo.split_parameters(model)
        _apply_optimizer_in_backward(RowWiseAdagrad, tables.values(), {"lr": LEARNING_RATE})
        return model  # type: ignore[no-any-return]

    def steps(model: nn.Module, is_ours: bool, batches: Iterator[Batch]) -> Callable[[], torch.Tensor]:
        dense = [p for name, p in model.named_parameters() if ".embedding_bags." not in name]
        optimizer = torch.optim.Adam(dense, lr=0.005)

        def step() -> torch.Tensor:
            batch = next(batches)
            logits = model(batch.dense, _keyed(of_demo.FEATURES, batch)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return Task(make, "sparse_arch.embedding_bag_collection", "table_wise", _uniform, steps)


def _uniform(number: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    samples = 256
    ids = torch.cat([torch.randint(0, rows, (samples,), generator=generator) for rows in DEMO_ROWS])
    labels = torch.randint(0, 2, (samples,), generator=generator).float()
    return Batch(torch.randn(samples, 13, generator=generator), ids, torch.ones_like(ids), labels)


def _script() -> Task:
    sys.path.insert(0, str(EXAMPLES / "torchrec_dlrm"))
    script = importlib.import_module("dlrm_main")
    from torchrec.datasets.utils import Batch as Clicks
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    flags = script.parse_flags(SCRIPT_FLAGS)
    path = "model.sparse_arch.embedding_bag_collection"
    made = list(script.loader(flags, "train"))[:BATCHES]
    device = torch.device("cpu")

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = script.make_model(flags, device)
        model.get_submodule(path).to_empty(device=device)
        for table in model.get_submodule(path).parameters():
            nn.init.normal_(table, std=0.01)
        options = {"lr": flags.learning_rate, "eps": flags.eps}
        script.apply_optimizer_in_backward(torch.optim.Adagrad, model.get_submodule(path).parameters(), options)
        return model  # type: ignore[no-any-return]

    def batch(number: int) -> Batch:
        clicks = made[number]
        return Batch(
            clicks.dense_features, clicks.sparse_features.values(), clicks.sparse_features.lengths(), clicks.labels
        )

    def steps(model: nn.Module, is_ours: bool, batches: Iterator[Batch]) -> Callable[[], torch.Tensor]:
        clicks = (Clicks(b.dense, _keyed(script.DEFAULT_CAT_NAMES, b), b.labels) for b in batches)
        if isinstance(model, DistributedDataParallel):
            optimizer = torch.optim.Adagrad(model.parameters(), lr=flags.learning_rate, eps=flags.eps)
            return lambda: _plain(model, optimizer, next(clicks))
        pipeline = (dmp.TrainPipelineSparseDist if is_ours else TrainPipelineSparseDist)(
            model, script.make_optimizer(flags, model), device, execute_all_batches=True
        )
        return lambda: pipeline.progress(clicks)[0].detach()

    return Task(make, path, "mixed", batch, steps)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()  # type: ignore[no-any-return]


def _keyed(keys: list[str], batch: Batch) -> Any:
    """A new one for each step: it caches what it has computed."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=list(keys), values=batch.ids, lengths=batch.lengths)


TASKS = {"the demo's DLRM": _demo, "TorchRec's DLRM script": _script}
