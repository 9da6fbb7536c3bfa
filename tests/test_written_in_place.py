"""Code that writes the outputs of split modules in place: activations, sums."""

from __future__ import annotations

import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

WIDTH = 8


class Block(nn.Module):
    """What each Linear gives is written: queries are scaled, hidden units cut at 0, what comes out is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x).mul_(0.5), self.k_proj(x), self.v_proj(x)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        out: torch.Tensor = self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out += x
        return self.mlp(out).add_(out)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layers = nn.Embedding(16, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        x *= WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def writes() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model, whole = DistributedModelParallel(Model().double(), env), Model().double()
    for name in ("words", *(f"layers.1.{each}" for each in ("q_proj", "o_proj", "mlp.0", "mlp.2"))):
        weight = model.module.get_submodule(name)._parameters["weight"]
        assert any(p.is_shard() for p in weight.placements), name  # type: ignore[union-attr]
    trains(model, whole, env, lambda g: torch.randint(16, (1, 2, 4), generator=g))


def test_outputs_of_split_modules_may_be_written() -> None:
    """The first such line left its attention or MLP whole on every rank."""
    run_ranks(2, writes)
