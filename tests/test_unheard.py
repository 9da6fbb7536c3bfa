"""Classes that hear of those made of them, as registries of models do, on every mesh."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, to_unsharded
from sharders import TensorParallelSharder
from sharders.unheard import made_of
from tests.ranks import mesh, run_ranks

SPLIT = {"layers.*.attn": "colwise_packed_3", "layers.*.attn.out_proj": "rowwise"}


class Kept:
    """Keeps each class by the name that it must be given."""

    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Kept.kinds[kind] = cls


class Attention(nn.MultiheadAttention, Kept, kind="attention"): ...


class Block(nn.Module, Kept, kind="block"):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.scale = Attention(8, 2, batch_first=True), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.attn(x, x, x, need_weights=False)[0]


class Named(nn.Module):
    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        Named.kinds[cls.__name__] = cls


class Net(Named):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.top = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.top(x + self.shift)


def nobody_hears(axis: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    made: list[Net] = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(Net())
    sharders = [TensorParallelSharder(SPLIT)] if axis == "tp" else None
    model, plain = DistributedModelParallel(made[0], env, sharders=sharders), made[1]
    assert axis == "dp" or isinstance(model.module.layers[0].attn.in_proj_weight, DTensor)
    data = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    mine = data.chunk(env.data_size)[env.data_rank]
    for each, x in ((model, mine), (plain, data)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(full_state_dict(model), plain.state_dict())
    assert type(to_unsharded(model)) is Net
    assert Kept.kinds == {"attention": Attention, "block": Block} and Named.kinds == {"Net": Net}


@pytest.mark.parametrize("axis", ["shard", "dp", "tp"])
def test_a_registry_keeps_the_classes_of_the_program(axis: str) -> None:
    run_ranks(2, nobody_hears, axis)


def test_a_class_made_of_one_that_was_made_so_is_unheard_too() -> None:
    twice = made_of(made_of(Net, {"once": 1}), {"twice": 2})
    assert (twice.__name__, twice.once, twice.twice) == ("Net", 1, 2) and Named.kinds == {"Net": Net}
