"""`model.reshard(plan)` where there is more than tables: split dense weights, and a stranger's sharded module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    FusedParameter,
    Layout,
    PlanError,
    ShardError,
    ShardingEnv,
    column_wise,
    full_state_dict,
    replicate,
    row_wise,
    table_wise,
    to_unsharded,
)
from sharders import EmbeddingBagCollectionSharder
from tests import state_jobs
from tests import test_mixed as mixed
from tests.ranks import mesh, run_ranks
from tests.test_plugin_parameters import Biased, BiasedSharder, ShardedBiased

ITEM, USER = "items.embeddings.item.weight", "users.embedding_bags.user.weight"
PLANS: list[dict[str, Layout]] = [
    {ITEM: row_wise(), USER: table_wise(1)},
    {ITEM: table_wise(0), USER: row_wise()},
    {ITEM: row_wise([1, 0])},
]


# ---- in the workers ----


def beside_a_transformer(name: str, optimizer: str | None) -> None:
    """As one process, whatever the tables' plan: weights that are split, clipping, copies, a plain module."""
    env, oracle = mixed.env_of(name), mixed.make(optimizer)
    model = DistributedModelParallel(mixed.make(optimizer), env, plan=PLANS[0])
    plain, mine = mixed._dense(oracle), mixed._dense(model)
    for step, plan in enumerate([PLANS[1], PLANS[2], PLANS[0]]):
        batches = [mixed.make_batch(r, step) for r in range(env.data_size)]
        losses = [mixed.loss_of(oracle, b) for b in batches]
        for one, total in ((plain, sum(losses) / len(losses)), (mine, mixed.loss_of(model, batches[env.data_rank]))):
            one.zero_grad()
            total.backward()  # type: ignore[union-attr]
            one.step()
        dense = {name: p for name, p in model.named_parameters() if name not in (ITEM, USER)}
        model.reshard(plan, mine)
        assert all(p is dense[name] for name, p in model.named_parameters() if name in dense)
        for each in (full_state_dict(model), full_state_dict(copy.deepcopy(model)), to_unsharded(model).state_dict()):
            for key, value in oracle.state_dict().items():
                torch.testing.assert_close(each[key], value, atol=1e-5, rtol=1e-5, msg=f"{key} differs")
    in_force = {key: entry for key, entry in model.plan.items() if key not in (ITEM, USER)}
    assert model.reshard({**in_force, ITEM: column_wise([0, 1])}, mine).moved == (ITEM,)
    with pytest.raises(PlanError, match=r"head\.weight.*layouts of tables alone: save_checkpoint"):
        model.reshard({"head.weight": row_wise()})
    if env.axes("tensor"):
        with pytest.raises(PlanError, match="it is colwise"):
            model.reshard({"layers.0.attention.wq.weight": replicate()})


class Tokens(nn.Module):
    """A stranger's module in two places, between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 6)
        self.experts = Biased(5, 6, 3)
        self.same = self.experts

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        x = self.inner(tokens)
        return self.experts(x, expert) + self.same(x, (expert + 1) % 5)


def a_strangers_module() -> None:
    """Made again by its sharder; what it does not name stays, and the old one says that it is no longer there."""
    env = ShardingEnv.from_mesh(mesh((2,)))
    plain, model = (
        Tokens(),
        DistributedModelParallel(Tokens(), env, sharders=[BiasedSharder()], plan={"experts.weight": row_wise()}),
    )
    both = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, model)]
    old, bias = model.module.experts, model.module.experts.bias
    for step, layout in enumerate([table_wise(1), row_wise([1, 0]), table_wise(0)]):
        torch.manual_seed(step)
        tokens, expert = torch.randn(8, 4), torch.randint(0, 5, (8,))
        own = slice(4 * env.rank, 4 * env.rank + 4)
        for m, part, optimizer in ((plain, slice(None), both[0]), (model, own, both[1])):
            optimizer.zero_grad()
            m(tokens[part], expert[part]).square().mean().backward()
            optimizer.step()
        # The entry under the other name of the module is as good.
        assert model.reshard({"same.weight": layout}, both[1]).moved == ("experts.weight",)
        for name, value in full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-5, rtol=1e-5, msg=name)
    assert model.module.experts is model.module.same and model.module.experts is not old
    assert model.module.experts.bias is bias and model.module.experts.scale == 0.5
    with pytest.raises(ShardError, match="has put another module at 'experts'"):
        old(tokens, expert)


def averages_of_copies() -> None:
    """Copies of tables that are averaged every second update still are at the same steps."""
    env, runs = ShardingEnv.from_mesh(mesh((2, 2), ("replicate", "shard"))), []
    for changes in (True, False):
        sharders = [EmbeddingBagCollectionSharder(sync_interval=2)]
        plan = state_jobs.table_plan("row_wise", env)
        model = DistributedModelParallel(state_jobs.make("sgd"), env, plan=plan, sharders=sharders)
        dense = state_jobs.dense_optimizer(model, "sgd")
        for step in range(5):
            state_jobs.train(model, dense, range(step, step + 1), env)
            if changes and step in (0, 2):
                model.reshard(state_jobs.table_plan("table_wise" if step else "column_wise", env))
        runs.append(full_state_dict(model))
    torch.testing.assert_close(*runs)


class Fused(ShardedBiased):
    """One that says it updates its weight itself."""

    def fused_parameters(self) -> Iterator[FusedParameter]:
        yield FusedParameter("weight", self.weight, {"lr": 0.1}, dict)


class FusedSharder(BiasedSharder):
    made: Any = Fused


class WithMap(ShardedBiased):
    """One that has cut a buffer beside its weight."""

    def chunked_state(self) -> Any:
        return {
            **super().chunked_state(),
            "scale": ChunkedTensor((1,), [self.scale][self._env.rank :], [(0,)][self._env.rank :]),
        }


class WithMapSharder(BiasedSharder):
    made: Any = WithMap


def ones_that_cannot() -> None:
    cannot(FusedSharder(), r"'experts' \(Fused, made by FusedSharder\) cannot .*updates parameters in")
    cannot(WithMapSharder(), "has cut 'scale' too, which is no parameter")


def cannot(sharder: BiasedSharder, why: str) -> None:
    model = DistributedModelParallel(
        Tokens(), sharders=[sharder], plan={"experts.weight": row_wise()}, init_parameters=False
    )
    before = full_state_dict(model)
    with pytest.raises(ShardError, match=why):
        model.reshard({"experts.weight": table_wise(0)})
    assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
    assert model.plan["experts.weight"].layout == row_wise()


# ---- in the parent ----


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("shard2", "adagrad"),
        ("tp2", None),
        pytest.param("shard2xtp2", "rowwise_adagrad", marks=pytest.mark.slow),
        pytest.param("replicate2xshard2", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_beside_a_transformer(name: str, optimizer: str | None) -> None:
    run_ranks(4 if "x" in name else 2, beside_a_transformer, name, optimizer)


@pytest.mark.parametrize("job", [a_strangers_module, ones_that_cannot], ids=lambda job: job.__name__)
def test_strangers(job: Any) -> None:
    run_ranks(2, job)


def test_averages_of_copies() -> None:
    run_ranks(4, averages_of_copies)


def test_copies_that_keep_the_old_plan_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = DistributedModelParallel(torch.nn.EmbeddingBag(4, 2), plan={"weight": row_wise()})
    average = torch.optim.swa_utils.AveragedModel(model)
    model.reshard({"weight": table_wise(0)})
    assert "1 of its copies have the old one" in caplog.text
    caplog.clear()
    average.module.reshard({"weight": table_wise(0)})
    assert not caplog.text
