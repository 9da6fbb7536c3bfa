"""What each part of the data path brings: our step with one of them replaced by what it replaced, all in turns.

A part is left out by what a user or a writer of transports can say: the lookup kernel by name, the transport of the
tables' channels, the wire's format. TorchRec's step stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import torch

import dmp
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.channel import over_connections
from sharders.embedding.codec import Cast, Codecs
from tests.bench.report import Result
from tests.bench.rounds import in_turns, quickest_of_rounds, slowest
from tests.bench.step import BATCHES, Side, make_batches, make_grads, warm_up, weights, wrap_ours, wrap_theirs
from tests.bench.step_cells import ROWS, Cell
from tests.bench.workload import Workload, as_keyed
from tests.ranks import close_pools, run_ranks

CELLS = [
    Cell("table-wise", 2, Workload(ROWS, 64, 2048)),
    Cell("row-wise", 2, Workload(ROWS, 64, 2048)),
    Cell("table-wise", 2, Workload(ROWS, 64, 2048, 32)),
    Cell("table-wise", 2, Workload(ROWS, 64, 2048, 32, optimizer="sgd")),
    Cell("row-wise", 4, Workload(ROWS, 64, 512, 32)),
    Cell("sequence, row-wise", 2, Workload(ROWS, 64, 2048, pooled=False)),
]
ROUNDS, QUICK_ROUNDS, STEPS, CHECKED = 7, 3, 2, 2
HALF = Codecs(Cast(torch.bfloat16), Cast(torch.bfloat16))
TORCHREC, OURS = "TorchRec", "ours"

VARIANTS: dict[str, Mapping[str, Any]] = {  # options of the sharder
    OURS: {},
    "FBGEMM's kernel": {"kernel": "fbgemm"},
    "torch's kernel": {"kernel": "torch"},
    "connections, no shared memory": {"transport": over_connections},
    "FBGEMM's kernel, connections": {"kernel": "fbgemm", "transport": over_connections},
    "bfloat16 on the wire": {"codecs": HALF},
    "connections, bfloat16 on them": {"transport": over_connections, "codecs": HALF},
}


def run(quick: bool) -> tuple[list[Result], str]:
    """All cells; what the parts bring in the mean, and a table in ms."""
    found: list[dict[str, float]] = []
    for cell in CELLS[::2] if quick else CELLS:
        close_pools()
        of_ranks = run_ranks(cell.ranks, compare, cell, QUICK_ROUNDS if quick else ROUNDS, timeout=300)
        names = [TORCHREC, *VARIANTS]
        times = [quickest_of_rounds(slowest([r[i] for r in of_ranks]), STEPS) for i in range(len(names))]
        found.append({name: 1e3 * median(each) for name, each in zip(names, times, strict=True)})
        print(cell.name, *(f"{name} {ms:.4g}" for name, ms in found[-1].items()), sep="; ", flush=True)
    ours = geometric_mean([of[OURS] for of in found])
    results = []
    for name in found[0]:
        other = geometric_mean([of[name] for of in found])
        results.append(Result(f"ablation: {name}, mean of {len(found)} cells", "ms", other, ours, other / ours, None))
    print(*results, sep="\n", flush=True)
    return results, table([cell.name for cell in (CELLS[::2] if quick else CELLS)], found)


def compare(cell: Cell, rounds: int) -> tuple[list[float], ...]:
    """On each rank: seconds of every step, TorchRec's and each variant's; all must give the same but for rounding."""
    work = cell.work
    batches, grads = make_batches(work)
    warm_up(cell.layout, cell.ranks, work.optimizer)
    weights(work), make_grads(work)
    models = [wrap_theirs(cell), *(wrap_ours(cell, [sharder(work.pooled, **of)]) for of in VARIANTS.values())]
    sides = [Side(model, work, make_grads(work)) for model in models]
    for i in range(CHECKED):
        expected, *shown = (side.outputs(side.step(as_keyed(work, batches[i]), grads[i])) for side in sides)
        for name, found in zip(VARIANTS, shown, strict=True):
            near = 2**-5 if "bfloat16" in name else 1e-5
            if not torch.allclose(found, expected, rtol=near, atol=near * max(1.0, float(expected.abs().max()))):
                raise AssertionError(f"{cell.name}, {name}: outputs differ in step {i}: nothing to time")

    def step(side: Side) -> Any:
        return lambda i: partial(side.step, as_keyed(work, batches[i % BATCHES]), grads[i % BATCHES])

    return in_turns([step(side) for side in sides], rounds, STEPS)


def sharder(pooled: bool, transport: Any = None, **options: Any) -> dmp.ModuleSharder:
    """The built-in one, whose channels are opened by `transport`."""
    base = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    if transport is None:
        return base(**options)
    sharded = {"sharded_type": partial(base.sharded_type, transport=transport)}
    return type(base.__name__, (base,), sharded)(**options)  # type: ignore[no-any-return]


def table(cells: Sequence[str], found: Sequence[Mapping[str, float]]) -> str:
    """In Markdown: ms of a step."""
    lines = [("cell, ms", *found[0])]
    lines += [(cell, *(f"{ms:.4g}" for ms in of.values())) for cell, of in zip(cells, found, strict=True)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "| --- |" + " ---: |" * len(found[0]))
    return "\n".join(text)
