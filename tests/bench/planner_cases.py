"""The cases of `make bench-planner`: sets of tables, published and random ones by seed, and the meshes they go on.

All are float32 with SGD in the backward pass: no state, no gradients kept, columns may be cut. TorchRec's planner then
counts the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dmp import ShardingEnv
from planner import Constraint, ShardingPlanner, Topology

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
BATCH = 2048  # samples on each rank
PER_HOST = 8
RANKS = (8, 16, 64, 128, 512, 4096)
UNLIMITED_S = 1e6  # plans that a clock cuts short are not the same twice


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        pooling: mean ids per sample of each of its features.
    """

    rows: int
    dim: int
    pooling: tuple[float, ...]

    @property
    def weight_bytes(self) -> int:
        """In float32."""
        return self.rows * self.dim * 4


@dataclass(frozen=True)
class TableSet:
    """A model's tables."""

    name: str
    tables: tuple[Table, ...]

    @cached_property
    def pooling(self) -> dict[str, Constraint]:
        """What a user says of the tables, by parameter name."""
        return {
            f"tables.embedding_bags.t{i}.weight": Constraint(pooling_factor=t.pooling)
            for i, t in enumerate(self.tables)
        }

    def module(self) -> Any:
        """An `EmbeddingBagCollection` on meta, with its optimizer, below a root."""
        import torch
        from torch.distributed.optim import _apply_optimizer_in_backward
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        configs = [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=[f"f{i}_{k}" for k in range(len(t.pooling))],
            )
            for i, t in enumerate(self.tables)
        ]
        module = torch.nn.ModuleDict({"tables": EmbeddingBagCollection(configs, device=torch.device("meta"))})
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
        return module


@dataclass(frozen=True)
class Random:
    """A set drawn by seed: rows log-uniform, or a few giants beside many small ones; dims and pooling from a range.

    Args:
        count: distinct tables.
        rows: smallest and largest.
        skew: power of the uniform draw between them; above 1 most tables are small.
        most_pooling: ids per sample, log-uniform from 1.
        full: (ranks, share): rows are scaled until the weights take this share of the memory of so many ranks. Results,
            their gradients and what is exchanged take up to four times the results: 31 % for 700 wide tables, 10 %
            for the giants, 1 to 3 % for the others.
    """

    seed: int
    count: int
    dims: tuple[int, ...]
    rows: tuple[float, float] = (100, 5e7)
    skew: float = 1.0
    most_pooling: float = 60.0
    full: tuple[int, float] | None = None

    def tables(self) -> tuple[Table, ...]:
        """The same ones each time."""
        random = np.random.default_rng(self.seed)
        low, high = np.log(self.rows)
        rows = np.exp(low + (high - low) * random.random(self.count) ** self.skew)
        dims = random.choice(self.dims, self.count)
        pooling = np.exp(random.uniform(0, np.log(self.most_pooling), (self.count, 2))).round(1)
        features = random.choice([1, 2], self.count, p=[0.8, 0.2])
        if self.full is not None:
            ranks, share = self.full
            rows *= share * ranks * topology(ranks).usable_bytes / float((rows * dims).sum() * 4)
        whole = np.maximum(rows, 4).astype(np.int64)
        return tuple(
            Table(int(r), int(d), tuple(map(float, p[:f])))
            for r, d, p, f in zip(whole, dims, pooling, features, strict=True)
        )


RANDOM: Mapping[str, Random] = {
    "random_40": Random(1, 40, (16, 32, 64, 128, 256), rows=(1e3, 2e8)),
    "random_60_wide": Random(2, 60, (512, 768, 1024), full=(16, 0.90), rows=(1e4, 3e7), most_pooling=20),
    "random_120_tight": Random(3, 120, (32, 64, 128), full=(8, 0.92), most_pooling=8),
    "random_400": Random(4, 400, (16, 32, 64, 128)),
    "random_700_wide": Random(5, 700, (512, 1024), rows=(1e4, 2e6), full=(128, 0.55), most_pooling=15),
    "random_900_giants": Random(6, 900, (16, 64, 128, 512), rows=(10, 1e9), skew=4, full=(64, 0.78), most_pooling=10),
    "random_1000": Random(7, 1000, (64, 96, 128, 192), rows=(1e3, 3e6), most_pooling=25),
    "random_2000": Random(8, 2000, (16, 32, 64, 128, 256, 1024), rows=(4, 1e7), skew=2),
}
PUBLISHED = ("mlperf_dcnv2", "nv_small", "nv_large")
QUICK = ("mlperf_dcnv2", "nv_small", "random_120_tight", "random_400")


def table_set(name: str) -> TableSet:
    """Of the published or random ones."""
    if name in RANDOM:
        return TableSet(name, RANDOM[name].tables())
    tables = json.loads((WORKLOADS / f"{name}.json").read_text())["tables"]
    return TableSet(
        name, tuple(Table(t["num_embeddings"], t["embedding_dim"], tuple(t["pooling_factors"])) for t in tables)
    )


def mesh(ranks: int) -> ShardingEnv:
    """Hosts of eight."""
    return ShardingEnv.abstract((ranks // PER_HOST, PER_HOST), ("host", "local"), "cuda")


def topology(ranks: int) -> Topology:
    """H100 boxes."""
    return Topology.of(mesh(ranks))


def planner(tables: TableSet) -> ShardingPlanner:
    """Ours, told the pooling factors, with no clock."""
    return ShardingPlanner(constraints=tables.pooling, batch_size=BATCH, time_budget_s=UNLIMITED_S)


def is_impossible(tables: TableSet, ranks: int) -> bool:
    """Whether the bytes that any plan needs are more than there are.

    These are all weights once, and on every rank the pooled results of its own samples.
    """
    results = sum(len(t.pooling) * t.dim for t in tables.tables) * 4 * BATCH
    weights = sum(t.weight_bytes for t in tables.tables)
    return weights + results * ranks > topology(ranks).usable_bytes * ranks
