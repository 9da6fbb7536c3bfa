"""The tables, layouts and batches that the benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from dmp import Layout, column_wise, row_wise, table_row_wise, table_wise

# Distinct values of the 26 categories of the Criteo Kaggle data: the usual table sizes of DLRM benchmarks.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip

# The tables of examples/dlrm/demo.py.
DEMO_ROWS = (
    100, 13240, 300, 50000, 1220, 50000, 4760, 100, 18620, 420, 50000, 1700, 50000, 6700, 140, 26200, 600, 50000, 2400,
    50000, 9420, 220, 36840, 860, 50000, 3380,
)  # fmt: skip

LEARNING_RATE, EPS = 0.05, 1e-8
SGD_RATE = 1e-4
"""Small, so that rows that thousands of a batch's ids name stay near 1: else what order of sums rounds is all that two
correct implementations differ by, and it is more than the tolerance."""
ZIPF = 1.05
HOSTS = 2  # of table-row-wise
MIXED = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True)
class Workload:
    """Tables and batches of one benchmark point.

    Args:
        pooled: an EmbeddingBagCollection (sum), else an EmbeddingCollection.
        max_bag: bags have 0..max_bag ids; exactly one where this is 1.
        batch_size: samples on each rank.
        skewed: ids are drawn by Zipf's law, the frequent ones spread over the table; else uniformly.
        optimizer: in the backward pass, "rowwise_adagrad" or "sgd".
    """

    rows: tuple[int, ...]
    dim: int
    batch_size: int
    max_bag: int = 1
    pooled: bool = True
    skewed: bool = False
    optimizer: str = "rowwise_adagrad"

    @property
    def features(self) -> list[str]:
        """One for each table."""
        return [f"f{i}" for i in range(len(self.rows))]


class Model(nn.Module):
    """A collection below a root, as it stands in real models."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        """What the collection gives."""
        return self.tables(features)


def criteo_rows(cap: int) -> tuple[int, ...]:
    """Rows of the 26 tables, none above `cap`."""
    return tuple(min(n, cap) for n in CRITEO_ROWS)


def make_model(work: Workload, device: str = "cpu") -> Model:
    """The same weights on every rank; each table with the workload's optimizer in its backward pass."""
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    torch.manual_seed(1)
    kind = torchrec.EmbeddingBagConfig if work.pooled else torchrec.EmbeddingConfig
    tables = [
        kind(name=f"t{i}", num_embeddings=n, embedding_dim=work.dim, feature_names=[f"f{i}"])
        for i, n in enumerate(work.rows)
    ]
    collection = torchrec.EmbeddingBagCollection if work.pooled else torchrec.EmbeddingCollection
    model = Model(collection(tables=tables, device=torch.device(device)))
    if work.optimizer == "sgd":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": SGD_RATE})
    else:
        _apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": LEARNING_RATE, "eps": EPS})
    return model


def make_plan(layout: str, names: Sequence[str], ranks: int) -> dict[str, Layout]:
    """One layout for all tables, or three in turns; table-wise goes round the ranks, table-row-wise round two hosts."""
    kinds: Mapping[str, Any] = {
        "table_wise": lambda i: table_wise(i % ranks),
        "row_wise": lambda i: row_wise(),
        "column_wise": lambda i: column_wise(range(ranks)),
        "mixed": lambda i: kinds[MIXED[i % len(MIXED)]](i),
        "table_row_wise": lambda i: table_row_wise(i % HOSTS),
    }
    return {name: kinds[layout](i) for i, name in enumerate(names)}


def make_batch(work: Workload, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and lengths, key-major, as a `KeyedJaggedTensor` takes them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(work.rows), work.batch_size)
    lengths = torch.ones(shape, dtype=torch.int64)
    if work.max_bag > 1:
        lengths = torch.randint(0, work.max_bag + 1, shape, generator=generator)
    counts = lengths.sum(1).tolist()
    draw = _skewed if work.skewed else _uniform
    ids = [draw(n, count, generator) for n, count in zip(work.rows, counts, strict=True)]
    return torch.cat(ids), lengths.view(-1)


def _uniform(rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, rows, (count,), generator=generator)


def _skewed(rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    shares, places = _zipf(rows)
    drawn = torch.searchsorted(shares, torch.rand(count, generator=generator, dtype=torch.float64))
    return places[drawn.clamp_(max=rows - 1)]


@cache
def _zipf(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Running shares of the rows by rank, and the row that has each rank: as where ids are hashed."""
    shares = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-ZIPF).cumsum_(0)
    return shares / shares[-1], torch.randperm(rows, generator=torch.Generator().manual_seed(rows))


def as_keyed(work: Workload, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A new `KeyedJaggedTensor`: it caches what it has computed, so each step gets its own."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=work.features, values=batch[0], lengths=batch[1])
