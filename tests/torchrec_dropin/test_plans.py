"""TorchRec's plans, planned and made by hand: to ours, back, and run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import PlanError, ShardingEnv, ShardingPlan, column_wise, data_parallel, grid, row_wise, table_wise
from tests.equality import LR, attach, loss_of, make_batch, make_module
from tests.ranks import run_ranks
from tests.results import is_empty

pytestmark = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:HeuristicalStorageReservation is known to cause issues:FutureWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
)
FOUR = ShardingEnv.abstract((4,), ("dp",), "cpu")
HOSTS = ShardingEnv.abstract((2, 2), ("host", "local"), "cpu")


class Model(nn.Module):
    """Both collections, one inside another module, and a plain bag."""

    def __init__(self) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        self.over = nn.ModuleDict({"ebc": _collection()})
        self.ec = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t0", num_embeddings=9, embedding_dim=8, feature_names=["a"])],
            device=torch.device("meta"),
        )
        self.bag = nn.EmbeddingBag(5, 8, device="meta")


def _collection() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    sizes = {"t0": (10, 256), "t1": (3, 256), "t2": (40, 512), "t3": (7, 256), "t4": (9, 256), "t5": (11, 256)}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, (rows, dim) in sizes.items()
        ],
        device=torch.device("meta"),
    )


def by_hand(model: nn.Module) -> Any:
    """A plan of TorchRec's with each of its sharding types, for four ranks on two hosts."""
    from torchrec.distributed import sharding_plan as theirs
    from torchrec.distributed.embeddingbag import EmbeddingBagSharder
    from torchrec.distributed.types import ShardingPlan as TheirPlan

    def of(module: nn.Module, tables: dict[str, Any], sharder: Any = None) -> Any:
        where = {"local_size": 2, "world_size": 4, "device_type": "cpu"}
        return theirs.construct_module_sharding_plan(module, tables, sharder, **where)

    tables = {
        "t0": theirs.table_wise(3),
        "t1": theirs.row_wise(),  # of three rows on four ranks
        "t2": theirs.grid_shard([1, 0, 1, 0]),
        "t3": theirs.column_wise([2, 0]),
        "t4": theirs.table_row_wise(1),
        "t5": theirs.data_parallel(),
    }
    return TheirPlan(
        {
            "over.ebc": of(model.over["ebc"], tables),
            "ec": of(model.ec, {"t0": theirs.row_wise(compute_kernel="fused")}),
            "bag": of(model.bag, {"weight": theirs.column_wise(size_per_rank=[3, 5])}, EmbeddingBagSharder()),
        }
    )


@pytest.mark.parametrize("env", [FOUR, HOSTS])
def test_every_sharding_type_by_its_rectangles_and_back(env: ShardingEnv) -> None:
    model = Model()
    theirs = by_hand(model)
    plan = ShardingPlan.from_torchrec(theirs, model, env)
    assert {name.removesuffix(".weight"): entry.layout for name, entry in plan.items()} == {
        "over.ebc.embedding_bags.t0": table_wise(3),
        "over.ebc.embedding_bags.t1": row_wise(),
        "over.ebc.embedding_bags.t2": grid([[2, 0, 2, 0], [3, 1, 3, 1]]),
        "over.ebc.embedding_bags.t3": column_wise([2, 0]),
        "over.ebc.embedding_bags.t4": row_wise([2, 3]),
        "over.ebc.embedding_bags.t5": data_parallel(),
        "ec.embeddings.t0": row_wise(),
        "bag": column_wise([0, 1], widths=[3, 5]),
    }
    assert {entry.kernel for entry in plan.values()} == {"dense", "fused"}
    for path, of_module in theirs.plan.items():
        for table, each in of_module.items():
            name = f"{path}.weight" if table == "weight" else f"{path}.{_holder(path)}.{table}.weight"
            shape = tuple(model.get_parameter(name).shape)
            wanted = [(list(shape), r) for r in range(4)] if each.sharding_spec is None else _full(each)
            assert sorted(wanted) == sorted(_ours(plan[name], shape, env, each.sharding_spec is None)), name
    assert plan.to_torchrec(model, env, local_size=2) == theirs
    assert ShardingPlan.from_json(plan.to_json()) == plan == ShardingPlan.from_torchrec(theirs, model, env)


def test_copies_that_are_updated_in_the_backward_pass_and_back() -> None:
    module = make_module("ebc")
    attach(module.embedding_bags["t0"], "sgd")
    plan = ShardingPlan({f"embedding_bags.t{i}.weight": data_parallel() for i in range(2)})
    theirs = copy.deepcopy(pickle.loads(pickle.dumps(plan.to_torchrec(module, FOUR))))
    assert [each.compute_kernel for each in theirs.plan[""].values()] == ["dense", "dense"]  # others part there
    back = ShardingPlan.from_torchrec(theirs, module, FOUR)
    assert [back[name].kernel for name in plan] == [None, "dense"]
    assert back.to_torchrec(module, FOUR) == theirs


def _holder(path: str) -> str:
    return "embeddings" if path == "ec" else "embedding_bags"


def _full(theirs: Any) -> list[Any]:
    shards = theirs.sharding_spec.shards
    return [(s.shard_offsets + s.shard_sizes, s.placement.rank()) for s in shards if all(s.shard_sizes)]


def _ours(entry: Any, shape: tuple[int, ...], env: ShardingEnv, copied: bool) -> list[Any]:
    shards = entry.layout.shards(shape, env)
    return [([*(() if copied else s.offsets), *s.sizes], s.rank) for s in shards]


def test_one_modules_plan_alone() -> None:
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan as construct
    from torchrec.distributed.sharding_plan import table_wise as theirs_table_wise

    module = make_module("ebc")
    tables = {f"t{i}": theirs_table_wise(i % 2, compute_kernel="fused_uvm_caching") for i in range(5)}
    plan = ShardingPlan.from_torchrec(construct(module, tables, None, 2, 2, "cuda"), module)
    assert {name: str(entry) for name, entry in plan.items()} == {
        f"embedding_bags.t{i}.weight": f"table_wise({i % 2}), fused" for i in range(5)
    }


def test_where_a_plan_is_pinned_and_where_it_is_taken_for_ours() -> None:
    from planner import ShardingPlanner

    module = make_module("ebc")
    theirs = ShardingPlan({f"embedding_bags.t{i}.weight": table_wise(i % 4) for i in range(3)})
    pinned = theirs.to_torchrec(module, FOUR)
    plan = ShardingPlanner().plan(module, dmp.default_sharders(), FOUR, pinned)
    assert {name: str(plan[name]) for name in theirs} == {name: f"{theirs[name]}, dense" for name in theirs}
    with pytest.raises(PlanError, match=r"got torchrec\.distributed\.types\.ShardingPlan"):
        theirs.diff(pinned)
    with pytest.raises(PlanError, match=r"got torchrec\.distributed\.types\.ParameterSharding"):
        ShardingPlan(pinned.plan[""])


def test_what_does_not_fit_is_named_in_both_forms() -> None:
    model = Model()

    def refused(change: Any) -> str:
        theirs = by_hand(model)
        change(theirs.plan)
        with pytest.raises(PlanError) as error:
            dmp.DistributedModelParallel(model, env=ShardingEnv.single(), plan=theirs)
        return str(error.value)

    def with_kernel(plan: Any) -> None:
        plan["over.ebc"]["t0"].compute_kernel = "key_value"

    assert "module 'under'" in refused(lambda plan: plan.update(under=plan.pop("ec")))
    assert "table 't9' of module 'ec'" in refused(lambda plan: plan["ec"].update(t9=plan["ec"].pop("t0")))
    missing = refused(lambda plan: plan["over.ebc"].pop("t3"))
    assert "no entry for 'over.ebc.embedding_bags.t3.weight' (table 't3' of module 'over.ebc')" in missing
    kernel = refused(with_kernel)
    assert "table 't0' of module 'over.ebc' ('over.ebc.embedding_bags.t0.weight')" in kernel and "key_value" in kernel
    rank = refused(lambda plan: None)
    assert "rank 3" in rank or "rank 2" in rank or "rank 1" in rank
    odd = {"bag.weight": dmp.rectangles([((0, 0), (2, 8), 0), ((2, 0), (3, 8), 1)])}
    with pytest.raises(PlanError, match="no sharding type"):
        ShardingPlan(odd).to_torchrec(model, FOUR)


class Net(nn.Module):
    """Collections of `tests.equality` with their inputs under one forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = make_module(kind)

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def _planned(optimizer: str | None, kind: str) -> tuple[Any, Net]:
    """A plan of TorchRec's planner for a model of its default sharders."""
    import torch.distributed as dist
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import get_default_sharders

    net = Net(kind)
    attach(net, optimizer)
    world = dist.get_world_size()
    allowed = ParameterConstraints(sharding_types=["table_wise", "column_wise"], min_partition=4)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu"),
        constraints={f"t{i}": allowed for i in range(1, 5)},
    )
    return planner.collective_plan(net, get_default_sharders(), dist.group.WORLD), net


def _runs(kind: str, optimizer: str | None) -> str:
    from torchrec.distributed.sharding_plan import get_default_sharders

    plan, net = _planned(optimizer, kind)
    env = dmp.ShardingEnv.from_process_group(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = dmp.DistributedModelParallel(net, plan=plan, sharders=get_default_sharders())
    assert model.plan.plan == plan.plan == model._plan.plan
    assert model.plan.get_plan_for_module("inner") == plan.get_plan_for_module("inner")
    plain = Net(kind)
    plain.load_state_dict(before)
    fused = model.fused_optimizer.fused
    others = [p for name, p in model.named_parameters() if name not in fused]
    ordinary = torch.optim.SGD([{"params": others}], lr=LR)
    for step in range(2):
        loss_of(model(*make_batch(kind, env.rank, step))).backward()
        batches = [make_batch(kind, rank, step) for rank in range(env.size)]
        losses = [loss_of(plain(*b)) for b in batches if not is_empty(b)]
        (sum(losses) / env.size).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for name, p in plain.named_parameters():
                rate = 0.01 if optimizer is None and name in fused else LR  # FBGEMM's, of a table that is fused
                p -= rate * (0 if p.grad is None else p.grad)
                p.grad = None
        ordinary.step()
        ordinary.zero_grad()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    return ",".join(entry.kernel or "" for entry in model.plan.values())


@pytest.mark.parametrize(("kind", "optimizer"), [("ebc", None), ("ebc", "sgd"), ("ec", None)])
def test_a_plan_of_torchrecs_planner(kind: str, optimizer: str | None) -> None:
    """The first table is data-parallel in one, which TorchRec leaves to an ordinary optimizer."""
    kernels = "dense,fused,fused,fused,fused" if kind == "ebc" else "fused,fused,fused"
    assert run_ranks(2, _runs, kind, optimizer) == [kernels] * 2


def _in_torchrecs_own() -> None:
    """One plan of ours, in both wrappers: outputs agree, and each rank holds the same rectangles."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=16, feature_names=[key])
        for i, (key, rows) in enumerate({"a": 13, "c": 3, "d": 50}.items())
    ]
    world = torch.distributed.group.WORLD
    env = dmp.ShardingEnv.from_process_group(world)  # type: ignore[arg-type]
    module = EmbeddingBagCollection(tables=tables)
    layouts = {"t0": column_wise([1, 0]), "t1": row_wise(), "t2": table_wise(1)}
    plan = ShardingPlan({f"embedding_bags.{name}.weight": layout for name, layout in layouts.items()})
    theirs = DistributedModelParallel(
        nn.ModuleDict({"over": EmbeddingBagCollection(tables=tables, device=torch.device("meta"))}),
        env=ShardingEnv.from_process_group(world),
        plan=type(plan.to_torchrec(module, env))({"over": plan.to_torchrec(module, env).plan[""]}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    theirs.load_state_dict({f"over.{name}": value for name, value in module.state_dict().items()})
    model = dmp.DistributedModelParallel(module, env=env, plan=plan)
    (batch,) = make_batch("ebc", 0, 0)
    torch.testing.assert_close(model(batch).values(), theirs.module["over"](batch).values())
    for name, value in theirs.state_dict().items():
        held = {(*s.metadata.shard_offsets, *s.tensor.shape) for s in value.local_shards() if s.tensor.numel()}
        ours = model.state_dict()[name.removeprefix("over.")]
        assert held == {(*o, *c.shape) for o, c in zip(ours.offsets, ours.chunks, strict=True)}


def test_a_plan_of_ours_in_torchrecs_wrapper() -> None:
    run_ranks(2, _in_torchrecs_own)
