"""Parameters held from before wrapping, whose places others have taken: what is written into them is told, not lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict, row_wise
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).sum()  # type: ignore[no-any-return]


def drawn(p: nn.Parameter) -> None:
    nn.init.normal_(p)


def filled(p: nn.Parameter) -> None:
    p.data.fill_(7.0)


def exchanged(p: nn.Parameter) -> None:
    p.data = torch.full((6, 4), 7.0)


def penalised(p: nn.Parameter) -> None:
    p.square().sum().backward()


WRITES = {"drawn": drawn, "filled": filled, "exchanged": exchanged, "penalised": penalised}
IDS = torch.tensor([0, 3, 5])


def wrapped(axis: str) -> tuple[dict[str, nn.Parameter], Any]:
    net = Net()
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    held = dict(net.named_parameters())
    return held, DistributedModelParallel(net, env, plan={"table.weight": row_wise()})


def told(write: Callable[[nn.Parameter], None], axis: str, name: str) -> str:
    """What the forward after the next write says; nothing of what was written before wrapping, or of a step."""
    held, model = wrapped(axis)
    optimizer = torch.optim.SGD(held.values(), lr=0.1)
    for _ in range(2):
        model(IDS).backward()
        optimizer.step()
    write(held[name])
    with pytest.raises(ShardError) as error:
        model(IDS)
    model(IDS)  # once
    return str(error.value)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_into_a_table_from_before(write: str) -> None:
    for text in run_ranks(2, told, WRITES[write], "dp", "table.weight"):
        assert "'table.weight' as it was before the model was wrapped was " in text
        assert ("given a gradient" if write == "penalised" else "written to") in text


def test_what_is_written_into_a_weight_that_is_split() -> None:
    assert all("'head.weight' as it was" in text for text in run_ranks(2, told, filled, "shard", "head.weight"))


def kept() -> list[float]:
    """What stays in its place is written as ever, by whoever held it."""
    held, model = wrapped("dp")
    filled(held["head.bias"])
    model(IDS)
    return full_state_dict(model)["head.bias"].tolist()  # type: ignore[no-any-return]


def freed() -> None:
    """Of a collection that is the model, and that its script keeps, the values are let go of."""
    table = nn.EmbeddingBag(6, 4, mode="sum")
    held = table.weight
    model = DistributedModelParallel(table, ShardingEnv.from_mesh(mesh((2,), ("dp",))), plan={"weight": row_wise()})
    model(IDS.view(-1, 1))
    held.data = torch.empty(0)
    model(IDS.view(-1, 1))
    assert not held.numel()


def test_memory_may_be_let_go_of() -> None:
    run_ranks(2, freed)


def test_what_stays_may_be_written() -> None:
    assert run_ranks(2, kept) == [[7.0, 7.0]] * 2
