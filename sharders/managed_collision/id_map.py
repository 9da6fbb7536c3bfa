"""`IdMap`: this rank's part of one table's map from raw ids to rows.

[Note: a map in blocks]
A map has an *entry* for each row of its table: a raw id, the row, and what the eviction policy keeps of it. Entries are
in the order of their raw ids; those that are empty, whose raw id is `EMPTY`, come last, and the very last one stays
empty: its row is that of every id which is not in the map. As one sequence this is what the unsharded module holds, in
tensors of the same names. Here the sequence is cut where the table's rows are cut, into *blocks*, each on the rank that
has those rows: so a map takes memory where its table does, and a checkpoint of it is read as any other tensor's.

An id is looked for in the last block whose *first* raw id is not larger: who knows the first id of every block, knows
who has an id. That is all that ranks know of each other's blocks, and it changes only where a map does.

Steps are counted, and ids of training batches are kept where they are looked up, as the *history* of all ranks; every
`interval` steps it decides who enters the map and who leaves (`eviction`). Between these steps a map does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from dmp import ChunkedTensor, Layout, ShardingEnv, is_replicated
from sharders.managed_collision.policies import COUNTS, LAST_ACCESS, Policy, policy_of

EMPTY = torch.iinfo(torch.int64).max
"""In place of a raw id: no id."""

_HISTORY_ROOM = 1.25  # of the first batch's ids in as many steps as lie between evictions, as in TorchRec


@dataclass(frozen=True)
class Block:
    """Entries start..stop of a map, which a table rank holds."""

    start: int
    stop: int
    owner: int

    @property
    def size(self) -> int:
        """Entries."""
        return self.stop - self.start


@dataclass
class History:
    """Ids that came since the last eviction.

    Args:
        room: how many are kept, on all ranks together; None as long as no batch has come.
        taken: how many there are, on all ranks together.
        ids: of this rank's blocks, and the step in which they came.
    """

    room: int | None = None
    taken: int = 0
    ids: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class IdMap(nn.Module):
    """One table's map; buffers have the names of the unsharded module's, and this rank's entries.

    Args:
        original: TorchRec's `MCHManagedCollisionModule`; its values are kept.
        blocks: of all ranks.
        rank: this rank's table rank.
        device: of the buffers.
    """

    def __init__(self, original: Any, blocks: Sequence[Block], rank: int, device: torch.device) -> None:
        super().__init__()
        self.size = int(original._zch_size)
        self._rank = rank
        self.most: int | None = None
        """Entries that it may have, of a map that grows."""
        self.blocks_to_be: list[Block] | None = None
        """Where its table's rows are by now: entries follow in the next forward."""
        self._cut(blocks)
        self.policy: Policy = policy_of(original._eviction_policy)
        self.interval = int(original._eviction_interval)
        self.miss = int(original._output_global_offset) + self.size - 1
        self._settings = _settings_of(original)
        self._hash: Callable[..., torch.Tensor] | None = original._input_hash_func
        self._hash_size = int(original._input_hash_size)
        self.entry_buffers = ["_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"]
        self.entry_buffers += [f"_mch_{name}" for name in self.policy.metadata]
        self._elsewhere: dict[str, torch.Size] = {}
        source: Any = self.unsharded() if original._mch_sorted_raw_ids.is_meta else original
        self._take_buffers(source, device)
        self._step: int = source._current_iter
        self._last_eviction: int = source._last_eviction_iter
        self.history = self._history_of(source)

    def _cut(self, blocks: Sequence[Block]) -> None:
        self.blocks = [block for block in blocks if block.size]
        self.own = [i for i, block in enumerate(self.blocks) if block.owner == self._rank]
        self._cuts = list(accumulate((self.blocks[i].size for i in self.own), initial=0))

    def cut(self, blocks: Sequence[Block], entries: Sequence[torch.Tensor]) -> None:
        """Have other blocks.

        Args:
            entries: (N, fields) of each that this rank has.
        """
        self._cut(blocks)
        for name in self.entry_buffers:
            self._buffers[name] = self.raw_ids.new_empty(self._cuts[-1])
        self.fill(entries)
        self.blocks_to_be = None

    def append(self, blocks: Sequence[Block]) -> None:
        """Have more rows: empty entries of these blocks behind the others; the last one is that of misses from now on.

        Args:
            blocks: of all ranks.
        """
        old, count = self.size, sum(block.size for block in blocks)
        if self.own and self.own[-1] == len(self.blocks) - 1:
            for name in self.policy.metadata:
                self.entries(f"_mch_{name}", len(self.own) - 1)[-1] = 0
        first = self.miss + 1 - old
        held, own = len(self.own), self.raw_ids
        self._cut([*self.blocks, *blocks])
        rows = [
            torch.arange(first + self.blocks[i].start, first + self.blocks[i].stop, device=own.device)
            for i in self.own[held:]
        ]
        more = torch.cat(rows) if rows else own[:0]
        for name in self.entry_buffers:
            new = torch.zeros_like(more)
            if name == "_mch_sorted_raw_ids":
                new.fill_(EMPTY)
            elif name == "_mch_remapped_ids_mapping":
                new = more
            self._buffers[name] = torch.cat([self._buffers[name], new])  # type: ignore[list-item]
        self.size, self.miss = old + count, self.miss + count
        segments, slots = self._buffers["_output_segments_tensor"], self._buffers["_mch_slots"]
        assert segments is not None and slots is not None
        segments[segments == first + old] = first + self.size
        slots.fill_(self.size - 1)
        kind, settings = self._settings
        self._settings = kind, {**settings, "zch_size": self.size, "output_segments": None}

    def fields(self, block: int) -> torch.Tensor:
        """(N, fields) of the entries of one of this rank's blocks."""
        return torch.stack([self.entries(name, block) for name in self.entry_buffers], 1)

    def fill(self, entries: Sequence[torch.Tensor]) -> None:
        """Take the fields of all entries here, block by block."""
        for column, name in enumerate(self.entry_buffers):
            for i, fields in enumerate(entries):
                self.entries(name, i).copy_(fields[:, column])

    def _take_buffers(self, original: Any, device: torch.device) -> None:
        """Every buffer of the original, cut where it has an element for each entry."""
        for name, value in original._buffers.items():
            is_kept = name not in original._non_persistent_buffers_set
            if name in self.entry_buffers:
                parts = [value[self.blocks[i].start : self.blocks[i].stop] for i in self.own]
                value = torch.cat(parts) if parts else value[:0]
            elif name.startswith("_history_"):  # of one process: ours is in `history`
                self._elsewhere[name] = value.shape
                value = value[:0]
            self.register_buffer(name, value.to(device, copy=True), persistent=is_kept)

    def _history_of(self, original: Any) -> History:
        """That of a module which has seen batches before it was sharded."""
        if original._input_history_buffer_size < 0:
            return History()
        taken = original._current_history_buffer_offset
        ids = original._history_accumulator[:taken]
        starts = [block.start for block in self.blocks]
        block = block_of(ids, original._mch_sorted_raw_ids[starts])
        is_here = (block[:, None] == torch.tensor(self.own, dtype=torch.int64)).any(1)
        seen = original._history_metadata.get(LAST_ACCESS)
        steps = torch.zeros_like(ids) if seen is None else seen[:taken]
        kept = [(ids[is_here & (steps == step)], step) for step in steps.unique().tolist()]
        return History(original._input_history_buffer_size, taken, kept)

    def chunked_state(self) -> dict[str, ChunkedTensor]:
        """This rank's entries of every buffer that has one for each."""
        offsets = [(self.blocks[i].start,) for i in self.own]
        state = {}
        for name in self.entry_buffers:
            chunks = [self.entries(name, i) for i in range(len(self.own))]
            state[name] = ChunkedTensor((self.size,), chunks, offsets, torch.int64, self.raw_ids.device)
        for name, shape in self._elsewhere.items():
            state[name] = ChunkedTensor(shape, [], [], torch.int64, self.raw_ids.device)
        return state

    def entries(self, name: str, block: int) -> torch.Tensor:
        """(N,) view of a buffer: the entries of one of this rank's blocks."""
        return self._buffers[name][self._cuts[block] : self._cuts[block + 1]]  # type: ignore[index]

    @property
    def raw_ids(self) -> torch.Tensor:
        """Of all entries here."""
        return self._mch_sorted_raw_ids  # type: ignore[return-value]

    @property
    def _counter(self) -> torch.Tensor:
        return self._buffers["_current_iter_tensor"]  # type: ignore[return-value]

    @property
    def step(self) -> int:
        """Training batches that have come."""
        return self._step

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as the map knows them: by its own hash, where it has one."""
        return ids if self._hash is None else self._hash(ids, self._hash_size)

    def firsts(self) -> list[int]:
        """First raw id of each block here."""
        starts = self._cuts[:-1]
        found: list[int] = self.raw_ids[starts].tolist() if starts else []
        return found

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) rows of ids of which this rank has the blocks."""
        if not self.own:
            return torch.full_like(ids, self.miss)
        # Blocks that lie apart are in the order of their ids all the same; only their empty entries are not last.
        rows = torch.full_like(ids, self.miss)
        for i in range(len(self.own)):
            known, mapped = self.entries("_mch_sorted_raw_ids", i), self.entries("_mch_remapped_ids_mapping", i)
            at = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
            rows = torch.where(known[at] == ids, mapped[at], rows)
        return rows

    def begin_step(self, num_ids: int) -> int:
        """Count a training batch; returns how many of the ids that all ranks have are kept in the history.

        Args:
            num_ids: of all ranks.
        """
        counter = self._counter
        loaded = int(counter.item())
        if self._step != loaded:  # new, or filled from a checkpoint: as a new one begins
            self._step = self._last_eviction = loaded
            self.history = History(self.history.room)
        self._step += 1
        counter += 1
        if self.history.room is None:
            self.history.room = int(num_ids * self.interval * _HISTORY_ROOM)
        kept = min(num_ids, self.history.room - self.history.taken)
        self.history.taken += kept
        return kept

    def record(self, ids: torch.Tensor) -> None:
        """Keep ids of the batch of this step, which came to this rank."""
        self.history.ids.append((ids, self._step))

    @property
    def is_due(self) -> bool:
        """Whether this step is one of those in which the map changes."""
        return self._step - self._last_eviction == self.interval

    def take_history(self) -> dict[str, torch.Tensor]:
        """The ids of the history here, each once and in order, how often each came, and when last; a new one begins."""
        device = self.raw_ids.device
        kept = [(ids.to(device), step) for ids, step in self.history.ids]
        ids = torch.cat([ids for ids, _ in kept]) if kept else self.raw_ids[:0]
        steps = [torch.full_like(ids, step) for ids, step in kept]
        self.history.ids, self.history.taken = [], 0
        self._last_eviction = self._step
        unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        last = torch.zeros_like(counts)
        if steps:
            last.scatter_reduce_(0, inverse, torch.cat(steps), reduce="amax", include_self=False)
        return {"ids": unique, COUNTS: counts, LAST_ACCESS: last}

    def unsharded(self) -> nn.Module:
        """A plain module of the same settings, with the values of a new one."""
        kind, settings = self._settings
        made: nn.Module = kind(device=torch.device("cpu"), **settings)
        return made


def blocks_of(layout: Layout, shape: tuple[int, int], env: ShardingEnv) -> list[Block]:
    """Where the entries of a table's map are: with its rows; spread evenly where every rank has the whole table."""
    shards = layout.shards(shape, env)
    if is_replicated(shards, shape):
        each = -(-shape[0] // env.table_size)
        starts = range(0, shape[0], max(each, 1))
        return [Block(start, min(start + each, shape[0]), rank) for rank, start in enumerate(starts)]
    cuts = sorted({cut for s in shards for cut in (s.offsets[0], s.offsets[0] + s.sizes[0])})
    first_columns = [s for s in shards if s.offsets[1] == 0]
    blocks = []
    for start, stop in pairwise(cuts):
        owner = next(s.rank for s in first_columns if s.offsets[0] <= start < s.offsets[0] + s.sizes[0])
        blocks.append(Block(start, stop, owner))
    return blocks


def block_of(ids: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
    """(N,) the block that has an id, or would.

    Args:
        firsts: first raw id of each block of the map.
    """
    return (torch.searchsorted(firsts, ids, right=True) - 1).clamp_(min=0)


def _settings_of(original: Any) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    segments = original._output_segments_tensor
    settings = {
        "zch_size": original._zch_size,
        "eviction_policy": original._eviction_policy,
        "eviction_interval": original._eviction_interval,
        "input_hash_size": original._input_hash_size,
        "input_hash_func": original._input_hash_func,
        "name": original._name,
        "output_global_offset": original._output_global_offset,
        "output_segments": None if segments.is_meta else [s for s in segments.tolist() if s >= 0],
        "buckets": original._buckets,
    }
    return type(original), settings
