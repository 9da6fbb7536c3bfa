"""Numbers of Python's that a program takes of split weights: the whole's, said to be shares, or errors everywhere."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, RanksError, ShardError, ShardingEnv
from dmp.ranks import say_once
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks


class Ranged(nn.Module):
    """Scales by a number, as models of knowledge graphs do by the range in which they were drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.range = nn.Parameter(torch.tensor([2.5]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.range.item()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x / float(self.range) if self.range.is_nonzero() else x

    @torch.no_grad()
    def listed(self) -> list[Any]:
        return [np.asarray(self.layer.weight).tolist(), self.range.numpy().tolist(), self.range.tolist()]

    def of_state(self) -> Any:
        return self.state_dict()["layer.weight"].numpy()


class Scoring(nn.Module):
    """Trains what predicts by its own forward, as a sampler of negatives does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift - x

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return -self.forward(x)


def shares(weight: torch.Tensor) -> tuple[float, list[str]]:
    """Its norm as this rank has it, asked for twice, and what is said of that."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    say_once.cache_clear()
    logging.getLogger("dmp").addHandler(handler)
    try:
        share, again = (weight.detach().norm().item() for _ in range(2))
    finally:
        logging.getLogger("dmp").removeHandler(handler)
    assert share == again
    return share, heard


def numbers() -> tuple[list[float], str, list[str]]:
    model = DistributedModelParallel(Ranged(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    found = [model(torch.ones(1, 4)).detach().sum().item(), model.module.scaled(torch.ones(1)).item()]
    with torch.no_grad():
        found.append(model.module.scaled(torch.ones(1)).item())
    with pytest.raises(ShardError, match="on one rank alone") as error:
        model.module.range.item()
    share, heard = shares(model.module.layer.weight)
    assert share < torch.nn.utils.get_total_norm(model.module.layer.parameters())
    return found, str(error.value), heard


def test_numbers_of_split_weights() -> None:
    """One rank went on and the other failed; shares of a norm were logged as the norm, in silence."""
    plain = Ranged()
    expected = [plain(torch.ones(1, 4)).detach().sum().item(), 0.4, 0.4]
    for found, error, heard in run_ranks(2, numbers):
        assert found == pytest.approx(expected)
        assert "full_tensor" in error
        assert len(heard) == 1 and "this rank's share" in heard[0]


def asks_alone() -> str:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    model = DistributedModelParallel(Ranged(), env)
    with pytest.raises(RanksError) as error:
        model.module.scaled(torch.ones(1)) if env.rank == 0 else model(torch.ones(1, 4))
    return str(error.value)


def test_a_rank_that_alone_asks_for_a_number_is_named() -> None:
    """As one does that alone logs a temperature: what it gathers met the next forward's exchange, which ended both."""
    for told in run_ranks(2, asks_alone):
        assert "rank 0 is in scaled() of 'FSDPRanged', which gathers" in told and "rank 1 is in forward" in told


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_share() -> tuple[float, list[str]]:
    torch.manual_seed(0)
    sharders = [TensorParallelSharder({"up": "colwise", "down": "rowwise"})]
    model = DistributedModelParallel(Mlp(), ShardingEnv.from_mesh(mesh((2,), ("tp",))), sharders=sharders)
    return shares(model.module.up.weight)


def test_numbers_of_weights_that_are_split_along_a_tensor_axis() -> None:
    torch.manual_seed(0)
    whole = Mlp().up.weight.norm().item()
    found = run_ranks(2, tensor_share)
    assert sum(share**2 for share, _ in found) == pytest.approx(whole**2)
    assert all(len(heard) == 1 and "this rank's share" in heard[0] for _, heard in found)


def predicts() -> list[float]:
    model = DistributedModelParallel(Scoring(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    model(torch.ones(3)).backward()
    with torch.no_grad():
        return model.module.model.predict(torch.ones(3)).tolist()


def test_a_method_that_calls_its_modules_forward() -> None:
    """It ended in DTensor's words: the hooks that gather are around the call, not around the forward."""
    assert run_ranks(2, predicts) == [[1.0, 0.0, -1.0]] * 2


def arrays() -> tuple[list[Any], list[str]]:
    model = DistributedModelParallel(Ranged(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    weight = model.state_dict()["layer.weight"]
    refused = []
    for taken in (weight.numpy, weight.tolist, lambda: np.asarray(weight), model.module.of_state):
        with pytest.raises(ShardError) as error:
            taken()
        refused.append(str(error.value))
    return model.module.listed(), refused


def test_arrays_of_split_weights() -> None:
    """torch refused them of every subclass of tensors, with no word of what gives the whole."""
    plain = Ranged()
    for listed, refused in run_ranks(2, arrays):
        assert listed == [plain.layer.weight.tolist(), [2.5], [2.5]]
        assert all("full_state_dict(model)" in each for each in refused)
