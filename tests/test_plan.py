"""`ShardingPlan`: immutable data that is read, printed, compared and checked against a model."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    data_parallel,
    plan_parameters,
    rectangles,
    row_wise,
    table_row_wise,
    table_wise,
)
from sharders import EmbeddingBagSharder, EmbeddingSharder
from tests.ranks import mesh, run_ranks

ENV = ShardingEnv.abstract((4,), ("dp",), "cpu")
SHARDERS = [EmbeddingBagSharder(), EmbeddingSharder()]


class Net(nn.Module):
    """Two tables, one under two names, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(10, 8)
        self.items = nn.EmbeddingBag(6, 8)
        self.again = self.items
        self.over = nn.Linear(8, 1)


PLAN = ShardingPlan({"users.weight": row_wise(), "items.weight": table_wise(1)})


def test_is_immutable() -> None:
    with pytest.raises(TypeError):
        PLAN["users.weight"] = row_wise()  # type: ignore[index]
    with pytest.raises(TypeError):
        del PLAN["users.weight"]  # type: ignore[attr-defined]
    given = {"a": row_wise()}
    plan = ShardingPlan(given)
    given["a"] = table_wise(0)
    assert plan["a"].layout == row_wise()


def test_equality_and_hash_are_by_content() -> None:
    other = ShardingPlan({"items.weight": ParameterSharding(table_wise(1)), "users.weight": row_wise()})
    assert other == PLAN and hash(other) == hash(PLAN) and other.digest == PLAN.digest and other is not PLAN
    assert {PLAN: 1}[other] == 1
    assert ShardingPlan({"users.weight": row_wise(), "items.weight": table_wise(0)}) != PLAN
    assert copy.deepcopy(PLAN) == PLAN == pickle.loads(pickle.dumps(PLAN))
    a, b = ([Shard((0, 0), (2, 2), rank)] for rank in (0, 1))
    assert ShardingPlan({"t": rectangles(a)}).digest != ShardingPlan({"t": rectangles(b)}).digest


def _of_a_wrapped_model() -> None:
    """It holds its mesh, whose process groups nobody can copy."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    plan = DistributedModelParallel(Net(), env, plan=PLAN).plan
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
    assert copy.deepcopy({"plan": plan})["plan"].setting is plan.setting is not None


def test_one_in_force_is_copied_and_pickled() -> None:
    run_ranks(2, _of_a_wrapped_model)


def test_is_a_mapping() -> None:
    assert PLAN["users.weight"].layout == row_wise()
    assert set(PLAN) == {"users.weight", "items.weight"} and len(PLAN) == 2 and "users.weight" in PLAN
    with pytest.raises(KeyError):
        PLAN["nobody"]
    assert ShardingPlan() == ShardingPlan({}) and len(ShardingPlan()) == 0


def test_json_round_trip() -> None:
    plan = ShardingPlan({**PLAN, "t": rectangles([Shard((0, 0), (2, 3), 1)]), "c": column_wise([0, 0], widths=[1, 2])})
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert json.loads(PLAN.to_json()) == {
        "version": 1,
        "parameters": {
            "items.weight": {"layout": "table_wise", "rank": 1},
            "users.weight": {"layout": "row_wise"},
        },
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not a plan", "no JSON"]),
        ("[]", ["not a plan", "got []"]),
        ("null", ["not a plan", "got None"]),
        ('{"a": {"b": 1}}', ["not a plan", "got {'a': {'b': 1}}"]),
        ('{"parameters": {}}', ["not a plan", "version"]),
        ('{"version": 1, "parameters": []}', ["not a plan"]),
        ('{"version": 2, "parameters": {}}', ["version 2", "version 1"]),
        ('{"version": "1", "parameters": {}}', ["version '1'", "version 1"]),
        ('{"version": 1, "parameters": {"t": {"layout": "diagonal"}}}', ["'t'", "'diagonal'", "row_wise"]),
        ('{"version": 1, "parameters": {"t": {"layout": "table_wise", "rank": -1}}}', ["'t'", "-1"]),
        ('{"version": 1, "parameters": {"t": {"layout": "table_wise", "row": 1}}}', ["'t'", "row"]),
        ('{"version": 1, "parameters": {"t": "row_wise"}}', ["'t'", "'row_wise'"]),
        ('{"version": 1, "parameters": {"t": 3}}', ["'t'", "3"]),
        ('{"version": 1, "parameters": {"t": {"layout": ["x"]}}}', ["'t'", "['x']"]),
    ],
)
def test_bad_json(text: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        ShardingPlan.from_json(text)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("mapping", [{"t": 1}, {"t": "row_wise"}, {"t": row_wise}, {3: row_wise()}, {"t": None}])
def test_bad_entries(mapping: Any) -> None:
    with pytest.raises(PlanError) as error:
        ShardingPlan(mapping)
    assert repr(next(iter(mapping))) in str(error.value)


def test_str_is_a_table() -> None:
    assert str(PLAN).splitlines() == [
        "parameter     layout",
        "------------  ------------------------",
        "items.weight  table_wise(1)",
        "users.weight  row_wise()",
    ]
    assert "no sharded parameters" in str(ShardingPlan())


def test_diff() -> None:
    other = ShardingPlan({"users.weight": row_wise(), "items.weight": table_wise(0), "more": data_parallel()})
    assert [str(change) for change in PLAN.diff(other)] == [
        "items.weight: table_wise(1) -> table_wise(0)",
        "more: (none) -> data_parallel()",
    ]
    assert [str(change) for change in other.diff(PLAN)][1] == "more: data_parallel() -> (none)"
    assert PLAN.diff(PLAN) == []
    assert PLAN.diff({"users.weight": row_wise(), "items.weight": table_wise(1)}) == []  # plain dicts are plans too


def test_merged() -> None:
    assert PLAN.merged({"items.weight": table_wise(3)})["items.weight"].layout == table_wise(3)
    assert PLAN["items.weight"].layout == table_wise(1)


def test_validate_accepts_what_fits() -> None:
    PLAN.validate(Net(), ENV, SHARDERS)
    PLAN.validate(Net(), ENV, iter(SHARDERS))
    ShardingPlan({"users.weight": row_wise(), "again.weight": table_wise(1)}).validate(Net(), ENV, SHARDERS)
    both = {"users.weight": row_wise(), "again.weight": table_wise(1), "items.weight": table_wise(1)}
    ShardingPlan(both).validate(Net(), ENV, SHARDERS)
    assert set(plan_parameters(Net(), SHARDERS)) == {"users.weight", "items.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"user.weight": row_wise()}, ["'user.weight'", "does not have", "did you mean 'users.weight'"]),
        ({"zzz": row_wise()}, ["'zzz'", "'users.weight'", "'items.weight'"]),
        ({"over.weight": row_wise()}, ["'over.weight'", "no sharder takes"]),
        ({"users.weight": table_wise(4)}, ["'users.weight'", "table_wise(4)", "rank 4", "0..3"]),
        ({"users.weight": table_row_wise(0)}, ["'users.weight'", "two shard axes"]),
        ({"users.weight": rectangles([Shard((0, 0), (5, 8), 0)])}, ["'users.weight'", "40 of 80"]),
        ({"again.weight": table_wise(2)}, ["table_wise(2)", "table_wise(1)", "another of its names"]),
    ],
)
def test_validate_names_what_does_not_fit(change: dict[str, Any], words: list[str]) -> None:
    module = Net()
    before = dict(module.named_modules())
    with pytest.raises(PlanError) as error:
        PLAN.merged(change).validate(module, ENV, SHARDERS)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert error.value.table in {*change, *PLAN}
    assert dict(module.named_modules()) == before


def test_validate_names_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"no entry for 'users\.weight'.*data_parallel\(\).*pinned") as error:
        ShardingPlan({"items.weight": table_wise(0)}).validate(Net(), ENV, SHARDERS)
    assert error.value.table == "users.weight"
    with pytest.raises(PlanError, match=r"'users\.weight', 'items\.weight'"):
        ShardingPlan().validate(Net(), ENV, SHARDERS)


def test_a_planned_module_without_sharder_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"'users\.weight', which no sharder takes"):
        ShardingPlan({"users.weight": row_wise()}).validate(Net(), ENV, [EmbeddingBagSharder()])
    with pytest.raises(PlanError, match=r"no sharder takes"):
        DistributedModelParallel(Net(), plan=PLAN, sharders=[])
    for odd in ({"sparse": True}, {"max_norm": 1.0}, {"mode": "max"}):
        reason = "mode='max'" if "mode" in odd else "{}={}".format(*next(iter(odd.items())))
        with pytest.raises(PlanError, match=rf"'0\.weight', which no sharder takes \({reason}\)"):
            DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(4, 4, **odd)), plan={"0.weight": row_wise()})
    tied = nn.ModuleList([nn.Embedding(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    with pytest.raises(PlanError, match=r"'0\.weight', which no sharder takes \(tied to '1\.weight'\)"):
        DistributedModelParallel(tied, plan={"0.weight": row_wise()})


def test_a_tied_table_belongs_to_the_data_parallel_part() -> None:
    module = Net()
    module.over = nn.Linear(8, 10)
    module.over.weight = module.users.weight
    with pytest.raises(PlanError, match=r"'users\.weight'.*tied"):
        PLAN.validate(module, ENV, SHARDERS)
    ShardingPlan({"items.weight": row_wise()}).validate(module, ENV, SHARDERS)


class OneKind:
    """Runs row-wise only, and says nothing of others."""

    module_type = nn.Embedding

    def parameters(self, module: nn.Module) -> Any:
        return EmbeddingSharder().parameters(module)

    def layouts(self, info: Any, env: ShardingEnv) -> Any:
        return [row_wise()]

    def shard(self, module: nn.Module, plan: Any, env: ShardingEnv, device: torch.device) -> nn.Module:
        raise AssertionError("not reached")


def test_validate_asks_the_sharder() -> None:
    module = nn.Sequential(nn.Embedding(10, 8))
    ShardingPlan({"0.weight": row_wise([1, 2])}).validate(module, ENV, [OneKind()])
    with pytest.raises(PlanError, match=r"'0\.weight' = table_wise\(0\): OneKind cannot run it.*offers row_wise"):
        ShardingPlan({"0.weight": table_wise(0)}).validate(module, ENV, [OneKind()])


def test_a_dict_is_a_plan() -> None:
    model = DistributedModelParallel(Net(), plan={"users.weight": row_wise(), "again.weight": table_wise(0)})
    assert isinstance(model.plan, ShardingPlan)
    assert dict(model.plan) == {
        "users.weight": ParameterSharding(row_wise()),
        "items.weight": ParameterSharding(table_wise(0)),
    }
    assert model.module.again is model.module.items
    with pytest.raises(PlanError, match=r"expected a ShardingPlan or a dict.*got list"):
        DistributedModelParallel(Net(), plan=["users.weight"])  # type: ignore[arg-type]
