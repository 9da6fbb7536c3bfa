"""Tables for the planner: a small sharder of its own, which offers layouts and runs none; meshes; workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmp import (
    Layout,
    ParameterInfo,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from planner import ShardingPlanner, Topology
from planner.costs.speeds import Rate, Speeds

WORKLOADS = Path(__file__).parent / "workloads"

MEASURED = Topology(
    1e10,
    1e10,
    1e11,
    3e9,
    1e-4,
    shared_links=0.5,
    speeds=Speeds(
        *(Rate(1e-8, 1e-11), Rate(2e-9, 2e-12), Rate(1e-9, 4e-11), Rate(1e-8, 1e-10), Rate(5e-9, 0)),
        *(Rate(1e-8, 5e-11), Rate(6e-9, 0), Rate(1e-7, 4e-10), Rate(3e-9, 0)),
        gradient=Rate(0, 2e-10),
        touched_row=Rate(2e-8, 3e-11),
        whole_row=Rate(3e-8, 0),
        place=2e-10,
        pack=3e-10,
        place_bag=2e-8,
        pack_bag=3e-8,
        place_part=1e-10,
        pack_part=2e-10,
        take=2e-10,
        step=2e-3,
        send_slot=5e-6,
        update_slot=1e-5,
        send_id=3e-9,
        split_id=2e-9,
        receive_bag=1e-9,
        lookup_first=Rate(3e-8, 1e-11),
        update_bag=Rate(2e-9, 2e-11),
        step_results=5e-4,
        step_gradients=4e-4,
        group=1e-4,
        group_results=3e-4,
        group_gradients=2e-4,
        split_results=1e-4,
        copies=2e-4,
        copies_gradients=5e-4,
        copies_width=2e-4,
        width=3e-5,
        width_results=1e-4,
        width_gradients=2e-4,
    ),
)
"""A machine whose every part takes time, as `calibrate` would find it."""


class BagSharder:
    """Offers one of each kind of layout; runs none."""

    module_type = nn.EmbeddingBag

    def __init__(self, optimizer: str | None = "adagrad", only: tuple[str, ...] | None = None) -> None:
        self.optimizer, self.only = optimizer, only
        self.features: dict[int, tuple[float, ...]] = {}

    def parameters(self, module: nn.EmbeddingBag) -> Mapping[str, ParameterInfo]:
        shape = (module.num_embeddings, module.embedding_dim)
        pooling = self.features.get(id(module), (1.0,))
        return {"weight": ParameterInfo(shape, torch.float32, "table", self.optimizer, pooling, len(pooling))}

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterator[Layout]:
        return (layout for layout in self._all(info, env) if self.only is None or layout.name in self.only)

    def _all(self, info: ParameterInfo, env: ShardingEnv) -> Iterator[Layout]:
        yield table_wise(0)
        for count in (2, 4, 8):
            if count <= min(env.table_size, info.shape[1] // 4):
                yield column_wise(range(count))
        yield row_wise()
        if len(env.table_shape) > 1:
            inner = env.table_size // env.table_shape[0]
            yield table_row_wise(0)
            if info.shape[1] >= 8:
                yield grid([[i, inner + i] for i in range(inner)])
        yield data_parallel()

    def shard(self, *_: Any) -> nn.Module:
        raise NotImplementedError


class PicksRanks(BagSharder):
    """Runs table-wise on ranks 1 and 2 only."""

    def _all(self, info: ParameterInfo, env: ShardingEnv) -> Iterator[Layout]:
        yield from (table_wise(1), table_wise(2))

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        return layout in (table_wise(1), table_wise(2))


def bags(*shapes: tuple[int, int], device: str = "meta") -> nn.ModuleDict:
    """Tables t0, t1, ... ."""
    with torch.device(device):
        return nn.ModuleDict({f"t{i}": nn.EmbeddingBag(*shape, mode="sum") for i, shape in enumerate(shapes)})


def workload(name: str) -> tuple[nn.ModuleDict, BagSharder]:
    tables = json.loads((WORKLOADS / f"{name}.json").read_text())["tables"]
    module, sharder = bags(*((t["num_embeddings"], t["embedding_dim"]) for t in tables)), BagSharder()
    sharder.features = {id(m): tuple(t["pooling_factors"]) for m, t in zip(module.values(), tables, strict=True)}
    return module, sharder


@cache
def mlperf_on_four_hosts() -> ShardingPlan:
    """A plan with its report, made once for all tests that read it."""
    module, sharder = workload("mlperf_dcnv2")
    return ShardingPlanner(batch_size=2048).plan(module, [sharder], hosts(4, 8))


def one_axis(size: int, device_type: str = "cuda") -> ShardingEnv:
    return ShardingEnv.abstract((size,), ("dp",), device_type)


def hosts(count: int, local: int) -> ShardingEnv:
    return ShardingEnv.abstract((count, local), ("host", "local"))


def small_memory(size: float, link_latency: float = 1e-5) -> Topology:
    return Topology(size, 1e12, 1e13, 1e11, link_latency, reserved_fraction=0.0)


def ranks_of(plan: ShardingPlan, name: str, shape: tuple[int, int], env: ShardingEnv) -> set[int]:
    return {s.rank for s in plan[name].layout.shards(shape, env)}
