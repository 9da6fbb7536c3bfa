"""Frozen tables are planned as what they are: looked up, never updated, with neither gradient nor optimizer state."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dmp import ParameterInfo, PlanError, ShardingEnv, ShardingPlan, plan_parameters
from planner import PlanReport, ShardingPlanner, Topology
from planner.costs.cost_model import BACKWARD, GRADIENT, GRADIENT_OUTER, SYNC, CostModel
from planner.costs.protocol import OF_GRADIENTS, ShardTable, setups_of
from planner.costs.step import whole
from sharders import EmbeddingBagSharder
from sharders.embedding.lookup.optimizers import OptimizerSpec
from tests.planner_bags import BagSharder, bags

ENV = ShardingEnv.abstract((2, 4), ("host", "local"))
MACHINE = Topology(1e10, 1e12, 1e13, (5e10, 4e11), 1e-5)
SHAPES = ((1_000_000, 64),) * 4


def planned(frozen: int, rank_bytes: float = 1e10, only: tuple[str, ...] | None = None) -> ShardingPlan:
    """Of tables without an optimizer in the backward pass, of which the first so many are frozen."""
    module = bags(*SHAPES)
    for table in list(module.values())[:frozen]:
        table.requires_grad_(False)
    topology = Topology(rank_bytes, 2.5e12, 6e13, (5e10, 4.5e11), 2e-5, reserved_fraction=0.0)
    return ShardingPlanner(topology, batch_size=512).plan(module, [BagSharder(None, only)], ENV)


def report_of(plan: ShardingPlan) -> PlanReport:
    assert isinstance(plan.report, PlanReport)
    return plan.report


@pytest.mark.parametrize("only", [("row_wise",), ("table_wise",), ("data_parallel",), None])
def test_frozen_tables_pay_nothing_for_gradients(only: tuple[str, ...] | None) -> None:
    trained, frozen = (report_of(planned(n, only=only)) for n in (0, 4))
    of_gradients = [i for i, phase in enumerate(frozen.phases) if phase in OF_GRADIENTS]
    assert len(of_gradients) == 3
    assert not frozen.rank_seconds[:, of_gradients].any() and trained.rank_seconds[:, of_gradients].any()
    assert frozen.lower_bound <= frozen.step_seconds < trained.step_seconds


def test_they_need_room_for_their_weights_alone() -> None:
    weights = sum(rows * dim * 4 for rows, dim in SHAPES) / ENV.size
    with pytest.raises(PlanError):
        planned(0, 1.5 * weights)
    plan = planned(4, 1.5 * weights)
    assert weights <= report_of(plan).rank_bytes.max() < 1.5 * weights
    assert report_of(plan).notes == ("4 tables are frozen, and planned without gradients and optimizer state",)


def test_only_trained_ones_count_among_those_without_an_optimizer() -> None:
    """Adam's state has no room, plain gradients have: what is said of that is of the trained tables."""
    weights = sum(rows * dim * 4 for rows, dim in SHAPES) / ENV.size
    plan = planned(3, 1.7 * weights)
    assert any("1 tables have no optimizer" in note or "1 table has no" in note for note in report_of(plan).notes)


def test_the_wrapper_says_it_for_every_sharder() -> None:
    """`BagSharder` says nothing of it."""
    module = bags((100, 8), (200, 8))
    module["t0"].requires_grad_(False)
    infos = {name: info for name, (_, info) in plan_parameters(module, [BagSharder(None)]).items()}
    assert not infos["t0.weight"].trained and infos["t0.weight"].state_bytes == (0, 0)
    assert infos["t1.weight"].trained and infos["t1.weight"].state_bytes is None


def test_a_sharder_that_updates_what_is_frozen_is_believed() -> None:
    """As TorchRec's, whose tables keep the state of their optimizer."""
    module = bags((100, 8)).requires_grad_(False)
    (info,) = (info for _, info in plan_parameters(module, [BagSharder("adam")]).values())
    assert info.trained and info.state_bytes == (8, 0)


@pytest.mark.parametrize("has_own", [False, True])
def test_ours_give_a_frozen_table_no_optimizer(has_own: bool) -> None:
    module = nn.EmbeddingBag(100, 8, mode="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its first import
        from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    if has_own:
        apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    module.requires_grad_(False)
    sharder = EmbeddingBagSharder(optimizer=OptimizerSpec.make("adagrad", lr=0.1))
    (info,) = (info for _, info in plan_parameters(module, [sharder]).values())
    assert not info.trained and info.optimizer is None and info.state_bytes == (0, 0)


def test_set_ups_of_gradients_are_paid_where_one_table_is_trained() -> None:
    of_gradients = [phase in OF_GRADIENTS for phase in CostModel().phases]
    info = ParameterInfo((5000, 64), torch.float32, "table")
    frozen = replace(info, trained=False)
    paid = setups_of(CostModel(), ENV, MACHINE, [frozen, info])
    np.testing.assert_array_equal(paid, setups_of(CostModel(), ENV, MACHINE, [info, info]))
    without = setups_of(CostModel(), ENV, MACHINE, [frozen, frozen])
    np.testing.assert_array_equal(without, paid * ~np.array(of_gradients))
    assert paid[:, of_gradients].any()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_a_frozen_shard_costs_what_a_trained_one_does_but_for_gradients(
    replicated: bool, optimizer: str | None
) -> None:
    def costs(trained: bool) -> tuple[np.ndarray, np.ndarray]:
        info = ParameterInfo((5000, 64), torch.float32, "table", optimizer, state_bytes=(0, 0), trained=trained)
        shard = whole(info, 2.0)._replace(replicated=replicated)
        return CostModel().costs(ShardTable.of([shard]), ENV, MACHINE, 512)

    of_gradients = [GRADIENT_OUTER, GRADIENT, BACKWARD, SYNC]
    for frozen, trained in zip(costs(False), costs(True), strict=True):
        assert not frozen[0, of_gradients].any()
        rest = [i for i in range(len(frozen[0]) - 1) if i not in of_gradients]
        np.testing.assert_array_equal(frozen[0, rest], trained[0, rest])
        assert frozen[0, -1] <= trained[0, -1]
