"""What the programs of `programs` are drawn from: a model of tables and blocks, meshes, layouts, optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import Layout, ShardingEnv, column_wise, data_parallel, grid, rectangles, row_wise, table_wise
from tests.equality import random_rectangles
from tests.ranks import mesh

SHAPES = {"users.weight": (40, 8), "items.weight": (23, 8), "words.weight": (30, 8)}
MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((4,), ("dp",)),
    ((4,), ("shard",)),
    ((4,), ("tp",)),
    ((2, 2), ("replicate", "shard")),
    ((2, 2), ("shard", "tp")),
    ((2, 2), ("dp", "tp")),
    ((2, 2), ("host", "local")),
    ((2, 2), ("replicate", "dp")),
    ((1, 4), ("host", "local")),
    ((2, 2), ("replicate", "tp")),
    ((1, 2, 2), ("replicate", "shard", "tp")),
)
_AdamW, _SGD = torch.optim.AdamW, torch.optim.SGD


def _in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Vectors without weight decay, matrices with another learning rate."""
    every = list(parameters)
    vectors, others = ([p for p in every if (p.ndim == 1) is is_one] for is_one in (True, False))
    return _AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others, "lr": 0.02}], lr=0.01)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: _SGD(p, lr=0.1),
    "momentum": lambda p: _SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: _SGD(p, lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: _AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: _AdamW(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "groups": _in_groups,
}


class Probe(NamedTuple):
    """One program."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}: seed {self.seed}"


def drawn_probes(kind: str, seed: int, count: int) -> list[Probe]:
    rng = random.Random(seed)
    return [Probe(kind, rng.randrange(10**9)) for _ in range(count)]


class Spec(NamedTuple):
    """A model.

    Args:
        modes: of the two bags.
        is_tied: the second block's first Linear is the first block's.
        again: `use_reentrant` of checkpointed blocks; None where none is.
    """

    seed: int
    modes: tuple[str, str]
    has_attention: bool
    num_blocks: int
    is_tied: bool
    again: bool | None

    @classmethod
    def drawn(cls, rng: random.Random) -> Spec:
        modes = rng.choice((("sum", "mean"), ("mean", "sum")))
        number, is_tied = rng.choice((1, 2, 2, 3)), rng.random() < 0.2
        again = rng.choice((None, None, None, False, None if is_tied else True))  # which DDP cannot, and says so
        return cls(rng.randrange(1000), modes, rng.random() < 0.6, number, is_tied and number > 1, again)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        # without a bias of keys, whose gradient is zero but for rounding
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=i != 1) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (of(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, has_attention: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), _Attention() if has_attention else None
        self.norm2, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            x = x + self.attention(self.norm(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """Two bags, and words that go through blocks, into two Linears."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.again = spec.again
        self.users, self.items = (nn.EmbeddingBag(n, 8, mode=m) for n, m in zip((40, 23), spec.modes, strict=True))
        self.words = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(_Block(spec.has_attention) for _ in range(spec.num_blocks))
        if spec.is_tied:
            first, second = self.blocks[:2]
            second.up = first.up
        self.mix, self.head, self.gain = nn.Linear(24, 8), nn.Linear(8, 1), nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids % 30)
        for block in self.blocks:
            is_kept = self.again is None or not torch.is_grad_enabled()
            x = block(x) if is_kept else checkpoint(block, x, use_reentrant=self.again)
        both = torch.cat([self.users(ids % 40), self.items(ids % 23), x.mean(1)], 1)
        out: torch.Tensor = self.head(F.gelu(self.mix(both)) * self.gain).squeeze(1)
        return out


def drawn_env(rng: random.Random) -> ShardingEnv:
    return ShardingEnv.from_mesh(mesh(*rng.choice(MESHES)))


def drawn_layout(rng: random.Random, env: ShardingEnv, shape: tuple[int, int]) -> Layout:
    ranks = env.table_size

    def rank() -> int:
        return rng.randrange(ranks)

    return rng.choice(
        (
            lambda: table_wise(rank()),
            row_wise,
            lambda: row_wise(sorted(rng.sample(range(ranks), rng.randint(1, ranks)))),
            lambda: column_wise([rank() for _ in range(rng.choice((1, 2)))]),
            lambda: grid([[rank(), rank()] for _ in range(2)]),
            lambda: rectangles(random_rectangles(shape, ranks, rng.randrange(10**6))),
            data_parallel,
        )
    )()
