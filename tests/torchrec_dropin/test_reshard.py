"""A running model's plan changes under what TorchRec's users have around it."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dmp
from dmp import (
    DistributedModelParallel,
    ParameterSharding,
    PlanError,
    ShardError,
    ShardingEnv,
    ShardingPlan,
    row_wise,
    table_wise,
)
from dmp.pipeline.torchrec_names import TrainPipelineSparseDist
from tests.ranks import mesh, run_ranks
from tests.results import loss_of
from tests.state_jobs import (
    ROWS,
    TABLES,
    Ranker,
    assert_same,
    build,
    dense_optimizer,
    in_backward,
    make,
    my_batch,
    table_plan,
    train,
    whole,
)
from tests.torchrec_dropin.rank_tests import OURS, _on_these_ranks, theirs
from tests.torchrec_dropin.test_torchrec_sharder import PLANS, _trained, _wrapped
from tests.torchrec_dropin.test_torchrec_sharder import pytestmark as calls_of_theirs
from tests.torchrec_dropin.their_modules import make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

pytestmark = [
    calls_of_theirs,
    pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation is known to cause issues:FutureWarning"),
]


def wrapped_optimizers() -> None:
    """An optimizer inside TorchRec's wrappers goes on: its state has moved, and every layer has the new parameters."""
    runs = []
    for changes in (True, False):
        model: Any = build("row_wise", "none", (2,), None)
        inner = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.01))
        warm = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)], lr=0.01)
        train(model, warm, range(2), model.env)
        if changes:
            old = dict(model.named_parameters())
            model.reshard(table_plan("table_wise", model.env), warm)
            own = dict(model.named_parameters())
            for layer in (warm, inner):
                held = [p for group in layer.param_groups for p in group["params"]]
                assert {id(own[name]) for name in TABLES} <= {*map(id, held)} & {*map(id, layer.params.values())}
                assert not {id(old[name]) for name in TABLES} & {*map(id, held), *map(id, layer.params.values())}
                assert all(own[name] in layer.state for name in TABLES)
        train(model, warm, range(2, 4), model.env)
        runs.append(whole(model, inner._optimizer))
    assert_same(runs[0], runs[1], exact=False)


def combined() -> None:
    """All optimizers of a model as one, around the tables' own: it reads and steps as before."""
    runs = []
    for changes in (True, False):
        model: Any = build("row_wise", "adagrad", (2,), None)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda params: torch.optim.AdamW(params, lr=0.01),
        )
        every = CombinedOptimizer([("tables", model.fused_optimizer), ("dense", dense)])
        warm = WarmupOptimizer(every, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)], lr=0.05)
        train(model, warm, range(2), model.env)
        if changes:
            model.reshard(table_plan("column_wise", model.env), warm)
            own = dict(model.named_parameters())
            for layer in (warm, every):
                for name in TABLES:
                    assert layer.params[f"tables.{name}"] is own[name]
                    assert layer.state[own[name]]["sum"].offsets == model.state_dict()[name].offsets
        train(model, warm, range(2, 4), model.env)
        saved = warm.state_dict()["state"]
        assert {f"tables.{name}" for name in TABLES} <= saved.keys()
        runs.append(whole(model, dense._optimizer))
    assert_same(runs[0], runs[1], exact=False)


def their_modules(kind: str, optimizer: str | None) -> None:
    """A module that TorchRec's own sharder runs: as the one that keeps its plan, with rates as they are by then."""
    runs: list[Any] = []
    for plans in (("rows", "rows"), ("tables", "columns"), ("columns", "rows")):
        model = _wrapped(kind, plans[0], optimizer)
        inner, dense = model.module, torch.optim.Adam(model.parameters(), lr=0.01) if optimizer is None else None
        _trained(model, dense, kind, range(2))
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.5
        late = loss_of(model(*make_batch(kind, dist.get_rank(), 9)))
        layouts = {name: PLANS[plans[1]](i) for i, name in enumerate(model.plan)}
        model.reshard(layouts, dense)
        assert model.module is inner and {name: entry.layout for name, entry in model.plan.items()} == layouts
        if plans[0] != plans[1]:
            with pytest.raises(ShardError, match="forward from before model"):
                late.backward()
        _trained(model, dense, kind, range(2, 4))
        state = dmp.full_optimizer_state_dict(model, dense)["state"]
        for values in state.values() if optimizer is None else ():
            values.pop("step")  # a rank that has nothing of a table of theirs does not count
        runs.append((dmp.full_state_dict(model), state))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0])


def refused() -> None:
    """One with parameters beside its tables."""
    model = _wrapped("fp", "rows", None)
    with pytest.raises(ShardError, match="beside its tables, and cannot change its plan"):
        model.reshard({name: PLANS["tables"](i) for i, name in enumerate(model.plan)})


class WithLoss(Ranker):
    """As TorchRec's pipelines want it: a loss, and the output."""

    def forward(self, features: Any) -> Any:
        scores = super().forward(features)
        return scores.square().mean(), scores.detach()


def in_a_pipeline() -> None:
    """The batch whose ids are under way when the plan changes is begun anew; numbers as in a loop."""
    runs = []
    for changes in (True, False):
        torch.manual_seed(0)
        module, env = WithLoss(), ShardingEnv.from_mesh(mesh((2,)))
        in_backward(torch.optim.Adagrad, module.ebc.parameters(), {"lr": 0.1})
        model = DistributedModelParallel(module, env, plan=table_plan("row_wise", env))
        dense, outputs = dense_optimizer(model, "adagrad"), []
        if changes:
            pipeline = TrainPipelineSparseDist(model, dense, env.device)
            batches = iter([my_batch(i, env) for i in range(6)])
            for step in range(6):
                outputs.append(pipeline.progress(batches))
                if step in (1, 3):
                    model.reshard(table_plan("table_wise" if step == 1 else "mixed", env))
        else:
            for step in range(6):
                dense.zero_grad()
                loss, output = model(my_batch(step, env))
                loss.backward()
                dense.step()
                outputs.append(output)
        runs.append((outputs, dmp.full_state_dict(model)))
    torch.testing.assert_close(*runs)


def test_in_a_pipeline() -> None:
    run_ranks(2, in_a_pipeline)


def fused_collections() -> None:
    """TorchRec's collections with an optimizer of their own."""
    from torchrec import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    runs = []
    for changes in (True, False):
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=16, num_embeddings=n, feature_names=[f"f{i}"])
            for i, n in enumerate(ROWS)
        ]
        module = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": 0.1}, device=torch.device("cpu"))
        env = ShardingEnv.from_mesh(mesh((2,)))
        names = [name for name, _ in module.named_parameters()]
        model = DistributedModelParallel(module, env, plan=dict.fromkeys(names, row_wise()))
        for step in range(4):
            model(my_batch(step, env)).values().square().mean().backward()
            if changes and step == 1:
                with torch.inference_mode():
                    assert sum(model.reshard({name: table_wise(i % 2) for i, name in enumerate(names)}).sent_bytes)
        runs.append((dmp.full_state_dict(model), dmp.full_optimizer_state_dict(model)["state"]))
    torch.testing.assert_close(*runs)


def test_fused_collections() -> None:
    run_ranks(2, fused_collections)


def forms_of_plans() -> None:
    """Theirs, whole and as their `reshard` has it; what says something else than the model is."""
    model: Any = build("row_wise", "adagrad", (2,), None)
    env, before = model.env, dmp.full_state_dict(model)
    given = [ShardingPlan(table_plan(name, env)).to_torchrec(make(), env) for name in ("table_wise", "column_wise")]
    assert model.reshard(given[0]).moved == tuple(TABLES)
    assert {n: entry.layout for n, entry in model.plan.items()} == table_plan("table_wise", env)
    of_module = given[1].plan["ebc"]
    model.reshard({"ebc": (1.0, of_module), "other": (0.0, {})}, "ebc")
    assert model.plan.plan["ebc"]["t0"].sharding_type == of_module["t0"].sharding_type == "column_wise"
    model.reshard(changed_shard_to_params={"ebc": (1.0, given[0].plan["ebc"])})
    model.reshard(sharded_module_fqn="ebc", changed_shard_to_params={"ebc": (1.0, of_module)})
    assert {n: entry.layout for n, entry in model.plan.items()} == table_plan("column_wise", env)
    for plan, path, said in [
        ({"ebc": (1.0, of_module)}, "sparse.ebc", r"for module 'sparse\.ebc'; got plans for \['ebc'\]"),
        ({"sparse.ebc": (1.0, of_module)}, None, r"has module 'sparse\.ebc', which the model does not have"),
        (table_plan("row_wise", env), "ebc", "goes with a dict of module's path"),
        ({TABLES[0]: ParameterSharding(row_wise(), "dense")}, None, "kernel 'dense'; in the running model it is"),
        (None, None, "expected a ShardingPlan or a dict"),
    ]:
        with pytest.raises(PlanError, match=said):
            model.reshard(plan, path)
    assert all(torch.equal(value, before[name]) for name, value in dmp.full_state_dict(model).items())


def test_forms_of_plans() -> None:
    run_ranks(2, forms_of_plans)


def theirs_dynamic_sharding(sharding_type: str, names_module: bool) -> None:
    """TorchRec's own test of its `reshard`, with our class in the place of theirs."""
    from torchrec import EmbeddingBagConfig
    from torchrec.distributed.planner.types import ParameterConstraints

    with _on_these_ranks(OURS):
        tests, kinds = theirs("test_sharding"), theirs("test_model")
        tables = [
            EmbeddingBagConfig(
                name=f"table_{i}", num_embeddings=40 + 8 * i, embedding_dim=16, feature_names=[f"feature_{i}"]
            )
            for i in range(4)
        ]
        options = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        kind = tests.SharderType.EMBEDDING_BAG_COLLECTION.value
        torch.manual_seed(0)
        random.seed(0)
        tests.dynamic_sharding_test(
            rank=dist.get_rank(),
            world_size=2,
            model_class=kinds.TestSparseNN,
            embedding_groups={},
            tables=tables,
            sharders=[tests.create_test_sharder(kind, sharding_type, "fused", options)],
            backend="of these ranks",
            optim=EmbOptimType.EXACT_SGD,
            constraints={t.name: ParameterConstraints(sharding_types=[sharding_type]) for t in tables},
            skip_passing_resharding_fqn=not names_module,
        )


@pytest.mark.parametrize(("sharding_type", "names_module"), [("table_wise", True), ("column_wise", False)])
def test_their_own_test_of_resharding(sharding_type: str, names_module: bool) -> None:
    run_ranks(2, theirs_dynamic_sharding, sharding_type, names_module)


@pytest.mark.parametrize("optimizer", ["adagrad", None])
@pytest.mark.sampled(2)
def test_modules_of_theirs(optimizer: str | None) -> None:
    run_ranks(2, their_modules, "ebc", optimizer)


def test_what_cannot() -> None:
    run_ranks(2, refused)


def test_combined_optimizers() -> None:
    run_ranks(2, combined)


def test_optimizers_in_torchrecs_wrappers() -> None:
    run_ranks(2, wrapped_optimizers)
