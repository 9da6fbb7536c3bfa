"""Tables that something of the model keeps beside their places: a list, a dict, an object that made them. The sharded
one is put there too; where that cannot be, the table stays whole, and who keeps it is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    full_state_dict,
    row_wise,
    table_wise,
    to_unsharded,
)
from dmp.plans.check import check_plan
from dmp.plans.kept_places import rebind
from dmp.plans.remarks import remark
from planner import ShardingPlanner
from sharders import default_sharders
from tests.ranks import mesh, run_ranks

PLAN = {"tables.a.weight": row_wise(), "tables.b.weight": table_wise(1)}


class Feature:
    """A column of a batch, which makes its table and keeps hold of it."""

    def __init__(self, rows: int) -> None:
        self.embed = nn.EmbeddingBag(rows, 8, mode="sum")


@dataclass(frozen=True)
class Frozen:
    kept: dict[str, nn.Module] = field(default_factory=dict)


class ByFeature(nn.Module):
    """Looks `a` up by its place, and `b` where it is kept."""

    def __init__(self, keep: Callable[[dict[str, nn.Module]], Any], get: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        tables = {"a": Feature(100).embed, "b": Feature(60).embed}
        self.tables, self.kept, self.get = nn.ModuleDict(tables), keep(tables), get

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.tables["a"](ids), self.get(self.kept)(ids % 60)], 1)


def _features(tables: dict[str, nn.Module]) -> dict[str, Feature]:
    found = {name: Feature(1) for name in tables}
    for name, table in tables.items():
        found[name].embed = table  # type: ignore[assignment]
    return found


WAYS: dict[str, tuple[Callable[[dict[str, nn.Module]], Any], Callable[[Any], nn.Module]]] = {
    "features": (_features, lambda kept: kept["b"].embed),
    "a list": (lambda tables: [*tables.values()], lambda kept: kept[1]),
    "a dict": (dict, lambda kept: kept["b"]),
    "an attribute of an object": (lambda tables: Frozen(dict(tables)), lambda kept: kept.kept["b"]),
    "features of a configuration": (
        lambda tables: SimpleNamespace(columns=SimpleNamespace(user=_features(tables))),
        lambda kept: kept.columns.user["b"].embed,
    ),
}


def made(way: str) -> ByFeature:
    torch.manual_seed(0)
    return ByFeature(*WAYS[way])


def train(model: Any, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(ids).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_training(way: str) -> None:
    ids, plain = torch.randint(100, (8, 3), generator=torch.Generator().manual_seed(1)), made(way)
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(made(way), env, plan=PLAN)
    mine = ids.chunk(2)[env.rank]

    def equal() -> None:
        for name, value in full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(model(mine), plain(ids).chunk(2)[env.rank])

    train(plain, ids)
    train(model, mine)
    equal()
    for other in (to_unsharded(model), copy.deepcopy(model).module):
        assert other.get(other.kept) is other.tables["b"] is not model.module.tables["b"]
    torch.testing.assert_close(to_unsharded(model)(ids), plain(ids))
    model.reshard({**PLAN, "tables.b.weight": column_wise([1, 0])})
    assert model.module.get(model.module.kept) is model.module.tables["b"]
    train(plain, ids)
    train(model, mine)
    equal()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_the_sharded_one_is_kept_in_its_place(way: str) -> None:
    run_ranks(2, check_training, way)


@pytest.mark.parametrize("way", WAYS)
def test_they_are_planned_as_tables(way: str) -> None:
    plan = ShardingPlanner().plan(made(way), default_sharders(), ShardingEnv.abstract((2,), ("dp",)))
    assert sorted(plan) == ["tables.a.weight", "tables.b.weight"]


def test_where_that_cannot_be_who_keeps_it_is_named_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = ByFeature(lambda tables: Frozen({"b": (tables["b"],)}), lambda kept: kept.kept["b"][0])  # type: ignore[dict-item]
    env, name = ShardingEnv.abstract((2,), ("dp",)), "tables.b.weight"
    assert sorted(ShardingPlanner().plan(model, default_sharders(), env)) == ["tables.a.weight"]
    with pytest.raises(PlanError, match=r"ByFeature.kept \(Frozen.kept\) keeps it beside.*Let go of it there"):
        ShardingPlan(PLAN).validate(model, env, default_sharders())
    with caplog.at_level("INFO", "dmp"):
        remark(check_plan({"tables.a.weight": ShardingPlan(PLAN)["tables.a.weight"]}, model, default_sharders(), env))
    (said,) = [text for text in caplog.messages if name in text]
    assert "(Frozen.kept) keeps it beside its place in the model" in said and "Let go of it" in said
    model.kept = None
    assert sorted(ShardingPlanner().plan(model, default_sharders(), env)) == sorted(PLAN)


def test_a_weight_that_may_be_read_where_it_is_kept_stays_whole() -> None:
    class Reads(ByFeature):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tables["a"](ids) @ self.kept["b"].embed.weight.T

    model = Reads(*WAYS["features"])
    plan = ShardingPlanner().plan(model, default_sharders(), ShardingEnv.abstract((2,), ("dp",)))
    assert "tables.b.weight" not in plan


def lookup_of(held: nn.Module, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What was made of a table before it was wrapped with its model, and knows nothing of that."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.pair = held, (held,)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids) if way == "a submodule" else self.pair[0](ids)

    return {"a function": lambda ids: held(ids), "itself": held}.get(way) or Sampler()


def check_outside(way: str) -> None:
    ids, env = torch.randint(60, (8, 3)), ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    losses, models = [], (made("features"), made("features"))
    lookups = [lookup_of(m.tables["b"], way) for m in models]
    called: list[torch.Size] = []
    handles = [m.tables["b"].register_forward_hook(lambda m, x, out: called.append(out.shape)) for m in models]
    wrapped = DistributedModelParallel(models[0], env, plan=PLAN)
    for model, lookup, mine in ((wrapped, lookups[0], ids.chunk(2)[env.rank]), (models[1], lookups[1], ids)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            loss = (model(mine) * lookup(mine).repeat(1, 2)).sum(1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(lookup(ids))
    assert called == [(4, 8)] * 6 + [(8, 8)] * 8
    torch.testing.assert_close(*losses)
    for name, value in full_state_dict(wrapped).items():
        torch.testing.assert_close(value, models[1].state_dict()[name], msg=lambda m, name=name: f"{name}: {m}")
    for handle in handles:
        handle.remove()
    wrapped(ids.chunk(2)[env.rank])
    assert len(called) == 14


@pytest.mark.parametrize("way", ["a submodule", "a tuple", "a function", "itself"])
@pytest.mark.sampled(2)
def test_who_holds_a_table_from_before_holds_the_sharded_one(way: str) -> None:
    """They looked up, and trained, what nobody else had any more; in silence."""
    run_ranks(2, check_outside, way)


def test_what_a_sharded_module_keeps_is_its_own() -> None:
    """A sharder may keep the module that it was given."""
    old, new, model = nn.Embedding(4, 2), nn.Identity(), nn.Module()
    new.made_of, model.new, model.kept = [old], new, [None, *range(2000), old]  # type: ignore[assignment]
    rebind(model, {old: new})
    assert new.made_of == [old] and model.kept[-1] is new  # type: ignore[index]
