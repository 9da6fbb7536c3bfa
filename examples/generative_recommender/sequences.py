"""Generated histories with an order planted in them, so that the best hit rate anyone can reach is known.

Terms. Every user belongs to a hidden group; every group has a successor of each item, a permutation. In a history, the
item after `i` is its successor in the user's group with probability `order`, and any item else, all alike.

Everything follows from (seed, part, index of the batch): each rank makes the whole global batch and takes its samples,
so a step has the same samples on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

MIN_LENGTH, MAX_LENGTH = 4, 12
NUM_GROUPS = 2
_PARTS = ("train", "held-out")


@dataclass(frozen=True)
class Sequences:
    """Some users with the items they took.

    Args:
        users: (B,) ids.
        items: (B, MAX_LENGTH + 1) ids, 0 after the end.
        lengths: (B,) items that have one after them.
    """

    users: Tensor
    items: Tensor
    lengths: Tensor

    def share(self, rank: int, num_ranks: int) -> Sequences:
        """The samples of one of `num_ranks` data ranks: as even as they go, in order."""
        mine = slice(len(self.users) * rank // num_ranks, len(self.users) * (rank + 1) // num_ranks)
        return Sequences(self.users[mine], self.items[mine], self.lengths[mine])

    def inputs(self, candidates: Tensor | None) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Users and items as `Recommender` takes them; `candidates` (C,) for the sampled softmax."""
        ones = torch.ones_like(self.lengths)
        users = KeyedJaggedTensor(keys=["user"], values=self.users, lengths=ones)
        is_position = torch.arange(MAX_LENGTH) < self.lengths.unsqueeze(1)
        values = {"history": self.items[:, :-1][is_position], "target": self.items[:, 1:][is_position]}
        lengths = dict.fromkeys(values, self.lengths)
        if candidates is not None:
            values["candidates"] = candidates
            lengths["candidates"] = torch.zeros_like(ones).index_fill(0, torch.tensor([0]), len(candidates))
        items = KeyedJaggedTensor(
            keys=list(values), values=torch.cat(list(values.values())), lengths=torch.cat(list(lengths.values()))
        )
        return users, items


@dataclass(frozen=True)
class Generator:
    """What is planted, and sequences of it.

    Args:
        num_items: number of items.
        num_users: number of users.
        order: probability that an item is followed by its successor.
        seed: of everything.
    """

    num_items: int
    num_users: int
    order: float
    seed: int = 0

    @cached_property
    def group_of_user(self) -> Tensor:
        """(users,) hidden group of each."""
        return torch.randint(NUM_GROUPS, (self.num_users,), generator=self._random("planted", 0))

    @cached_property
    def successor(self) -> Tensor:
        """(groups, items) the item that follows each."""
        return torch.stack(
            [torch.randperm(self.num_items, generator=self._random("planted", 1 + g)) for g in range(NUM_GROUPS)]
        )

    def best_hit_rate(self, k: int) -> float:
        """Share of positions whose next item is among the best k guesses: the successor, and any k - 1 others."""
        return self.order + (1 - self.order) * min(1.0, k / self.num_items)

    def sequences(self, part: str, index: int, size: int) -> Sequences:
        """Global batch number `index` of `part`, "train" or "held-out"."""
        random = self._random(part, index)
        users = torch.randint(self.num_users, (size,), generator=random)
        lengths = torch.randint(MIN_LENGTH, MAX_LENGTH + 1, (size,), generator=random)
        items = torch.randint(self.num_items, (size, MAX_LENGTH + 1), generator=random)
        in_order = torch.rand(size, MAX_LENGTH, generator=random) < self.order
        for t in range(MAX_LENGTH):
            after = self.successor[self.group_of_user[users], items[:, t]]
            items[:, t + 1] = torch.where(in_order[:, t], after, items[:, t + 1])
        is_item = torch.arange(MAX_LENGTH + 1) <= lengths.unsqueeze(1)
        return Sequences(users, items * is_item, lengths)

    def candidates(self, index: int, size: int) -> Tensor:
        """(size,) items for the sampled softmax of training batch `index`, drawn evenly: the same on all ranks."""
        return torch.randint(self.num_items, (size,), generator=self._random("candidates", index))

    def _random(self, purpose: str, index: int) -> torch.Generator:
        place = ("planted", "candidates", *_PARTS).index(purpose)
        return torch.Generator().manual_seed((self.seed * 4 + place) * 1_000_003 + index)
