"""Dense weights under the wrapper: values from meta, state, copies, plans that name them, on meshes that split them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    PlanError,
    ShardError,
    ShardingEnv,
    ShardingPlan,
    check_cover,
    colwise,
    full_state_dict,
    fully_sharded,
    load_checkpoint,
    replicate,
    row_wise,
    rowwise,
    save_checkpoint,
    sequence,
    to_unsharded,
)
from dmp.wrap.values.skeleton import skeleton_of
from planner import Constraint, ShardingPlanner, Topology
from sharders import default_sharders
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, batch, loss_of, make, trained_like

SPLIT = ["tp2", "fsdp2", "hsdp2x2", "fsdp2xtp2", "replicate2xtp2"]
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def wrapped(mesh: str, name: str = "llama_gqa", **options: object) -> DistributedModelParallel:
    return DistributedModelParallel(make(name), ShardingEnv.from_mesh(mesh_of(*MESHES[mesh])), **options)  # type: ignore[arg-type]


def _ranks(mesh: str) -> int:
    return math.prod(MESHES[mesh].shape)


# ---- layouts ----


@pytest.mark.parametrize(
    ("layout", "shape", "first"),
    [
        (colwise(), (8, 6), (2, 6)),
        (colwise(), (8,), (2,)),
        (colwise(dim=1), (8, 6), (4, 3)),
        (rowwise(), (8, 6), (4, 3)),
        (rowwise(), (8,), (4,)),
        (rowwise(dim=0), (8, 6), (2, 6)),
        (sequence(), (8,), (4,)),
        (fully_sharded(), (8, 6), (4, 6)),
        (replicate(), (8, 6), (8, 6)),
    ],
)
def test_dense_layouts_follow_the_mesh(layout: Layout, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    env = ShardingEnv.abstract((3, 2, 2), ("replicate", "shard", "tp"))
    shards = layout.shards(shape, env)
    assert shards[0].sizes == first
    distinct = {(s.offsets, s.sizes): s for s in shards}
    check_cover(list(distinct.values()), shape, env.table_size)
    assert len({s.rank for s in shards}) == len(shards) == 4
    assert ShardingPlan.from_json(ShardingPlan({"w": layout}).to_json())["w"].layout == layout


def test_uneven_rows_leave_some_ranks_without_any() -> None:
    env = ShardingEnv.abstract((4,), ("shard",))
    assert [s.sizes for s in fully_sharded().shards((5,), env)] == [(2,), (2,), (1,)]


@pytest.mark.parametrize("layout", [colwise(), rowwise(), sequence(), fully_sharded()])
def test_a_dense_layout_needs_its_axis(layout: Layout) -> None:
    with pytest.raises(ShardError, match="axis"):
        layout.shards((4, 4), ShardingEnv.abstract((2,), ("dp",)))


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(ShardError, match=r"size 5 .* 2 ranks of the tensor axis"):
        colwise().shards((5, 4), ShardingEnv.abstract((2,), ("tp",)))


# ---- plans ----


def test_the_planner_says_what_dense_weights_get() -> None:
    env = ShardingEnv.abstract((2, 4, 2), ("replicate", "shard", "tp"))
    plan = ShardingPlanner().plan(make("llama_gqa"), default_sharders(), env)
    assert plan["layers.1.attention.wq.weight"].layout == colwise()
    assert plan["layers.0.feed_forward.w2.weight"].layout == rowwise()
    blocks = {block.name: block for block in plan.report.dense}
    assert blocks["layers.*"].count == 2
    whole = {name: p for name, p in make("llama_gqa").named_parameters() if name.startswith("layers.")}
    assert blocks["layers.*"].num_parameters == sum(p.numel() for p in whole.values())
    split = sum(p.numel() for p in whole.values() if p.dim() == 2)
    assert blocks["layers.*"].rank_bytes["tensor parallel"] == 4 * split // 8
    assert "2 x layers.*" in str(plan.report) and "weights on a rank" in str(plan.report)


def test_a_vocabulary_is_dense_where_weights_are_split_and_a_table_where_asked() -> None:
    env = ShardingEnv.abstract((4,), ("shard",))
    name = "tok_embeddings.weight"
    assert ShardingPlanner().plan(make("llama_gqa"), default_sharders(), env)[name].layout == fully_sharded()
    asked = ShardingPlanner(constraints={name: Constraint(layouts=["row_wise"])})
    assert asked.plan(make("llama_gqa"), default_sharders(), env)[name].layout == row_wise()
    pinned = ShardingPlanner().plan(make("llama_gqa"), default_sharders(), env, pinned={name: row_wise()})
    assert pinned[name].layout == row_wise()


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_collectives_of_dense_weights_have_figures_of_their_own(axis: str) -> None:
    """As gloo's connections, beside the shared memory that tables exchange through."""
    fast = Topology(1e10, 1e10, 1e12, link_bandwidth=1e10, link_latency=1e-5)
    slow = replace(fast, collective_bandwidth=1e9, collective_latency=1e-4)
    as_slow = replace(fast, link_bandwidth=1e9, link_latency=1e-4)

    def seconds(topology: Topology, module: nn.Module) -> float:
        planner = ShardingPlanner(topology, batch_size=4)
        return float(planner.plan(module, default_sharders(), ShardingEnv.abstract((4,), (axis,))).report.step_seconds)

    layers, table = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), nn.EmbeddingBag(100, 16, mode="sum")
    assert seconds(slow, layers) == seconds(as_slow, layers) > 2 * seconds(fast, layers)
    assert seconds(slow, table) == seconds(fast, table) < seconds(as_slow, table)


def test_blocks_inside_a_module_that_is_itself_numbered_are_counted() -> None:
    module = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    plan = ShardingPlanner().plan(module, default_sharders(), ShardingEnv.abstract((2,), ("shard",)))
    assert [(block.name, block.count) for block in plan.report.dense] == [("0.*", 3)]


def test_dense_weights_that_do_not_fit_are_an_error() -> None:
    topology = Topology(memory_bytes=1e5, memory_bandwidth=1e9, flops=1e9, link_bandwidth=1e9, link_latency=1e-6)
    env = ShardingEnv.abstract((2,), ("shard",))
    with pytest.raises(PlanError, match="dense weights") as caught:
        ShardingPlanner(topology).plan(make("llama_gqa"), default_sharders(), env)
    assert caught.value.bytes_short and caught.value.bytes_short > 0


def test_a_plan_that_names_dense_weights_wrongly() -> None:
    env = ShardingEnv.abstract((2,), ("shard",))
    model = make("llama_tied")
    with pytest.raises(PlanError, match="does not have"):
        ShardingPlan({"layers.9.attention.wq.weight": replicate()}).validate(model, env, default_sharders())
    with pytest.raises(PlanError, match="tensor axis"):
        ShardingPlan({"layers.0.attention.wq.weight": colwise()}).validate(model, env, default_sharders())
    both = {"tok_embeddings.weight": replicate(), "output.weight": fully_sharded()}
    with pytest.raises(PlanError, match="under another of its names"):
        ShardingPlan(both).validate(model, env, default_sharders())


def _replicated_among_split(mesh: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    oracle, module = make("llama_tied"), make("llama_tied")
    plan = {name: replicate() for name, p in module.named_parameters() if p.dim() == 1}
    model = DistributedModelParallel(module, env, plan=plan)
    kinds = {name: hasattr(p, "placements") for name, p in model.named_parameters()}
    assert {name for name, is_split in kinds.items() if not is_split} == set(plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (oracle, model)]
    trained_like(oracle, model, env, optimizers, steps=3)


@pytest.mark.parametrize("mesh", ["fsdp2", "hsdp2x2"])
@pytest.mark.sampled(3)
def test_replicated_weights_among_split_ones(mesh: str) -> None:
    run_ranks(_ranks(mesh), _replicated_among_split, mesh)


# ---- values from meta ----


def _from_meta(mesh: str | None, name: str) -> dict[str, torch.Tensor]:
    env = ShardingEnv.single() if mesh is None else ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    with torch.device("meta"):
        module = make(name)
    torch.manual_seed(5)
    model = DistributedModelParallel(module, env)
    torch.manual_seed(6 + env.rank)
    return full_state_dict(model)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt"])
@pytest.mark.parametrize("mesh", SPLIT)
@pytest.mark.sampled(12)
def test_values_from_meta_do_not_depend_on_the_mesh(mesh: str, name: str) -> None:
    want = _from_meta(None, name)
    assert all(torch.isfinite(v).all() for v in want.values())
    assert len({float(v.flatten()[0]) for v in want.values() if v.dim() == 2}) > 3
    for got in run_ranks(_ranks(mesh), _from_meta, mesh, name):
        assert list(got) == list(want)
        assert all(torch.equal(got[key], want[key]) for key in want)


def _stays_on_meta() -> None:
    with torch.device("meta"):
        module = make("gpt")
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh_of(*MESHES["fsdp2"])), init_parameters=False)
    assert all(p.is_meta for p in model.parameters())


def test_parameters_may_stay_on_meta() -> None:
    run_ranks(2, _stays_on_meta)


# ---- state ----


def _state(mesh: str, path: str) -> None:
    model = wrapped(mesh)
    oracle = make("llama_gqa", seed=1)
    given = oracle.state_dict()
    kept = dict(given)
    model.load_state_dict(given)
    assert all(given[key] is kept[key] for key in kept)
    ids = batch(0, 0)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), oracle(ids), atol=1e-5, rtol=1e-5)
        plain = to_unsharded(model)
        assert torch.equal(plain(ids), oracle(ids))
    assert all(torch.equal(v, given[key]) for key, v in full_state_dict(model).items())
    model.load_state_dict(model.state_dict())
    assert all(torch.equal(v, given[key]) for key, v in full_state_dict(model).items())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped(mesh)

    outer = Outer()
    outer.load_state_dict({f"inner.{key}": value for key, value in given.items()})
    assert all(torch.equal(v, given[key]) for key, v in full_state_dict(outer.inner).items())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, *batch(0, 1)).backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer)


def _loaded(mesh: str, path: str) -> dict[str, torch.Tensor]:
    model = wrapped(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_checkpoint(path, model, optimizer)
    loss_of(model, *batch(0, 2)).backward()
    optimizer.step()
    return full_state_dict(model)


@pytest.mark.parametrize(
    ("mesh", "other"), [("fsdp2", "tp2"), ("fsdp2xtp2", "fsdp2"), ("tp2", "hsdp2x2"), ("hsdp2x2", "replicate2xtp2")]
)
@pytest.mark.sampled(6)
def test_state_goes_from_mesh_to_mesh(mesh: str, other: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(_ranks(mesh), _state, mesh, path)
    oracle = make("llama_gqa")
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-2)
    load_checkpoint(path, oracle, optimizer)
    loss_of(oracle, *batch(0, 2)).backward()
    optimizer.step()
    for got in run_ranks(_ranks(other), _loaded, other, path):
        for key, value in oracle.state_dict().items():
            torch.testing.assert_close(got[key], value, atol=1e-5, rtol=1e-5, msg=f"{key} differs")


# ---- copies ----


def _copies(mesh: str) -> None:
    model = wrapped(mesh, "gpt")
    ids, targets = batch(model.env.data_rank, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, ids, targets).backward()
    optimizer.step()
    before = full_state_dict(model)
    for twin in (copy.deepcopy(model), model.copy()):
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert twin.module.lm_head._parameters["weight"] is twin.module.wte._parameters["weight"]
        with torch.no_grad():
            torch.testing.assert_close(twin(ids), model(ids), atol=0, rtol=0)
        stepper = torch.optim.SGD(twin.parameters(), lr=0.5)  # after a forward, which gathers weights
        loss_of(twin, ids, targets).backward()
        stepper.step()
        after, unchanged = full_state_dict(twin), full_state_dict(model)
        assert all(torch.equal(unchanged[key], before[key]) for key in before)
        assert not torch.equal(after["h.0.mlp.0.weight"], before["h.0.mlp.0.weight"])
    loss_of(model, ids, targets).backward()  # and the original trains on
    again = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), atol=0, rtol=0)


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow] * (_ranks(m) > 2)) for m in (*SPLIT, "dp2")])
@pytest.mark.sampled(3)
def test_copies_are_independent(mesh: str) -> None:
    run_ranks(_ranks(mesh), _copies, mesh)


def test_a_skeleton_holds_no_values() -> None:
    module = make("gpt")
    made = skeleton_of(module, [])
    assert all(t.is_meta for t in [*made.parameters(), *made.buffers()])
    assert made.lm_head.weight is made.wte.weight
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in module.named_parameters()]


@dataclass
class _Config:
    name: str
    init: Any
    shared: list[Any]


def test_a_skeleton_copies_what_attributes_hold() -> None:
    """As `copy.deepcopy`: objects are others, what they share they share, and modules among them are its own."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = [module[0], {"count": [1]}]
    module.configs = [_Config(n, partial(nn.Module.train, module[1], mode=False), shared) for n in "ab"]
    made: Any = skeleton_of(module, [])
    first, second = made.configs
    assert (first.name, second.name) == ("a", "b") and first is not module.configs[0]
    assert first.shared is second.shared is not shared
    assert first.shared[0] is made[0] and first.init.args == (made[1],)
    first.init()
    first.shared[1]["count"].append(2)
    assert (made[1].training, module[1].training, shared[1]) == (False, True, {"count": [1]})


def _delayed(mesh: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    model = DistributedModelParallel(make("gpt"), env, init_data_parallel=False)
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.init_data_parallel()
        m.init_data_parallel()
    ids = batch(0, 0)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), make("gpt")(ids), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(twin(ids), model(ids), atol=0, rtol=0)


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_data_parallel_part_may_come_later(mesh: str) -> None:
    run_ranks(_ranks(mesh), _delayed, mesh)


class _ByModel(nn.Module):
    """Fills its modules as Hugging Face's models do."""

    def __init__(self, init_norm: bool) -> None:
        super().__init__()
        self.init_norm = init_norm
        self.tokens, self.linear, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4), _Norm()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, _Norm) and self.init_norm:
            nn.init.constant_(module.scale, 2.0)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def test_the_models_own_initial_values_win() -> None:
    with torch.device("meta"):
        good, bad = _ByModel(True), _ByModel(False)
    values = full_state_dict(DistributedModelParallel(good))
    assert (values["tokens.weight"] == 0.5).all() and (values["linear.weight"] == 0.5).all()
    assert (values["norm.scale"] == 2.0).all() and values["linear.bias"].abs().max() > 0
    with pytest.raises(ShardError, match=r"'norm'.*nothing gave \['scale'\] values"):
        DistributedModelParallel(bad)
