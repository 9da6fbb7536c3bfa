"""The recommender on a mesh: wrapped, trained on shares of global batches, evaluated by hit rate.

The same global batch is trained on whatever the mesh: each data rank takes its share of the samples, and ranks along a
tensor axis, which work on the same samples together, take the same share. A rank's loss is the sum over its positions,
times data ranks / all positions: the mean of that over the data ranks is the mean over the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recommender import TABLES, Recommender
from sequences import MAX_LENGTH, MIN_LENGTH, Generator
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmp import ChunkedTensor, DistributedModelParallel, ShardingEnv
from planner import Constraint, ShardingPlanner

NUM_CANDIDATES = 100
_HELD_OUT_BATCHES, _HELD_OUT_BATCH_SIZE = 4, 256


@dataclass(frozen=True)
class Task:
    """What all ranks train on together, and which rank this is.

    Args:
        generator: of the histories.
        batch_size: samples of the global batch.
        softmax: "sampled" or "full".
        env: the mesh; its data ranks share the samples.
    """

    generator: Generator
    batch_size: int
    softmax: str
    env: ShardingEnv

    def train_batch(self, step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, int]:
        """The model's inputs on this rank, and the number of positions of the global batch."""
        batch = self.generator.sequences("train", step, self.batch_size)
        candidates = self.generator.candidates(step, NUM_CANDIDATES) if self.softmax == "sampled" else None
        mine = batch.share(self.env.data_rank, self.env.data_size)
        return *mine.inputs(candidates), int(batch.lengths.sum())

    def held_out_batch(self, index: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """The model's inputs on this rank; every item is a candidate."""
        batch = self.generator.sequences("held-out", index, _HELD_OUT_BATCH_SIZE)
        candidates = torch.arange(self.generator.num_items) if self.softmax == "sampled" else None
        return batch.share(self.env.data_rank, self.env.data_size).inputs(candidates)


@dataclass(frozen=True)
class HitRate:
    """Share of positions whose next item is the first of all items by score, and among the first 10."""

    at_1: float
    at_10: float

    def __str__(self) -> str:
        return f"HR@1 {self.at_1:.4f}, HR@10 {self.at_10:.4f}"


def wrap(module: Recommender, env: ShardingEnv, batch_size: int) -> DistributedModelParallel:
    """The model on the mesh, by a plan of the planner's.

    The tables of this example are so small that copies of them on every rank would be cheapest. Real ones have no room
    for that, so it is forbidden, for the example to show what is done with them.
    """
    constraints = {
        "item": Constraint(forbid="data_parallel", pooling_factor=(MIN_LENGTH + MAX_LENGTH) / 2),
        "user": Constraint(forbid="data_parallel"),
    }
    planner = ShardingPlanner(constraints=constraints, batch_size=max(1, batch_size // env.data_size))
    return DistributedModelParallel(module, env, planner=planner)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, step: int) -> tuple[float, int]:
    """One step on the global batch.

    Returns:
        Mean loss over the positions of the global batch, the same on every rank; their number.
    """
    users, items, num_positions = task.train_batch(step)
    scores, targets = model(users, items)
    loss = F.cross_entropy(scores, targets, reduction="sum") * (task.env.data_size / num_positions)
    optimizer.zero_grad()
    loss.backward()  # updates the tables, too
    optimizer.step()
    return sum_over_data_ranks(loss.detach(), task.env).item() / task.env.data_size, num_positions


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> HitRate:
    """Over held-out sequences, shared among all data ranks."""
    model.eval()
    counts = torch.zeros(3, dtype=torch.int64)
    for index in range(_HELD_OUT_BATCHES):
        scores, targets = model(*task.held_out_batch(index))
        num_better = (scores > scores.gather(1, targets.unsqueeze(1))).sum(1)
        counts += torch.stack([(num_better < 1).sum(), (num_better < 10).sum(), torch.tensor(len(targets))])
    model.train()
    at_1, at_10, num_positions = sum_over_data_ranks(counts, task.env).tolist()
    return HitRate(at_1 / num_positions, at_10 / num_positions)


def attach_table_optimizer(model: nn.Module, lr: float) -> None:
    """Has the tables updated in the backward pass, by row-wise Adagrad: no gradient of a whole table ever exists."""
    tables = [p for name, p in model.named_parameters() if name.startswith(TABLES)]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": lr})


def make_dense_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam, for all but the tables."""
    return torch.optim.Adam([p for name, p in model.named_parameters() if not name.startswith(TABLES)], lr=lr)


def sum_over_data_ranks(value: Tensor, env: ShardingEnv) -> Tensor:
    """The sum, on every rank."""
    value, group = value.clone(), env.group("replicate", "shard")
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def bytes_held(model: nn.Module) -> tuple[int, int]:
    """Bytes of tables, and of dense weights, that this rank holds."""
    tables = dense = 0
    for name, value in model.state_dict().items():
        if isinstance(value, ChunkedTensor):
            parts = list(value.chunks)
        else:
            parts = [value.to_local() if hasattr(value, "to_local") else value]
        size = sum(part.numel() * part.element_size() for part in parts)
        tables, dense = (tables + size, dense) if name.startswith(TABLES) else (tables, dense + size)
    return tables, dense
