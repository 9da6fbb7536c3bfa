"""Predicted against measured: the planner's model of a step beside the step, for plans good and bad.

The machine is calibrated as a user does it (`python -m dmp calibrate`), between two measurements of every plan. Each
plan is given to the planner whole, which gives the predicted time, and run: in turns with the others, its parts (ids,
results, gradients) timed by themselves, the quickest of each on the slowest rank. So are calibration's own steps: on a
machine that others use too, a whole step is seldom left alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec import KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dmp
from dmp import Layout, column_wise, data_parallel, row_wise, table_wise
from planner import Constraint, ShardingPlanner, Topology
from sharders.embedding.probe import OTHERS_BYTES
from tests.bench.report import Result
from tests.bench.workload import Model
from tests.ranks import mesh, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    from torch.distributed.optim import _apply_optimizer_in_backward

RANKS, ROUNDS, BATCHES = 2, 40, 3
WITHIN_PERCENT, CORRELATION = 25.0, 0.9


@dataclass(frozen=True)
class Case:
    """Tables, batches and a plan.

    Args:
        tables: (rows, dim) of each.
        layout: of each table, by its number.
        batch_size: samples on each rank.
        ids: mean ids of a bag; exactly one where this is 1, else 1..2 * ids - 1.
        optimizer: in-backward one.
    """

    name: str
    tables: tuple[tuple[int, int], ...]
    layout: Callable[[int], Layout]
    batch_size: int
    ids: int = 1
    optimizer: str = "rowwise_adagrad"

    @property
    def features(self) -> list[str]:
        """One for each table."""
        return [f"f{i}" for i in range(len(self.tables))]


def _round(i: int) -> Layout:
    return table_wise(i % RANKS)


def _mixed(i: int) -> Layout:
    return (row_wise(), column_wise([0, 1]), table_wise(0), table_wise(1), data_parallel())[i % 5]


_LARGE, _SMALL = 80_000, 3_000
CASES = (
    Case("table-wise, dim 64", ((_LARGE, 64),) * 10, _round, 1024),
    Case("table-wise, dim 16, B 256", ((_LARGE, 16),) * 26, _round, 256),
    Case("table-wise, dim 128, bags of 10", ((_LARGE, 128),) * 6, _round, 512, 10),
    Case("all on one rank, dim 64, B 3072", ((_LARGE, 64),) * 10, lambda i: table_wise(0), 3072),
    Case("three of four on one rank, bags of 16", ((_LARGE, 32),) * 12, lambda i: table_wise(int(i % 4 == 3)), 512, 16),
    Case("row-wise, dim 64, B 2048", ((_LARGE, 64),) * 10, lambda i: row_wise(), 2048),
    Case("row-wise, dim 128, bags of 10", ((_LARGE, 128),) * 6, lambda i: row_wise(), 512, 10),
    Case("row-wise, small tables, bags of 20", ((_SMALL, 32),) * 16, lambda i: row_wise(), 512, 20),
    Case("column-wise, dim 128", ((_LARGE, 128),) * 8, lambda i: column_wise([0, 1]), 1024),
    Case("column-wise, dim 32, bags of 8", ((_LARGE, 32),) * 12, lambda i: column_wise([0, 1]), 512, 8),
    Case("data-parallel, small tables", ((_SMALL, 32),) * 16, lambda i: data_parallel(), 1024),
    Case(
        "mixed, dims 16 to 128", tuple((_LARGE if i % 5 < 4 else _SMALL, 16 << i % 4) for i in range(20)), _mixed, 1024
    ),
    Case("mixed, bags of 6", tuple((_LARGE if i % 5 < 4 else _SMALL, 32) for i in range(15)), _mixed, 512, 6),
    Case("table-wise, SGD, dim 64", ((_LARGE, 64),) * 10, _round, 1024, 1, "sgd"),
    Case("row-wise, SGD, dim 32, bags of 8", ((_LARGE, 32),) * 10, lambda i: row_wise(), 512, 8, "sgd"),
    Case("one rank, wide and narrow, B 2048", ((_LARGE, 128), (_LARGE, 16)) * 3, lambda i: table_wise(i % 2), 2048),
    Case(
        "most on one rank, dims 16 to 128, B 256",
        tuple((_LARGE if i % 3 else _SMALL, 16 << i * 3 % 4) for i in range(18)),
        lambda i: table_wise(int(i % 7 == 3)),
        256,
    ),
    Case(
        "tables anywhere, SGD, bags of 8",
        ((_LARGE, 64),) * 11,
        lambda i: table_wise(i * (i + 1) // 4 % 2),
        256,
        8,
        "sgd",
    ),
    Case(
        "copies and row blocks", ((_SMALL, 32), (_LARGE, 32)) * 4, lambda i: (data_parallel(), row_wise())[i % 2], 1024
    ),
    Case(
        "columns and tables, wide and narrow",
        tuple((_LARGE, 32 if i % 3 else 128) for i in range(12)),
        lambda i: column_wise([1, 0]) if i % 4 == 1 else table_wise(i * (i + 1) // 4 % 2),
        1024,
    ),
)


def run(quick: bool) -> list[Result]:
    """Every plan's pair, the worst of them, and the rank correlation."""
    rounds = 10 if quick else ROUNDS
    before = run_ranks(RANKS, measured, rounds, timeout=500)[0]
    topology = calibrated(rounds)
    after = run_ranks(RANKS, measured, rounds, timeout=500)[0]
    times = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    results, said = [], []
    for case, *of_case in zip(CASES, times, before, after, strict=True):
        seconds, *both = of_case
        said.append(sum(predicted(case, topology)))
        spread = min(said[-1] / s for s in both), max(said[-1] / s for s in both)
        name = f"predicted: {case.name}"
        results.append(Result(name, "ms", said[-1] * 1e3, seconds * 1e3, said[-1] / seconds, None, spread))
        print(results[-1], flush=True)
    worst = max(abs(a / b - 1) * 100 for a, b in zip(said, times, strict=True))
    order = rank_correlation(said, times)
    results.append(Result("predicted: the plan that is furthest off", "%", None, worst, None, WITHIN_PERCENT))
    results.append(Result("predicted: rank correlation with the measured", "", None, order, order, CORRELATION))
    print("\n".join(map(str, results[-2:])), flush=True)
    return results


def calibrated(rounds: int) -> Topology:
    """What `python -m dmp calibrate` writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "topology.json"
        options = ["--ranks", str(RANKS), "--rounds", str(rounds), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "dmp", "calibrate", *options], check=True, stdout=subprocess.DEVNULL)
        return Topology.load(out)


def make_model(case: Case) -> Model:
    """On meta, with its optimizer."""
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=[f"f{i}"])
        for i, (n, d) in enumerate(case.tables)
    ]
    model = Model(torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    kind = {"rowwise_adagrad": RowWiseAdagrad, "sgd": torch.optim.SGD}[case.optimizer]
    _apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.01})
    return model


def plan_of(case: Case, names: Sequence[str]) -> dict[str, Layout]:
    """The case's layouts by parameter."""
    return {name: case.layout(i) for i, name in enumerate(names)}


def predicted(case: Case, topology: Topology | None) -> tuple[float, ...]:
    """Seconds by phase of the case's plan, as a planner says them that is given the whole plan."""
    model = make_model(case)
    env = dmp.ShardingEnv.abstract((RANKS,), ("dp",), "cpu")
    planner = ShardingPlanner(
        topology, constraints={"*": Constraint(pooling_factor=float(case.ids))}, batch_size=case.batch_size
    )
    planner.plan(model, dmp.default_sharders(), env, plan_of(case, [n for n, _ in model.named_parameters()]))
    assert planner.report is not None
    return tuple(planner.report.phase_seconds)


def measured(rounds: int) -> list[float]:
    """On each rank: seconds of each case's step, the quickest of each part."""
    sides = [_Side(case) for case in CASES]
    quickest = torch.full((len(sides), 3), float("inf"), dtype=torch.float64)
    others = torch.zeros(OTHERS_BYTES // 4)
    for number in range(rounds):
        times = []
        for side in sides:
            others.add_(1)
            times.append(side.step(number))
        now = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(now, dist.ReduceOp.MAX)
        if number:
            quickest = quickest.minimum(now)
    return [float(seconds) for seconds in quickest.sum(1)]


class _Side:
    def __init__(self, case: Case) -> None:
        self.case = case
        model = make_model(case)
        env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))
        plan = plan_of(case, [n for n, _ in model.named_parameters()])
        self.model = dmp.DistributedModelParallel(model, env=env, plan=plan)
        generator = torch.Generator().manual_seed(env.rank)
        self.batches = [self._batch(generator) for _ in range(BATCHES)]
        self.grad = torch.randn(case.batch_size, sum(dim for _, dim in case.tables))

    def _batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        shape = (len(case.tables), case.batch_size)
        lengths = torch.randint(1, 2 * case.ids, shape, generator=generator)
        counts = lengths.sum(1).tolist()
        ids = [torch.randint(0, n, (c,), generator=generator) for (n, _), c in zip(case.tables, counts, strict=True)]
        return torch.cat(ids), lengths.view(-1)

    def step(self, number: int) -> tuple[float, float, float]:
        """Seconds of a step's parts, between which the ranks meet: ids sent, results, gradients."""
        values, lengths = self.batches[number % BATCHES]
        features = KeyedJaggedTensor(keys=self.case.features, values=values, lengths=lengths)
        tables: Any = self.model.module.tables
        times = [_start()]
        call = tables.begin(features)
        call.payload.wait()
        times += [perf_counter(), _start()]
        results = tables.finish(call).values()
        times += [perf_counter(), _start()]
        results.backward(self.grad)
        times.append(perf_counter())
        return times[1] - times[0], times[3] - times[2], times[5] - times[4]


def _start() -> float:
    dist.barrier()
    return perf_counter()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: of the ranks of two sequences without ties."""
    places = [[sorted(of).index(x) for x in of] for of in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*places, strict=True))
    return 1 - 6 * squares / (len(a) * (len(a) ** 2 - 1))
