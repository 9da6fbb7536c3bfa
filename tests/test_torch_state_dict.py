"""torch's checkpoint recipes over a wrapped model and an ordinary optimizer: tables' state is saved whole."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    RanksError,
    ShardError,
    ShardingEnv,
    full_state_dict,
    row_wise,
    table_wise,
)
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    """A table into a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.rows(ids).tanh())
        return out


class App(Stateful):
    """As in torch's own tutorial."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parts = {"model_state_dict": state_dict["model"], "optim_state_dict": state_dict["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)  # type: ignore[arg-type]


def wrapped(axis: str, layout: Any = None) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    model = DistributedModelParallel(Net(), env, plan={"rows.weight": layout or row_wise()})
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: list[int]) -> None:
    optimizer.zero_grad()
    for rank in ranks:
        ids = torch.randint(0, 20, (4, 3), generator=torch.Generator().manual_seed(10 * number + rank))
        (model(ids).square().mean() / len(ranks)).backward()
    optimizer.step()


def goes_on(axis: str, model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> None:
    """A third step is that of one process, which has made all three."""
    whole = Net()
    own = torch.optim.Adam(whole.parameters(), lr=0.01)
    for number in range(3):
        step(whole, own, number, [0] if axis == "tp" else [0, 1])
    step(model, optimizer, 2, [model.env.data_rank])
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")


def trained(axis: str, steps: int = 2) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    model, optimizer = wrapped(axis)
    for number in range(steps):
        step(model, optimizer, number, [model.env.data_rank])
    return model, optimizer


def through_a_folder(axis: str, path: str) -> None:
    saved = {"app": App(*trained(axis))}
    dcp.save(saved, checkpoint_id=f"{path}/now")
    dcp.async_save(saved, checkpoint_id=f"{path}/behind").result()  # type: ignore[union-attr]
    for name, layout in (("now", row_wise()), ("behind", table_wise(1))):
        model, optimizer = wrapped(axis, layout)
        dcp.load({"app": App(model, optimizer)}, checkpoint_id=f"{path}/{name}")
        goes_on(axis, model, optimizer)


def beside_steps(path: str) -> None:
    model, optimizer = trained("dp")
    pending: Any = []
    for number in range(3):
        for each in pending:
            each.result()
        pending = [dcp.async_save({"app": App(model, optimizer)}, checkpoint_id=f"{path}/{number}")]
        for _ in range(10):
            step(model, optimizer, 2, [model.env.data_rank])
    pending[0].result()
    dist.barrier()
    model, optimizer = wrapped("dp", table_wise(1))
    dcp.load({"app": App(model, optimizer)}, checkpoint_id=f"{path}/0")
    goes_on("dp", model, optimizer)


def test_saving_beside_steps(tmp_path: Path) -> None:
    """Their exchanges were over the same connections: both ranks waited for ever."""
    run_ranks(2, beside_steps, str(tmp_path), timeout=30)


def beside_other_calls(path: str) -> None:
    model, optimizer = trained("dp")
    for number in range(2):
        dcp.async_save({"app": App(model, optimizer)}, checkpoint_id=f"{path}/{number}").result()  # type: ignore[union-attr]
    with pytest.raises(RanksError, match=r"rank 0 is in torch's save in the background, rank 1 is in full_state_dict"):
        dcp.async_save(model.state_dict(), checkpoint_id=path) if model.env.rank == 0 else full_state_dict(model)


def test_saving_beside_steps_on_one_rank_alone(tmp_path: Path) -> None:
    """The first made a group, which tells; the second waited for ever, in a thread that nobody watches."""
    run_ranks(2, beside_other_calls, str(tmp_path), timeout=30)


def without_others(path: str) -> None:
    model, optimizer = trained("dp")
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=f"{path}/{model.env.rank}", no_dist=True)
    model, optimizer = wrapped("dp")
    dcp.load({"app": App(model, optimizer)}, checkpoint_id=f"{path}/{model.env.rank}", no_dist=True)
    goes_on("dp", model, optimizer)
    with ThreadPoolExecutor(1) as other, pytest.raises(ShardError, match="in another thread"):
        other.submit(dcp.save, {"model": model.state_dict()}, checkpoint_id=f"{path}/alone", no_dist=True).result()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_folder_of_one_rank_s(tmp_path: Path) -> None:
    """All write one, or none: one rank's had its part of each table alone, and nobody said so, at loading either."""
    run_ranks(2, without_others, str(tmp_path))


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
@pytest.mark.sampled(3)
def test_a_folder_of_torchs_recipe(axis: str, tmp_path: Path) -> None:
    run_ranks(2, through_a_folder, axis, str(tmp_path))


def in_memory(axis: str) -> None:
    for options in ({}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}):
        model, optimizer = trained(axis)
        parts = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(**options)))
        model, optimizer = wrapped(axis)
        given = {"model_state_dict": parts[0], "optim_state_dict": parts[1]}
        set_state_dict(model, optimizer, **given, options=StateDictOptions(**options))  # type: ignore[arg-type]
        goes_on(axis, model, optimizer)


@pytest.mark.parametrize("axis", ["dp", "shard"])
@pytest.mark.sampled(2)
def test_options_of_torchs_functions(axis: str) -> None:
    run_ranks(2, in_memory, axis)


def by_optimizer(axis: str, path: str) -> None:
    """Its own methods, through torch's checkpoint, without a step before, and from whole tensors."""
    model, optimizer = trained(axis)
    state = optimizer.state_dict()
    dcp.async_save({"optimizer": state}, checkpoint_id=path).result()  # type: ignore[union-attr]
    _, first = trained(axis, steps=1)
    stored = {"optimizer": first.state_dict()}
    dcp.load(stored, checkpoint_id=path)
    with nullcontext() if axis == "dp" else pytest.raises(ShardError, match="full_optimizer_state_dict"):
        optimizer.load_state_dict(pickle.loads(pickle.dumps(copy.copy(copy.deepcopy(state)))))
    optimizer.load_state_dict(stored["optimizer"])
    goes_on(axis, model, optimizer)
    if axis == "shard":
        return
    model, optimizer = trained("dp")
    state = optimizer.state_dict()
    assert isinstance(state["state"][0]["exp_avg"], ChunkedTensor)
    assert isinstance(optimizer.state[next(model.parameters())]["exp_avg"], nn.Parameter | torch.Tensor)
    other = wrapped("dp")[1]
    other.load_state_dict(state)
    other.load_state_dict(other.state_dict())
    goes_on("dp", model, _over(model, other))

    whole = Net()
    own = torch.optim.Adam(whole.parameters(), lr=0.01)
    for number in range(2):
        step(whole, own, number, [0, 1])
    model = wrapped("dp")[0]
    model.load_state_dict(whole.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(own.state_dict())
    goes_on("dp", model, optimizer)


def _over(model: nn.Module, other: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of this model with another's state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    return optimizer


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_an_optimizers_own_methods(axis: str, tmp_path: Path) -> None:
    run_ranks(2, by_optimizer, axis, str(tmp_path))
