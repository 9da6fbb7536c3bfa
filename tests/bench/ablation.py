"""What each part of the data path brings: our step with one of them replaced by what it replaced, all in turns.

A part is left out by what a user or a writer of transports can say (the lookup kernel by name, the transport of the
tables' channels, the wire's format), or else by an attribute of the module's engine that is set here. TorchRec's step
stands beside them. A part is left out in the cells where it has something to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import nn

import dmp
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.channel import over_connections, over_group
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange.codec import Cast, Codecs
from tests.bench.report import Result
from tests.bench.rounds import in_turns, quickest_of_rounds, slowest
from tests.bench.step import BATCHES, Side, make_batches, make_grads, warm_up, weights, wrap_ours, wrap_theirs
from tests.bench.step_cells import OPTIMIZERS, ROWS, Cell
from tests.bench.workload import Workload, as_keyed
from tests.ranks import close_pools, run_ranks

CELLS = [
    Cell("table-wise", 2, Workload(ROWS, 64, 2048)),
    Cell("row-wise", 2, Workload(ROWS, 64, 2048)),
    Cell("table-wise", 2, Workload(ROWS, 64, 2048, 32)),
    Cell("table-wise", 2, Workload(ROWS, 64, 2048, 32, optimizer="sgd")),
    Cell("row-wise", 4, Workload(ROWS, 64, 2048)),
    Cell("row-wise", 4, Workload(ROWS, 64, 512, 32)),
    Cell("sequence, row-wise", 2, Workload(ROWS, 64, 2048, pooled=False)),
]
ROUNDS, QUICK_ROUNDS, STEPS, CHECKED, THIRDS = 9, 3, 2, 2, 3
HALF = Codecs(Cast(torch.bfloat16), Cast(torch.bfloat16))
TORCHREC, OURS = "TorchRec", "ours"


class Copying:
    """A channel that gives no memory of its own to write to: what is sent is copied there."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of this process."""
        return torch.empty(count, dtype=dtype, device=device)


def copying(*of: Any) -> Any:
    """The transport that the data path has, with `Copying` channels."""
    return Copying(over_group(*of))


def without_partials(engine: Engine) -> None:
    """Every bag has a sum from every block of rows."""
    engine.input_dist._settled = lambda *_: (False, [])  # type: ignore[method-assign]


def ordering_late(engine: Engine) -> None:
    """Ids are ordered when the update wants them so."""
    engine.path.order_ids = lambda _: None  # type: ignore[method-assign]


def _everywhere(cell: Cell) -> bool:
    return True


def _has_partials(cell: Cell) -> bool:
    return cell.kind == "row-wise" and cell.work.max_bag == 1


@dataclass(frozen=True)
class Variant:
    """Our step with something replaced.

    Args:
        options: of the sharder; `transport` opens its channels.
        change: of the engine of a module that is wrapped.
        applies: where it makes a difference.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Engine], None] | None = None
    applies: Callable[[Cell], bool] = _everywhere


VARIANTS = {
    OURS: Variant(),
    "FBGEMM's kernel": Variant({"kernel": "fbgemm"}),
    "torch's kernel": Variant({"kernel": "torch"}),
    "connections, no shared memory": Variant({"transport": over_connections}),
    "FBGEMM's kernel, connections": Variant({"kernel": "fbgemm", "transport": over_connections}),
    "results copied to where they are sent from": Variant({"transport": copying}),
    "ids ordered after results have come": Variant(change=ordering_late),
    "sums of all blocks, no single rows": Variant(change=without_partials, applies=_has_partials),
    "bfloat16 on the wire": Variant({"codecs": HALF}),
    "connections, bfloat16 on them": Variant({"transport": over_connections, "codecs": HALF}),
}

Found = Mapping[str, Sequence[float]]
"""Of one cell: TorchRec or variant -> ms of each round's quickest step."""


def run(quick: bool) -> tuple[list[Result], str]:
    """All cells; what the parts bring in the mean, and a table in ms."""
    cells = CELLS[::2] if quick else CELLS
    found: list[Found] = []
    for cell in cells:
        close_pools()
        of_ranks = run_ranks(cell.ranks, compare, cell, QUICK_ROUNDS if quick else ROUNDS, timeout=300)
        names = [TORCHREC, *variants_of(cell)]
        times = [quickest_of_rounds(slowest([r[i] for r in of_ranks]), STEPS) for i in range(len(names))]
        found.append({name: [1e3 * s for s in each] for name, each in zip(names, times, strict=True)})
        shown = (f"{name} {median(ms):.4g}" for name, ms in found[-1].items())
        print(cell.name, *shown, sep="; ", flush=True)
    results = summed_up(cells, found)
    print(*results, sep="\n", flush=True)
    return results, table([cell.name for cell in cells], found)


def variants_of(cell: Cell) -> dict[str, Variant]:
    """Those that make a difference there."""
    return {name: variant for name, variant in VARIANTS.items() if variant.applies(cell)}


def summed_up(cells: Sequence[Cell], found: Sequence[Found]) -> list[Result]:
    """What each part brings in the mean over its cells; FBGEMM's kernel by the optimizer as well."""
    results = []
    for name in [TORCHREC, *VARIANTS]:
        of = [each for each in found if name in each]
        if of:
            results.append(_mean(f"{name}, {len(of)} cells", name, of))
    for optimizer, shown in OPTIMIZERS.items():
        like = [c.ranks == 2 and c.work.max_bag > 1 and c.work.optimizer == optimizer for c in cells]
        of = [each for each, is_like in zip(found, like, strict=True) if is_like]
        if of:
            results.append(_mean(f"FBGEMM's kernel, {shown}, 0..32 ids, W 2", "FBGEMM's kernel", of))
    return results


def _mean(what: str, name: str, found: Sequence[Found]) -> Result:
    """Beside ours; in brackets three thirds of the rounds, each as if a run of its own."""
    other, ours = (geometric_mean([median(of[side]) for of in found]) for side in (name, OURS))
    thirds = [
        geometric_mean([median(of[name][i::THIRDS]) / median(of[OURS][i::THIRDS]) for of in found])
        for i in range(THIRDS)
    ]
    return Result(f"ablation: {what}", "ms", other, ours, other / ours, None, (min(thirds), max(thirds)))


def compare(cell: Cell, rounds: int) -> tuple[list[float], ...]:
    """On each rank: seconds of every step, TorchRec's and each variant's; all must give the same but for rounding."""
    work, variants = cell.work, variants_of(cell)
    batches, grads = make_batches(work)
    warm_up(cell.ranks, work.optimizer)
    weights(work), make_grads(work)
    models = [wrap_theirs(cell), *(wrap_variant(cell, variant) for variant in variants.values())]
    sides = [Side(model, work, make_grads(work)) for model in models]
    for i in range(CHECKED):
        expected, *shown = (side.outputs(side.step(as_keyed(work, batches[i]), grads[i])) for side in sides)
        for name, found in zip(variants, shown, strict=True):
            near = 2**-5 if "bfloat16" in name else 1e-5
            if not torch.allclose(found, expected, rtol=near, atol=near * max(1.0, float(expected.abs().max()))):
                raise AssertionError(f"{cell.name}, {name}: outputs differ in step {i}: nothing to time")

    def step(side: Side) -> Any:
        return lambda i: partial(side.step, as_keyed(work, batches[i % BATCHES]), grads[i % BATCHES])

    return in_turns([step(side) for side in sides], rounds, STEPS)


def wrap_variant(cell: Cell, variant: Variant) -> nn.Module:
    """Our model without the part."""
    model = wrap_ours(cell, [sharder(cell.work.pooled, **variant.options)])
    if variant.change is not None:
        for module in model.sharded_modules.values():  # type: ignore[operator, union-attr]
            variant.change(module._engine)
    return model


def sharder(pooled: bool, transport: Any = None, **options: Any) -> dmp.ModuleSharder:
    """The built-in one, whose channels are opened by `transport`."""
    base = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    if transport is None:
        return base(**options)
    sharded = {"sharded_type": staticmethod(partial(base.sharded_type, transport=transport))}
    return type(base.__name__, (base,), sharded)(**options)  # type: ignore[no-any-return]


def table(cells: Sequence[str], found: Sequence[Found]) -> str:
    """In Markdown: ms of a step, empty where a part does nothing."""
    names = [TORCHREC, *VARIANTS]
    lines = [("cell, ms", *names)]
    for cell, of in zip(cells, found, strict=True):
        lines.append((cell, *(f"{median(of[name]):.4g}" if name in of else "" for name in names)))
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "| --- |" + " ---: |" * len(names))
    return "\n".join(text)
