"""What the transformer benchmarks run: models, batches, meshes, and both implementations of each.

B samples for each data rank, T positions, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

import dmp
from sharders import TensorParallelSharder
from tests.bench.transformer_by_hand import by_hand, optimizer_of
from tests.ranks import mesh
from tests.transformers_zoo import Llama

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "shard 2": ((2,), ("shard",)),
    "tp 2": ((2,), ("tp",)),
    "shard 2 x tp 2": ((2, 2), ("shard", "tp")),
    "replicate 2 x shard 2": ((2, 2), ("replicate", "shard")),
}
COPIES = "dp 2"
"""A step is timed there too, beside `DistributedDataParallel`: it wraps in no other way than that does."""
ON = {**MESHES, COPIES: ((2,), ("dp",))}
MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "loss parallel": {"loss_parallel": True},
    "sequence and loss parallel": {"sequence_parallel": True, "loss_parallel": True},
}


@dataclass(frozen=True)
class Workload:
    """A Llama and its batches."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int = 64
    batch_size: int = 4

    def model(self, device: str = "cpu") -> Llama:
        """The same values on every rank."""
        torch.manual_seed(0)
        with torch.device(device):
            return Llama(self.vocab, self.dim, self.layers, self.heads, self.kv_heads, self.hidden)

    def batch(self, data_rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and targets, (B, T) each."""
        rng = torch.Generator().manual_seed(1000 * step + data_rank)
        ids = torch.randint(0, self.vocab, (self.batch_size, self.length + 1), generator=rng)
        return ids[:, :-1], ids[:, 1:]


SMALL = Workload(dim=128, layers=4, heads=8, kv_heads=4, hidden=384, vocab=512)
LARGE = Workload(dim=512, layers=4, heads=8, kv_heads=4, hidden=1536, vocab=4096)


@dataclass
class Side:
    """One implementation, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_loss_parallel: bool = False

    def backward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward; the loss of this rank's batch."""
        around: AbstractContextManager[None] = loss_parallel() if self.is_loss_parallel else nullcontext()
        with around:
            loss = F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def env_of(mesh_name: str) -> dmp.ShardingEnv:
    """Call it on every rank."""
    return dmp.ShardingEnv.from_mesh(mesh(*ON[mesh_name]))


def wrap_ours(model: nn.Module, env: dmp.ShardingEnv, mode: str = "plain") -> dmp.DistributedModelParallel:
    """Our wrapper, with its defaults wherever the mode is the default."""
    sharders = [TensorParallelSharder(**MODES[mode])] if MODES[mode] else None
    return dmp.DistributedModelParallel(model, env, sharders=sharders)


def make_sides(work: Workload, mesh_name: str, mode: str = "plain") -> tuple[Side, Side]:
    """By hand and ours, from the same values."""
    env = env_of(mesh_name)
    theirs = by_hand(work.model(), mesh(*ON[mesh_name]), **MODES[mode])
    ours = wrap_ours(work.model(), env, mode)
    is_loss_parallel = MODES[mode].get("loss_parallel", False)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    return Side(theirs, optimizer_of(theirs), is_loss_parallel), Side(ours, optimizer, is_loss_parallel)
