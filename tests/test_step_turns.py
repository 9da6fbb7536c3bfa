"""A step that one rank alone passes over, or makes with another learning rate, is told."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from dmp import DistributedModelParallel, RanksError, ShardingEnv, full_state_dict, row_wise, save_checkpoint
from tests.ranks import mesh, run_ranks
from tests.test_survival import mortal_ranks


class Net(nn.Module):
    """A table, or a weight in its place, and a head."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_table = table
        self.table = nn.EmbeddingBag(12, 4, mode="sum") if table else nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids if self.is_table else ids.float() / 12)
        for layer in self.layers:
            x = x + layer(x)
        return x


def wrapped(axis: str, table: bool) -> DistributedModelParallel:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    plan = {"table.weight": row_wise()} if table else None
    if axis == "tp":
        from sharders import TensorParallelSharder, default_sharders

        styles = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}
        sharders = [*(s for s in default_sharders() if not isinstance(s, TensorParallelSharder))]
        return DistributedModelParallel(Net(table), env, sharders=[*sharders, TensorParallelSharder(styles)])
    return DistributedModelParallel(Net(table), env, plan=plan)


def ids_of(model: DistributedModelParallel) -> torch.Tensor:
    return (torch.arange(12).view(4, 3) * (1 + model.env.data_rank)) % 12


def astray(axis: str, table: bool, what: str) -> tuple[str, float]:
    """Two steps together; in the third, rank 1 does `what`: what is raised then, or at the next pass."""
    model = wrapped(axis, table)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    began = 0.0
    try:
        for number in range(5):
            optimizer.zero_grad()
            model(ids_of(model)).square().mean().backward()
            is_other = number == 2 and model.env.rank == 1
            began = began or (number == 2 and time.monotonic())
            if is_other and what == "lr":
                optimizer.param_groups[0]["lr"] = 0.2
            if not (is_other and what == "skip"):
                optimizer.step()
    except Exception as error:
        assert number <= 3, number
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(
    ("axis", "table"), [("dp", False), ("dp", True), ("shard", False), ("shard", True), ("tp", False)]
)
@pytest.mark.parametrize("what", ["skip", "lr"])
@pytest.mark.sampled(16)
def test_a_step_of_one_rank_alone(axis: str, table: bool, what: str) -> None:
    for message, seconds in mortal_ranks(2, astray, axis, table, what):
        assert message.startswith("RanksError: the ranks have "), message
        assert "SGD.step() with lr=0.1, momentum=0.9" in message and seconds < 9.0, (message, seconds)
        assert what == "skip" or "lr=0.2" in message, message


def apart(how: str, folder: str) -> None:
    """Rank 1 has a parameter less in its optimizer, or makes a last step alone before a save."""
    model = wrapped("dp", True)
    parameters = list(model.parameters())
    is_other = model.env.rank == 1
    optimizer = torch.optim.SGD(parameters[: -1 if is_other and how == "forward" else None], lr=0.1)
    for _ in range(2):
        model(ids_of(model)).square().mean().backward()
        optimizer.step()
    if is_other:
        optimizer.step()
    save_checkpoint(Path(folder) / "saved", model, optimizer)


@pytest.mark.parametrize("how", ["forward", "save"])
def test_told_in_the_next_call(how: str, tmp_path: Path) -> None:
    texts = {"forward": "rank 1: SGD.step() with lr=0.1 on layers", "save": "steps of optimizers=3"}
    for error in run_ranks(2, apart, how, str(tmp_path), expect=RanksError):
        assert texts[how] in str(error), error
    assert not any(tmp_path.iterdir())


def of_a_part_each() -> None:
    """torch's ZeRO: an optimizer inside has a part of the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = wrapped("dp", False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        model(ids_of(model)).square().mean().backward()
        optimizer.step()


def test_an_optimizer_of_a_part_on_each_rank() -> None:
    run_ranks(2, of_a_part_each)


def rates_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = Net(True)
    _apply_optimizer_in_backward(torch.optim.SGD, module.table.parameters(), {"lr": 0.1})
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(module, env, plan={"table.weight": row_wise()})
    model(ids_of(model)).sum().backward()
    model.fused_optimizer.param_groups[0]["lr"] = 0.1 + env.rank
    model(ids_of(model))


def test_rates_in_the_backward_pass() -> None:
    for error in run_ranks(2, rates_in_backward, expect=RanksError):
        assert "rank 0: none; in the backward pass lr=0.1; rank 1: none; in the backward pass lr=1.1" in str(error)


def together(axis: str, table: bool) -> None:
    """What all ranks do alike, beside one process."""
    model, module = wrapped(axis, table), Net(table)
    both = [(m, *optimizers(m)) for m in (model, module)]
    ids = [(torch.arange(12).view(4, 3) * (1 + rank)) % 12 for rank in range(model.env.data_size)]
    for number in range(12):
        for m, first, second, schedule in both:
            mine = [ids_of(model)] if m is model else ids
            for _ in range(1 + (number % 4 == 1)):  # accumulated
                (torch.cat([m(x).square().mean().view(1) for x in mine]).mean()).backward()
            if number % 3 == 0:  # on all ranks
                first.step()
            second.step()
            schedule.step()
            m.zero_grad()
            if number % 5 == 4:
                with torch.no_grad():
                    for x in mine:
                        m(x)
        if number == 6:
            model.load_state_dict(full_state_dict(model))
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, module.state_dict()[name])


def optimizers(model: nn.Module) -> tuple[Any, ...]:
    named = dict(model.named_parameters())
    first = torch.optim.SGD([p for n, p in named.items() if n.startswith("table")], lr=0.1)
    second = torch.optim.SGD([p for n, p in named.items() if not n.startswith("table")], lr=0.1, momentum=0.5)
    return first, second, torch.optim.lr_scheduler.ExponentialLR(second, 0.9)


@pytest.mark.parametrize(
    ("axis", "table"), [("dp", False), ("dp", True), ("shard", False), ("shard", True), ("tp", False)]
)
@pytest.mark.sampled(4)
def test_what_all_ranks_do_alike(axis: str, table: bool) -> None:
    run_ranks(2, together, axis, table)


def of_several(axis: str) -> float:
    """Which lie elsewhere in the memory of each rank, as two critics of one optimizer do."""
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    beside: list[Any] = []
    models = []
    for _ in range(6):
        beside.append([nn.Linear(1, 1) for _ in range(3 * torch.distributed.get_rank())])
        models.append(DistributedModelParallel(nn.Linear(4, 4), env))
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()])
    for _ in range(2):
        sum((model(torch.ones(2, 4)).sum() for model in models), torch.zeros(())).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_an_optimizer_of_several_models(axis: str) -> None:
    first, second = run_ranks(2, of_several, axis)
    assert first == second


def joined() -> list[torch.Tensor]:
    """Ranks with different numbers of batches, twice."""
    model = wrapped("dp", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Join([model.running]):  # type: ignore[list-item]
            for _ in range(2 + model.env.rank):
                optimizer.zero_grad()
                model(ids_of(model)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        model(ids_of(model)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_ranks_that_join() -> None:
    first, second = run_ranks(2, joined)
    assert all(map(torch.equal, first, second))


def of_one_rank() -> bool:
    env = ShardingEnv.from_mesh(mesh((1,), ("shard",)))
    model = DistributedModelParallel(Net(False), env)
    before = full_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids_of(model)).sum().backward()
        optimizer.step()
    return not torch.equal(before["table.weight"], full_state_dict(model)["table.weight"])


def test_one_rank_has_nobody_to_agree_with() -> None:
    """Of a split model without tables the first forward raised there."""
    assert run_ranks(1, of_one_rank) == [True]
