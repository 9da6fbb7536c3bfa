"""In-backward optimizers: what is read from a parameter, what is refused, and the numbers of the row updates."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, ShardError, ranks, row_wise, table_wise
from planner import ShardingPlanner
from sharders import EmbeddingBagSharder
from sharders.embedding.lookup.given_optimizers import optimizer_of
from sharders.embedding.lookup.optimizers import OPTIMIZERS, OptimizerSpec, register_optimizer
from sharders.embedding.lookup.row_optimizer import RowOptimizer, Rows, StateTensor
from tests.equality import env_of
from tests.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript, FBGEMM's CPU build of what only GPUs have
    import torchrec.optim
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]


def test_spec_is_checked() -> None:
    with pytest.raises(ShardError, match="kind"):
        OptimizerSpec.make("shampoo")
    with pytest.raises(ShardError, match="momentum"):
        OptimizerSpec.make("sgd", momentum=0.9)


def test_param_group_is_fresh() -> None:
    spec = OptimizerSpec.make("sgd", lr=0.1)
    spec.param_group()["lr"] = 0.5
    assert spec.param_group()["lr"] == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torchrec.optim.RowWiseAdagrad, torch.optim.Adam])
def test_all_rows_as_the_dense_optimizer(cls: type, dtype: torch.dtype) -> None:
    """Where every row has a gradient, also a tiny one, the update is the optimizer's own."""
    torch.manual_seed(0)
    weights = torch.randn(5, 3, dtype=dtype)
    parameter = nn.Parameter(weights.clone())
    dense = cls([parameter], lr=0.1)
    _apply_optimizer_in_backward(cls, [parameter], {"lr": 0.1})
    spec = optimizer_of(parameter, "t")
    assert spec is not None
    optimizer = spec.optimizer
    state = {name: torch.zeros(tensor.shape(5, 3), dtype=dtype) for name, tensor in optimizer.state.items()}
    rows = torch.arange(5)
    for step in (1, 2, 3):
        grad = torch.randn(5, 3, dtype=dtype) * torch.tensor([1, 1e-3, 1e-7, 1e-8, 10], dtype=dtype).unsqueeze(1)
        parameter.grad = grad.clone()
        dense.step()
        count = torch.tensor(float(step), dtype=torch.float64)
        optimizer.update(Rows(weights, rows, grad, state, rows, spec.param_group(), count))
        torch.testing.assert_close(weights, parameter.data, rtol=1e-5, atol=1e-7)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, dense.state[parameter][name].view_as(tensor))


class SignSGD(torch.optim.SGD):
    """Another's optimizer: moves by the gradient's sign, and counts how often each row moved."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                p -= self.param_groups[0]["lr"] * p.grad.sign()
            self.state[p]["moves"] = self.state[p].get("moves", 0) + p.grad.abs().sum(1).ne(0)


def move_by_sign(rows: Rows) -> None:
    rows.write("moves", rows.read("moves") + 1)
    rows.descend(rows.grads_nD.sign())


SIGN_SGD = RowOptimizer(
    "sign_sgd",
    {"lr": 1e-3},
    move_by_sign,
    state={"moves": StateTensor(is_row_wise=True, dtype=torch.int64)},
    classes={f"{SignSGD.__module__}.SignSGD": {}},
)


def two_tables() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([nn.EmbeddingBag(7, 4, mode="sum"), nn.EmbeddingBag(5, 4, mode="sum")])


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = two_tables()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids) for table in self.tables], 1)


def steps_by_sign(model: nn.Module, batches: list[torch.Tensor], optimizer: Any) -> None:
    for ids in batches:
        (model(ids).square().sum() / 2).backward()
        optimizer.step()


PLAN = {"tables.0.weight": row_wise(), "tables.1.weight": table_wise(1)}


def planned_bytes(cls: type) -> torch.Tensor:
    """Of each rank."""
    module, planner = Both(), ShardingPlanner(batch_size=1)
    _apply_optimizer_in_backward(cls, list(module.parameters()), {"lr": 0.1})
    planner.plan(module, dmp.registry.default_sharders(), dmp.ShardingEnv.abstract((2,), ("dp",), "cpu"), pinned=PLAN)
    assert planner.report is not None
    return torch.tensor(planner.report.rank_bytes)


def trained_by_a_registered_one(batches: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    register_optimizer(SIGN_SGD)
    try:
        module, env = Both(), env_of("dp2")
        _apply_optimizer_in_backward(SignSGD, list(module.parameters()), {"lr": 0.1})
        model = DistributedModelParallel(module, env, plan=PLAN)
        steps_by_sign(model, [*batches[:, env.rank]], model.fused_optimizer)
        more = planned_bytes(SignSGD) - planned_bytes(torch.optim.SGD)
        return dmp.full_state_dict(model), dmp.full_optimizer_state_dict(model)["state"], more.tolist()
    finally:
        del OPTIMIZERS["sign_sgd"]


def test_another_optimizer_is_registered_in_a_few_lines() -> None:
    """It trains cut tables as the unsharded model, its state is there, and the planner counts its bytes."""
    batches = torch.randint(0, 5, (3, 2, 4, 2), generator=torch.Generator().manual_seed(0))
    oracle = Both()
    optimizer = SignSGD(oracle.parameters(), lr=0.1)
    for ids in batches:
        optimizer.zero_grad()
        steps_by_sign(oracle, [ids.flatten(0, 1)], optimizer)
    for weights, state, more in run_ranks(2, trained_by_a_registered_one, batches):
        for name, p in oracle.named_parameters():
            torch.testing.assert_close(weights[name], p.detach())
            assert torch.equal(state[name]["moves"], cast(torch.Tensor, optimizer.state[p]["moves"]))
        assert more == [8 * 4, 8 * (3 + 5)]  # 8 bytes of state for each row


def averaged_by_sign(batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    register_optimizer(SIGN_SGD)
    try:
        module, env = two_tables()[0], env_of("replicate2")
        _apply_optimizer_in_backward(SignSGD, list(module.parameters()), {"lr": 0.1})
        model = DistributedModelParallel(
            module, env, plan={"weight": table_wise(0)}, sharders=[EmbeddingBagSharder(sync_interval=2)]
        )
        steps_by_sign(model, [*batches[:, env.rank]], model.fused_optimizer)
        return model.state_dict()["weight"], model.fused_optimizer.state_dict()["state"]["weight"]["moves"]
    finally:
        del OPTIMIZERS["sign_sgd"]


def test_integer_state_is_not_averaged_with_the_weights() -> None:
    batches = torch.tensor([[[[0, 1]], [[2, 2]]], [[[0, 3]], [[2, 4]]]])
    (first, moves), (second, of_second) = run_ranks(2, averaged_by_sign, batches)
    assert torch.equal(first, second)
    assert (moves.tolist(), of_second.tolist()) == ([2, 1, 0, 1, 0, 0, 0], [0, 0, 2, 0, 1, 0, 0])


def test_frozen_tables_rest_while_weights_of_their_ids_learn() -> None:
    module = nn.EmbeddingBag(5, 4, mode="sum")
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(module, plan={"weight": row_wise()})
    before = model.weight.detach().clone()
    model.requires_grad_(False)
    weights = torch.ones(3, requires_grad=True)
    model(torch.tensor([1, 2, 3]), torch.tensor([0, 1]), weights).sum().backward()
    assert torch.equal(model.weight, before) and weights.grad is not None
    torch.testing.assert_close(weights.grad, before[1:4].sum(1))
    model.requires_grad_(True)
    model(torch.tensor([1, 2, 3]), torch.tensor([0, 1]), weights).sum().backward()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("cls", "is_said"), [(torch.optim.SGD, False), (torch.optim.Adagrad, True)])
def test_several_updates_in_a_pass_are_said(cls: type, is_said: bool) -> None:
    """One process makes one of the sum of two lookups' gradients, which of SGD alone is the same."""
    module, calls = nn.Embedding(5, 4), torch.tensor([[1, 2], [2, 3]])
    _apply_optimizer_in_backward(cls, module.parameters(), {"lr": 0.1})
    oracle = copy.deepcopy(module)
    oracle.weight = nn.Parameter(oracle.weight.detach())
    model, optimizer = DistributedModelParallel(module, plan={"weight": row_wise()}), cls(oracle.parameters(), lr=0.1)
    with mock.patch.object(ranks, "say_once") as said:
        for each in (model, oracle):
            each(calls[0]).square().sum().backward()
        optimizer.step(), optimizer.zero_grad()
        assert not said.called
        for each in (model, oracle):
            (each(calls[0]) * each(calls[1])).sum().backward()
        optimizer.step()
    assert said.called is is_said and torch.allclose(model.weight, oracle.weight) is not is_said


def test_two_calls_of_weighted_bags_are_as_fbgemms() -> None:
    """The backward of the second call is the first to update the row, which the first call's then reads."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    theirs = SplitTableBatchedEmbeddingBagsCodegen([(2, 4, *where)], optimizer=EmbOptimType.EXACT_SGD)
    theirs.set_learning_rate(0.5)
    theirs.split_embedding_weights()[0].fill_(1.0)
    module = nn.EmbeddingBag(2, 4, mode="sum", _weight=torch.ones(2, 4))
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    ours = DistributedModelParallel(module, plan={"weight": row_wise()})
    gradients = []
    for bags in (theirs, lambda ids, starts, weights: ours(ids, starts[:-1], weights)):
        weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
        sum(bags(torch.tensor([0]), torch.tensor([0, 1]), each).sum() for each in weights).backward()
        gradients.append([each.grad for each in weights])
    assert gradients[0] == gradients[1] == [torch.tensor([2.0]), torch.tensor([4.0])]


def penalised(how: str) -> None:
    """A loss that reaches the weights of a table, which is updated in the backward pass, besides its lookups."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(6, 4, mode="sum")
    _apply_optimizer_in_backward(torch.optim.SGD, [bag.weight], {"lr": 0.1})
    model = DistributedModelParallel(bag, env_of("dp2"), plan={"weight": row_wise()})
    if how == "copied":
        model = copy.deepcopy(model)
    if how == "resharded":
        model.reshard({"weight": row_wise([1, 0])})
    for factor in (0.0, 0.1):  # the first, which some have so that every parameter is reached, changes nothing
        penalty = sum(factor * p.square().sum() for p in model.parameters())
        (model(torch.arange(6).view(2, 3)).sum() + penalty).backward()
        assert factor == 0.0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", ["wrapped", "copied", "resharded"])
def test_a_penalty_on_weights_that_would_be_lost_is_refused(how: str) -> None:
    for error in run_ranks(2, penalised, how, expect=ShardError):
        assert "a gradient came to the parameter 'weight' itself" in str(error)
