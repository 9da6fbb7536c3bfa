"""What sharders take is found once in a wrap, and planner, check and wrapper read the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import sharders
from dmp import (
    DistributedModelParallel,
    Found,
    Layout,
    ParameterInfo,
    ShardingEnv,
    ShardingPlan,
    colwise,
    default_sharders,
    replicate,
    row_wise,
    rowwise,
)
from dmp.plans import find
from planner import ShardingPlanner
from sharders import EmbeddingBagSharder

TP2 = ShardingEnv.abstract((2,), ("tp",))


class Placement:
    """Splits a Linear by columns."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.layouts = layouts

    def apply(self, model: nn.Module) -> None:
        """Nothing: there is one rank."""


class Linears:
    """A model sharder that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Layout]] = []

    def place(self, model: nn.Module, given: Mapping[str, Layout], env: ShardingEnv) -> Placement:
        self.asked.append(dict(given))
        return Placement({"1.weight": given.get("1.weight", colwise())} if env.tensor_size > 1 else {})


class Bags(EmbeddingBagSharder):
    """A module sharder that does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        self.asked += 1
        return super().parameters(module)


class DocumentedSignature(ShardingPlanner):
    """Overrides `plan` as it is documented."""

    def plan(self, module: nn.Module, sharders: Any, env: ShardingEnv, pinned: Any = None) -> ShardingPlan:  # type: ignore[override]
        return super().plan(module, sharders, env, pinned)


def model() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum"), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 1),
        ({"planner": ShardingPlanner()}, 1),
        ({"plan": {"0.weight": row_wise()}}, 1),
        ({"planner": DocumentedSignature()}, 2),
    ],
)
def test_a_wrap_looks_once(options: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    readers = find.find_readers
    monkeypatch.setattr(find, "find_readers", lambda *asked: looks.append(1) or readers(*asked))
    dense, tables = Linears(), Bags()
    wrapped = DistributedModelParallel(model(), sharders=[dense, tables], **options)
    assert set(wrapped.plan) == {"0.weight"} and type(wrapped.module[0]) is not nn.EmbeddingBag  # type: ignore[index]
    assert (len(dense.asked), tables.asked, len(looks)) == (times, times, times)


def test_a_planner_that_takes_what_is_found_gets_it() -> None:
    class Takes:
        def collective_plan(
            self, module: nn.Module, sharders: Any, env: Any, pinned: Any = None, found: Any = None
        ) -> Any:
            self.found = found
            return {name: row_wise() for name in found.sites.parameters()}

    planner, module = Takes(), model()
    assert set(DistributedModelParallel(module, planner=planner).plan) == {"0.weight"}
    assert planner.found.module is module and planner.found.env == ShardingEnv.single()


def test_what_is_known_is_asked_again_only_for_another_wish() -> None:
    module, dense = model(), Linears()
    known = Found.of(module, [dense], TP2)
    for given in ({}, {"1.weight": colwise()}, {"1.weight": colwise(), "1.bias": replicate()}):
        assert Found.of(module, [dense], TP2, given, known) is known
    assert Found.of(module, [dense], TP2, {"1.weight": rowwise()}, known).split == {"1.weight": rowwise()}
    assert Found.of(model(), [dense], TP2, {}, known) is not known
    assert Found.of(module, [dense], ShardingEnv.abstract((4,), ("tp",)), {}, known) is not known
    assert len(dense.asked) == 4


def test_there_is_one_rule_of_default_sharders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharders.default_sharders is default_sharders
    module_types = [s.module_type for s in default_sharders() if not hasattr(s, "place")]
    assert nn.EmbeddingBag in module_types and len(module_types) == 8
    for name in ("torchrec", "torchrec.modules.embedding_modules"):  # as before anybody has imported it
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    assert Found.of(model(), default_sharders(), ShardingEnv.single()).sites.parameters().keys() == {"0.weight"}
    assert torch.nn.EmbeddingBag in [s.module_type for s in default_sharders() if not hasattr(s, "place")]
