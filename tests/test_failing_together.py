"""What fails on one rank while a model is wrapped is raised on all, naming the rank and what failed there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, ParameterInfo, PlanError, ShardingEnv, ranks, row_wise
from sharders import EmbeddingBagCollectionSharder
from tests.ranks import mesh, run_ranks

TABLE = "0.embedding_bags.t.weight"


def fails(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise MemoryError("no room for that")


class Filler(EmbeddingBagCollectionSharder):
    """Its tables have an `init_fn` that fails on rank 1."""

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        return {name: replace(info, init_fn=fails) for name, info in super().parameters(module).items()}


class NoRoom(EmbeddingBagCollectionSharder):
    """Cannot allocate its tables on rank 1, before the others are at what they do together."""

    def shard(self, *arguments: Any) -> nn.Module:
        fails()
        return super().shard(*arguments)


class Dense(nn.Module):
    """Its reset fails on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        fails()
        nn.init.ones_(self.weight)


def wrap_with(what: str) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    tables = EmbeddingBagCollection([config], device=torch.device("meta"))
    with torch.device("meta"):
        module = nn.Sequential(tables, Dense() if what == "reset_parameters" else nn.Linear(2, 2))
    sharder = {"init_fn": Filler, "shard": NoRoom}.get(what, EmbeddingBagCollectionSharder)()
    ranks.own_group.cache_clear()  # as in a program that has just begun
    try:
        env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
        DistributedModelParallel(module, env, plan={TABLE: row_wise()}, sharders=[sharder])
    finally:
        assert (module[0] is tables) == (what != "reset_parameters")


@pytest.mark.parametrize("what", ["init_fn", "reset_parameters", "shard"])
def test_what_fails_on_one_rank_is_raised_on_all(what: str) -> None:
    for error in run_ranks(2, wrap_with, what, expect=PlanError, timeout=20):
        assert "wrapping a model fails on 1 of 2 ranks, rank 1: " in str(error), error
        assert "MemoryError: no room for that" in str(error), error
