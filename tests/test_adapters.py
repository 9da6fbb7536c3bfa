"""Adapters beside split Linears: they are split as these are, and train as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmp import PlanError, ShardingEnv
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.adapters import base_of, in_place, split_in
from sharders.tensor_parallel.structure.find_transformer import recognise
from tests.adapted import Adapted, adapted
from tests.ranks import run_ranks
from tests.test_tensor_parallel import build, check_training, split, whole
from tests.transformers_zoo import Llama

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of outputs that a hook makes local


@pytest.mark.parametrize(
    "mesh",
    [
        ((2,), ("tp",)),
        pytest.param(((4,), ("tp",)), marks=pytest.mark.slow),
        pytest.param(((2, 2), ("shard", "tp")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_equals_one_process(mesh: tuple[tuple[int, ...], tuple[str, ...]]) -> None:
    shape, names = mesh
    run_ranks(2 if shape == (2,) else 4, check_training, "adapted", shape, names)


def merges() -> None:
    reference = build("adapted")
    model = copy.deepcopy(reference)
    split(model, (2,), ("tp",))
    for each in (reference, model):
        for module in each.modules():
            if isinstance(module, Adapted):
                module.merge("default")
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, msg=lambda m, name=name: f"{name}: {m}")


def test_they_are_merged() -> None:
    """One of a pair is split, the other whole, and was a plain tensor in a method that is told the adapter's name."""
    run_ranks(2, merges)


def test_each_pair_is_split_where_its_linear_is() -> None:
    env = ShardingEnv.abstract((2,), ("tp",))
    model = adapted(Llama(kv_heads=4), ranks={"default": 3, "other": 5})
    layouts = {
        name.removeprefix("layers.0."): layout.name
        for name, layout in TensorParallelSharder().place(model, {}, env).layouts.items()
        if name.startswith("layers.0.")
    }
    assert {name: kind for name, kind in layouts.items() if "other" in name or "base" in name} == {
        "attention.wq.base_layer.weight": "colwise",
        "attention.wq.lora_B.other.weight": "colwise",
        "attention.wv.base_layer.weight": "colwise",
        "attention.wv.lora_B.other.weight": "colwise",
        "attention.wo.base_layer.weight": "rowwise",
        "attention.wo.lora_A.other.weight": "rowwise",
        "feed_forward.w1.base_layer.weight": "colwise",
        "feed_forward.w1.lora_B.other.weight": "colwise",
        "feed_forward.w2.base_layer.weight": "rowwise",
        "feed_forward.w2.lora_A.other.weight": "rowwise",
    }
    assert layouts["attention.wk.weight"] == layouts["feed_forward.w3.weight"] == "colwise"


def test_a_plan_names_the_adapted_linear() -> None:
    """As one that was written for the model before: each style is that of the Linear and its pair."""
    env = ShardingEnv.abstract((2,), ("tp",))
    mine = {f"layers.*.attention.{name}": "colwise" for name in ("wq", "wk", "wv")}
    mine |= {f"layers.*.feed_forward.{name}": "colwise" for name in ("w1", "w3")}
    mine |= {"layers.*.attention.wo": "rowwise", "layers.*.feed_forward.w2": "rowwise"}
    model = adapted(Llama(kv_heads=4))
    found = TensorParallelSharder(mine).place(model, {}, env).layouts
    derived = TensorParallelSharder().place(model, {}, env).layouts
    assert found == {name: layout for name, layout in derived.items() if name.startswith("layers")}


@pytest.mark.parametrize("which", [("wq",), ("wo",), ("w1", "w3"), ("wk", "w2")])
def test_adapters_change_nothing_of_what_is_found(which: tuple[str, ...]) -> None:
    model = Llama(kv_heads=4)
    expected, found = recognise(model), recognise(adapted(model, which))
    assert (found.width, found.embedding, found.head) == (expected.width, expected.embedding, expected.head)
    for block, plain in zip(found.blocks, expected.blocks, strict=True):
        assert not block.whole and not plain.whole
        for branch, other in zip(block.branches, plain.branches, strict=True):
            linears = [name.removesuffix(".base_layer") for name in (*branch.up, branch.down)]
            assert linears == [*other.up, other.down] and branch.heads == other.heads


def test_sequence_parallel_is_refused() -> None:
    sharder, env = TensorParallelSharder(sequence_parallel=True), ShardingEnv.abstract((2,), ("tp",))
    with pytest.raises(PlanError, match=r"wq\.lora_B.*adapters beside split Linears.*sequence_parallel=False"):
        sharder.place(adapted(Llama(kv_heads=4)), {}, env)


def test_only_linears_with_pairs_are_adapted() -> None:
    linear = nn.Linear(8, 12)
    whole = Adapted(linear, {"a": 2, "b": 3})
    assert base_of(whole) == "base_layer"
    assert dict(in_place(nn.ModuleDict({"x": whole})))["x"] is linear
    assert dict(in_place(whole)) == {"": linear}
    assert split_in(whole, "colwise") == ["base_layer", "lora_B.a", "lora_B.b"]
    assert split_in(whole, "rowwise") == ["base_layer", "lora_A.a", "lora_A.b"]
    wide, scaled, lone = Adapted(linear, {"a": 8}), Adapted(linear, {"a": 2}), Adapted(linear, {"a": 2, "b": 3})
    scaled.magnitude = nn.Parameter(torch.ones(12))
    del lone.lora_B["b"]
    mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    for other in (linear, wide, scaled, lone, mlp, nn.Sequential(linear), nn.ReLU(), Llama()):
        assert base_of(other) is None and split_in(other, "colwise") == [""]
