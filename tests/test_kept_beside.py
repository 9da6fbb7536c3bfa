"""Weights that stay whole on a mesh that splits the others: kept by the model beside their places, or by the plan."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import (
    DistributedModelParallel,
    PlanError,
    ShardError,
    ShardingEnv,
    full_state_dict,
    replicate,
    to_unsharded,
)
from sharders import TensorParallelSharder
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

WAYS: dict[str, tuple[Callable[[nn.Parameter], Any], Callable[[Any], torch.Tensor]]] = {
    "a list": (lambda w: [w], lambda kept: kept[0]),
    "a dict": (lambda w: {"w": w}, lambda kept: kept["w"]),
    "an ordered dict": (lambda w: OrderedDict(w=w), lambda kept: kept["w"]),
    "an object": (lambda w: SimpleNamespace(w=w), lambda kept: kept.w),
    "an argument": (lambda w: functools.partial(F.linear, weight=w), lambda kept: kept.keywords["weight"]),
}


class Net(nn.Module):
    """Reads a weight by another way than its place."""

    def __init__(self, way: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.way = way
        if way:
            self.kept = WAYS[way][0](self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = WAYS[self.way][1](self.kept) if self.way else self.second.weight
        out: torch.Tensor = self.last(F.linear(self.first(x).relu(), weight).relu())
        return out


def _trains(model: nn.Module, whole: nn.Module, env: ShardingEnv) -> None:
    trains(model, whole, env, lambda g: torch.randn(env.data_size, 3, 6, generator=g), torch.optim.Adam, steps=2)


def _kept(shape: tuple[int, ...], names: tuple[str, ...], way: str) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model, whole = DistributedModelParallel(Net(way), env), Net(way)
    _trains(model, whole, env)
    x = torch.ones(2, 6)
    for twin in (copy.deepcopy(model), to_unsharded(model)):
        torch.testing.assert_close(twin(x), whole(x))
    _trains(copy.deepcopy(model), whole, env)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_a_weight_that_the_model_keeps_beside_its_place(way: str) -> None:
    run_ranks(2, _kept, (2,), ("shard",), way)


def _from_meta(shape: tuple[int, ...], names: tuple[str, ...], way: str) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    with torch.device("meta"):
        module = Net(way)
    model, whole = DistributedModelParallel(module, env), Net()
    whole.load_state_dict(full_state_dict(model))
    _trains(model, whole, env)
    _trains(copy.deepcopy(model), whole, env)


def _frozen_later() -> None:
    env, whole = ShardingEnv.from_mesh(mesh((2,), ("shard",))), Net()
    model = DistributedModelParallel(Net("a list"), env)
    _trains(model, whole, env)
    model.second.weight.requires_grad_(False)
    whole.second.weight.requires_grad_(False)
    _trains(model, whole, env)
    model.load_state_dict(full_state_dict(model), assign=True)
    _trains(model, whole, env)


def test_what_is_kept_is_frozen_or_assigned_where_others_are_split() -> None:
    """Its averages are made anew, and torch was asked to split the others once more, which it refused."""
    run_ranks(2, _frozen_later)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["dp", "shard"])
@pytest.mark.sampled(4)
def test_from_meta(way: str, name: str) -> None:
    """The model's own code went on reading what is on meta, of which torch makes numbers of no meaning."""
    run_ranks(2, _from_meta, (2,), (name,), way)


class Buffers(nn.Module):
    """As rotary embeddings keep their first frequencies; and a tensor that is nothing."""

    def __init__(self, has_more: bool = False) -> None:
        super().__init__()
        self.reset_parameters()
        if has_more:
            self.more = [torch.ones(2, 2)]

    def reset_parameters(self) -> None:
        self.register_buffer("scale", torch.full((2, 2), 3.0))
        self.first = self.scale


def test_what_else_is_kept_on_meta(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        modules = [nn.Sequential(nn.Linear(2, 2), Buffers()), nn.Sequential(nn.Linear(2, 2), Buffers(has_more=True))]
    model = DistributedModelParallel(modules[0])
    assert model.module[1].first is model.module[1].scale and not model.module[1].first.is_meta
    assert not caplog.messages
    DistributedModelParallel(modules[1])
    assert "Buffers.more stays on meta, which nothing fills" in caplog.text


def test_what_cannot_be_made_real() -> None:
    with torch.device("meta"):
        module = Net("a list")
    held = weakref.ref(module.second.weight)
    with pytest.raises(ShardError, match=r"Net.kept keeps 'second.weight' beside its place.*weakref.*real device"):
        DistributedModelParallel(module)
    assert held() is module.second.weight


@pytest.mark.slow
def test_on_copies_of_what_is_split() -> None:
    run_ranks(4, _kept, (2, 2), ("replicate", "shard"), "a dict")


def _position_weights() -> None:
    """TorchRec's, which reads its parameters by a plain dict."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    def make() -> nn.Module:
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["a", "b"])]
        bags = EmbeddingBagCollection(tables=tables, is_weighted=True)
        return FeatureProcessedEmbeddingBagCollection(bags, PositionWeightedModuleCollection({"a": 4, "b": 4}))

    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    model, whole = DistributedModelParallel(make(), env), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
    for _ in range(2):
        for r in range(2):
            ids = torch.arange(12).add(r) % 20
            batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([3, 2, 3, 4]))
            if r == env.rank:
                model(batch).values().square().sum().backward()
            (whole(batch).values().square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


def test_torchrecs_position_weights() -> None:
    run_ranks(2, _position_weights)


def _replicated(is_on_meta: bool) -> None:
    env, module = ShardingEnv.from_mesh(mesh((2,), ("shard",))), Net()
    model = DistributedModelParallel(
        module.to("meta") if is_on_meta else module, env, plan={"second.weight": replicate()}
    )
    whole = Net()
    whole.load_state_dict(full_state_dict(model))
    _trains(model, whole, env)
    _trains(copy.deepcopy(model), whole, env)


@pytest.mark.parametrize("is_on_meta", [False, True])
def test_a_weight_that_the_plan_replicates(is_on_meta: bool) -> None:
    """From values and from meta, and in a copy of the model."""
    run_ranks(2, _replicated, is_on_meta)


class Beside(Net):
    """With two layers that a tensor axis splits beside the weight that is kept."""

    def __init__(self, way: str | None = None) -> None:
        super().__init__(way)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.down(self.up(x).relu()))


def _beside_split(shape: tuple[int, ...], names: tuple[str, ...], way: str) -> None:
    env, whole = ShardingEnv.from_mesh(mesh(shape, names)), Beside()
    sharder = TensorParallelSharder({"up": "colwise", "down": "rowwise"})
    model = DistributedModelParallel(Beside(way), env, sharders=[sharder])
    for other in (model, copy.deepcopy(model)):
        _trains(other, copy.deepcopy(whole), env)
    x = torch.ones(2, 6)
    with torch.no_grad():
        whole.load_state_dict(full_state_dict(model))
        torch.testing.assert_close(to_unsharded(model)(x), whole(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names", [("tp",), *(pytest.param((a, "tp"), marks=pytest.mark.slow) for a in ("shard", "dp"))]
)
@pytest.mark.sampled(2)
def test_a_kept_weight_beside_what_a_tensor_axis_splits(names: tuple[str, ...], way: str) -> None:
    """It was replaced, and the one that the model read was not trained."""
    run_ranks(2 ** len(names), _beside_split, (2,) * len(names), names, way)


def _split(way: str) -> None:
    env, module = ShardingEnv.from_mesh(mesh((2,), ("tp",))), Net(way)
    sharders = [TensorParallelSharder({"first": "colwise", "second": "rowwise"})]
    DistributedModelParallel(module, env, sharders=sharders)


@pytest.mark.parametrize("way", ["a list", "an argument"])
def test_a_kept_weight_is_not_split_over_a_tensor_axis(way: str) -> None:
    for error in run_ranks(2, _split, way, expect=PlanError):
        assert "splits 'second.weight', which Net.kept keeps beside its place" in str(error), error
