"""Plans from observed batches against plans from guesses, on the skewed clicks of examples/dlrm, on 2 ranks.

Both plans are costed with what the batches tell, and both are trained, step by step in turn. Ids are hashed as the demo
hashes them, or numbered by how often they come, as many data pipelines do: then the first rows of a table are hot.
The larger the batch, the fewer of its ids name rows of their own, and the more there is to know of it.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, ShardingPlan, default_sharders
from planner import Observation, ShardingPlanner, observe
from sharders.embedding.probe import OTHERS_BYTES
from tests.bench.report import Result
from tests.bench.workload import DEMO_ROWS
from tests.ranks import mesh, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dlrm"
RANKS, BATCH, DIM, LINES, ROUNDS, QUICK_ROUNDS = 2, 2048, 64, 80_000, 40, 5
SIZES = ((BATCH, DIM), (4 * BATCH, DIM), (BATCH, 2 * DIM))
"""Samples on a rank, and columns of a table."""
FORMS = ("ids hashed", "ids by frequency")


def batches_of(file: str, form: str, rank: int = 0, num_ranks: int = 1, batch_size: int = BATCH) -> list[Any]:
    """`KeyedJaggedTensor`s of the file's lines."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    from logs import ClickLogs
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    logs = ClickLogs([file], DEMO_ROWS, batch_size * num_ranks, rank=rank, num_ranks=num_ranks)
    found = [batch.sparse for batch in logs]
    if form == FORMS[0]:
        return found
    order = _by_frequency([batch.sparse for batch in ClickLogs([file], DEMO_ROWS, BATCH)])
    keys, parts = found[0].keys(), [batch.values().split(batch.length_per_key()) for batch in found]
    values = [torch.cat([order[key][ids] for key, ids in zip(keys, part, strict=True)]) for part in parts]
    return [KeyedJaggedTensor(keys, v, lengths=b.lengths()) for v, b in zip(values, found, strict=True)]


def _by_frequency(batches: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Feature -> new number of each id: the most frequent one is 0."""
    found = {}
    for index, key in enumerate(batches[0].keys()):
        ids = torch.cat([batch.values().split(batch.length_per_key())[index] for batch in batches])
        counts = np.bincount(ids.numpy(), minlength=DEMO_ROWS[index])
        place = np.empty(len(counts), dtype=np.int64)
        place[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        found[key] = torch.from_numpy(place)
    return found


def make_model(keys: Sequence[str], device: str, dim: int = DIM) -> nn.Module:
    """The demo's tables, which SGD updates in the backward pass."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(n, dim, name=f"t_{key}", feature_names=[key]) for key, n in zip(keys, DEMO_ROWS, strict=True)
    ]
    model = EmbeddingBagCollection(configs, device=torch.device(device))
    apply_optimizer_in_backward(torch.optim.Adagrad, list(model.parameters()), {"lr": 0.01})
    return model


def plans_of(
    seen: Observation, keys: Sequence[str], batch_size: int = BATCH, dim: int = DIM
) -> tuple[ShardingPlan, ShardingPlan, float, float]:
    """The guessed plan and the observed one, and the modelled step of each, both with what was observed."""
    env = ShardingEnv.abstract((RANKS,), ("dp",), "cpu")
    model, sharders = make_model(keys, "meta", dim), default_sharders()
    plans = [ShardingPlanner(batch_size=batch_size).plan(model, sharders, env)]
    plans.append(ShardingPlanner(observed=seen).plan(model, sharders, env))
    steps = []
    for plan in plans:
        judge = ShardingPlanner(observed=seen)
        steps.append(float(judge.plan(model, sharders, env, plan).report.step_seconds))
    return plans[0], plans[1], steps[0], steps[1]


def steps_of_rank(file: str, form: str, size: tuple[int, int], texts: list[str], rounds: int) -> list[list[float]]:
    """On a rank: seconds of every step under each plan, in turn."""
    env = ShardingEnv.from_mesh(mesh((RANKS,)))
    batch_size, dim = size
    batches = batches_of(file, form, env.rank, env.size, batch_size)
    keys = batches[0].keys()
    models = [
        DistributedModelParallel(make_model(keys, "cpu", dim), env, plan=ShardingPlan.from_json(text)) for text in texts
    ]
    gradient = torch.randn(2 * batch_size, dim * len(DEMO_ROWS))
    others = torch.zeros(OTHERS_BYTES // 4)
    seconds: list[list[float]] = [[] for _ in models]
    for index in range(rounds + 2):
        for model, times in zip(models, seconds, strict=True):
            others.add_(1)
            began = perf_counter()
            found = model(batches[index % len(batches)]).values()
            found.backward(gradient[: len(found)])
            times.append(perf_counter() - began)
    return [times[2:] for times in seconds]


def run(quick: bool) -> list[Result]:
    """Modelled and measured steps, guessed as the reference."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    from generate import generate

    results = []
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "clicks.tsv")
        generate(file, LINES)
        for size, form in product(SIZES, FORMS):
            results += _beside(file, form, size, QUICK_ROUNDS if quick else ROUNDS)
            print("\n".join(map(str, results[-2:])), flush=True)
    ratios = [result.ratio for result in results[1::2] if result.ratio]
    mean = exp(fmean(map(log, ratios)))
    results.append(Result("observed plans, measured: geometric mean", "", None, mean, mean, 1.0))
    print(results[-1], flush=True)
    return results


def _beside(file: str, form: str, size: tuple[int, int], rounds: int) -> list[Result]:
    """What the model says of both plans, and what they take."""
    batch_size, dim = size
    batches = batches_of(file, form, batch_size=batch_size)
    seen = observe(batches, batches=30)
    guessed, observed, guessed_s, observed_s = plans_of(seen, batches[0].keys(), batch_size, dim)
    changed = len(guessed.diff(observed))
    name = f"B {batch_size}, dim {dim}, {form}, {changed} of {len(observed)} tables elsewhere"
    texts = [guessed.to_json(), observed.to_json()]
    of_ranks = run_ranks(RANKS, steps_of_rank, file, form, size, texts, rounds, timeout=300)
    a, b = (median(map(max, zip(*(rank[i] for rank in of_ranks), strict=True))) for i in range(2))
    ratio = guessed_s / observed_s
    return [
        Result(f"observed plan, modelled: {name}", "ms", guessed_s * 1e3, observed_s * 1e3, ratio, 1.0),
        Result(f"observed plan, measured: {name}", "ms", a * 1e3, b * 1e3, a / b, None),
    ]
