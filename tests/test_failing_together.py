"""What fails, or differs, on one rank while a model is wrapped is raised on all, naming the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    DistributedModelParallel,
    ParameterInfo,
    PlanError,
    Shard,
    ShardingEnv,
    ranks,
    rectangles,
    row_wise,
    table_wise,
)
from sharders import EmbeddingBagCollectionSharder
from tests.equality import env_of
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import Doubled, Net, mixed

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
    ranks.call_log.own_groups.clear()  # as in a program that has just begun
    try:
        env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
        DistributedModelParallel(module, env, plan={TABLE: row_wise()}, sharders=[sharder])
    finally:
        assert (module[0] is tables) == (what != "reset_parameters")


@pytest.mark.parametrize("what", ["init_fn", "reset_parameters", "shard"])
def test_what_fails_on_one_rank_is_raised_on_all(what: str) -> None:
    for error in run_ranks(2, wrap_with, what, expect=PlanError, timeout=20):
        assert "wrapping a model: rank 1: " in str(error), error
        assert "MemoryError: no room for that" in str(error), error


def _disagree(what: str) -> None:
    env, odd = env_of("dp2"), dist.get_rank() == 1
    module, plan = Net(), dict(mixed())
    if what == "plan" and odd:
        plan["items.weight"] = table_wise(1)
    elif what == "rectangles":
        plan["items.weight"] = rectangles([Shard((0, 0), (7, 8), int(odd))])
    elif what == "invalid plan" and odd:
        plan["items.weight"] = table_wise(7)
    elif what == "no plan at all" and odd:
        plan = 3  # type: ignore[assignment]
    elif what == "a name" and odd:
        plan["nobody.weight"] = row_wise()
    elif what == "shape" and odd:
        module.over = nn.Linear(20, 7)
    elif what == "dtype" and odd:
        module.out = module.out.double()
    elif what == "frozen" and odd:
        module.users.weight.requires_grad_(False)
    elif what == "order":
        layers = {"a": nn.Embedding(3, 4), "b": nn.Embedding(3, 4)}
        module = nn.ModuleDict(dict(reversed(layers.items())) if odd else layers)  # type: ignore[assignment]
        plan = {"a.weight": row_wise(), "b.weight": row_wise()}
    elif what == "a module more" and odd:
        module.extra = nn.Embedding(3, 4)
    elif what == "subclass" and odd:
        module.users = Doubled(11, 8)
    DistributedModelParallel(module, env=env, plan=plan)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", ["plan", "rank 1", "items.weight", '"rank": 1', '"rank": 0']),
        ("rectangles", ["plan", "rank 1", "items.weight"]),
        ("invalid plan", ["plan", "rank 1", "7"]),
        ("no plan at all", ["rank 1", "got int"]),
        ("a name", ["plan", "nobody.weight"]),
        ("shape", ["model", "over.weight", "(6, 20)", "(7, 20)"]),
        ("dtype", ["model", "out.weight", "float64"]),
        ("frozen", ["model", "users.weight", "False"]),
        ("order", ["model", "a", "b", "all the same in another order"]),
        ("a module more", ["model", "extra"]),
        ("subclass", ["model", "users"]),
    ],
)
@pytest.mark.sampled(2)
def test_ranks_that_disagree_all_say_how(what: str, words: list[str]) -> None:
    texts = {str(error) for error in run_ranks(2, _disagree, what, expect=PlanError, timeout=30)}
    assert len(texts) == 1
    text = texts.pop()
    assert all(word in text for word in words), text
