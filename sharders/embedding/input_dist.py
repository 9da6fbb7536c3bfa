"""Input dist: a batch's ids become one payload for each rank, and payloads received become what the lookup reads.

[Note: the wire]
A payload is one flat integer tensor: for each slot of the receiver the lengths of the sender's bags `(S, B)`, then the
ids slot by slot (relative to their row block), then the weights' bits when there are any. Words are 32-bit unless a
table has more rows or is float64. Sizes travel before, in a header of fixed size.
The order of keys is taken from every batch; what depends on it is compiled once for each order met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from sharders.embedding.lookup.bucketize import Bucketizer
from sharders.embedding.placement import Placement

_MAX_ORDERS = 16  # of keys, that are kept compiled


@dataclass
class Batch:
    """A batch as a module's adapter hands it in.

    Args:
        values: (N,) ids, key-major.
        lengths: (K, B) ids of each key and sample.
        key_of: for each feature the row of `lengths` that it reads.
        weights: (N,) per-id weights, or None.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    key_of: tuple[int, ...]
    weights: torch.Tensor | None
    counts: list[int]

    @property
    def batch_size(self) -> int:
        """Samples."""
        return self.lengths.shape[1]

    @property
    def wants_weight_gradient(self) -> bool:
        """Whether a backward pass will ask for the gradient of the weights."""
        return self.weights is not None and self.weights.requires_grad and torch.is_grad_enabled()


@dataclass
class Sent:
    """What a batch became.

    Args:
        payload: flat words, destination-major.
        words: of each destination.
        counts: for each destination the ids of each of its slots.
        spans: for each destination and slot where its ids' rows belong; see `Span`.
        split_positions: places of the ids of split features among the results' rows, in the order they were sent.
        weight_places: for each destination the places of its weights among the batch's; only where they get gradients.
    """

    payload: torch.Tensor
    words: list[int]
    counts: list[list[int]]
    spans: list[list[Span]]
    split_positions: torch.Tensor | None
    weight_places: list[torch.Tensor]


@dataclass(frozen=True)
class Span:
    """Places start..stop: of `Sent.split_positions` when `is_split`, else of the results' rows themselves."""

    is_split: bool
    start: int
    stop: int


@dataclass(frozen=True)
class _Compiled:
    """For one order of keys: rows of lengths for all slots, and (is_split, first, last) runs of ids, by destination."""

    rows: torch.Tensor
    runs: list[list[tuple[bool, int, int]]]
    sources: list[list[tuple[bool, int]]]


@dataclass
class _Split:
    """Ids of split features, ordered by (block, feature)."""

    values: torch.Tensor
    weights: torch.Tensor | None
    lengths: torch.Tensor
    starts: list[int]
    positions: torch.Tensor | None
    order: torch.Tensor | None  # where each was in the batch; only for gradients of weights


class InputDist:
    """Compiled input dist of one module.

    Args:
        placement: all slots of all ranks.
        destinations: table rank of each rank of the exchange.
        wide: use 64-bit words.
        unpooled: results are rows, not bags: remember where each id's row belongs.
        kernel: see `Bucketizer`.
    """

    def __init__(
        self,
        placement: Placement,
        destinations: Sequence[int],
        device: torch.device,
        wide: bool,
        unpooled: bool,
        kernel: str | None,
    ) -> None:
        self.placement = placement
        self.destinations = list(destinations)
        self.word = torch.int64 if wide else torch.int32
        self.unpooled = unpooled
        self._compiled: dict[tuple[int, tuple[int, ...]], _Compiled] = {}
        row_blocks = {f.index: placement.row_blocks[f.table] for f in placement.features}
        self.split_features = [f for f, blocks in row_blocks.items() if len(blocks) > 1]
        bounds = [[0, *(stop for _, stop in row_blocks[f])] for f in self.split_features]
        self._bucketizer = Bucketizer(bounds, device, kernel) if bounds else None
        self._in_split = {f: i for i, f in enumerate(self.split_features)}
        self._device = device

    def send(self, batch: Batch) -> Sent:
        """Payloads for every rank of the exchange; ids must be valid."""
        num_keys = batch.lengths.shape[0]
        key = (num_keys, batch.key_of)
        compiled = self._compiled.get(key) or self._keep(key, self._compile(num_keys, batch.key_of))
        values, weights = batch.values.to(self.word), self._bits(batch.weights)
        key_starts = [0, *accumulate(batch.counts)]
        out_starts = self._out_starts(batch) if self.unpooled else []
        lengths, split = batch.lengths.to(self.word), None
        if self._bucketizer is not None:
            split = self._split(self._bucketizer, batch, values, weights, key_starts, out_starts)
            lengths = torch.cat([lengths, split.lengths])
        lengths = lengths.index_select(0, compiled.rows)
        counts = lengths.sum(1).tolist()
        sent = Sent(values, [], [], [], split.positions if split else None, [])
        everywhere = torch.arange(values.numel(), device=self._device) if batch.wants_weight_gradient else None
        parts: list[torch.Tensor] = []
        at = 0
        for sources, runs in zip(compiled.sources, compiled.runs, strict=True):
            slot_counts = counts[at : at + len(sources)]
            parts.append(lengths[at : at + len(sources)].reshape(-1))
            at += len(sources)
            spans = [
                (is_split, *((split.starts if is_split and split else key_starts)[i] for i in (first, last + 1)))
                for is_split, first, last in runs
            ]
            for whole, cut in ((values, split and split.values), (weights, split and split.weights)):
                if whole is not None:
                    parts += [(cut if is_split else whole)[a:b] for is_split, a, b in spans]  # type: ignore[index]
            sent.counts.append(slot_counts)
            sent.words.append(len(sources) * batch.batch_size + sum(slot_counts) * (1 if weights is None else 2))
            if everywhere is not None:
                of_split = split.order if split else None
                pieces = [(of_split if is_split else everywhere)[a:b] for is_split, a, b in spans]  # type: ignore[index]
                sent.weight_places.append(torch.cat(pieces) if pieces else everywhere[:0])
            if self.unpooled:
                sent.spans.append(self._spans(sources, batch, split, out_starts, len(sent.spans)))
        sent.payload = torch.cat(parts) if parts else values[:0]
        return sent

    def _keep(self, key: tuple[int, tuple[int, ...]], compiled: _Compiled) -> _Compiled:
        """The oldest goes where there are too many: an order of keys that changes with every batch never comes back."""
        if len(self._compiled) >= _MAX_ORDERS:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[key] = compiled
        return compiled

    def receive(
        self, payload: torch.Tensor, words: Sequence[int], batch_sizes: Sequence[int], slots: int, weighted: bool
    ) -> Received:
        """Cut the payloads of all sources, which had these words and batch sizes, for this rank's `slots`."""
        lengths, ids, weights = [], [], []
        for part, batch_size in zip(payload.split(list(words)), batch_sizes, strict=True):
            head = slots * batch_size
            count = (part.numel() - head) // (2 if weighted else 1)
            lengths.append(part[:head].view(slots, batch_size))
            ids.append(part[head : head + count])
            weights.append(part[head + count :])
        return Received(lengths, ids, weights if weighted else None)

    def weights_of(self, bits: torch.Tensor) -> torch.Tensor:
        """Weights from the words that carried them."""
        return bits.view(torch.float64 if self.word == torch.int64 else torch.float32)

    def _bits(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        if weights is None:
            return None
        return (
            weights.detach()
            .to(torch.float64 if self.word == torch.int64 else torch.float32)
            .contiguous()
            .view(self.word)
        )

    def _compile(self, num_keys: int, key_of: tuple[int, ...]) -> _Compiled:
        rows: list[int] = []
        all_runs, all_sources = [], []
        for table_rank in self.destinations:
            runs: list[tuple[bool, int, int]] = []
            sources: list[tuple[bool, int]] = []
            for slot in self.placement.slots[table_rank]:
                is_split = slot.feature in self._in_split
                index = key_of[slot.feature]
                if is_split:
                    index = slot.row_block * len(self.split_features) + self._in_split[slot.feature]
                rows.append(num_keys + index if is_split else index)
                sources.append((is_split, index))
                if runs and runs[-1][0] == is_split and runs[-1][2] + 1 == index:
                    runs[-1] = (is_split, runs[-1][1], index)
                else:
                    runs.append((is_split, index, index))
            all_runs.append(runs)
            all_sources.append(sources)
        return _Compiled(torch.tensor(rows, dtype=torch.int64, device=self._device), all_runs, all_sources)

    def _split(
        self,
        bucketize: Bucketizer,
        batch: Batch,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        key_starts: list[int],
        out_starts: list[int],
    ) -> _Split:
        """Sort the ids of split features by block; inside a block they keep the order (feature, sample)."""
        keys = [batch.key_of[f] for f in self.split_features]
        moved = bucketize(
            take(values, keys, key_starts),
            batch.lengths[keys].to(self.word),
            with_order=self.unpooled or weights is not None,
        )
        starts = [0, *accumulate(moved.lengths.sum(1).tolist())]
        new_weights = None if weights is None else take(weights, keys, key_starts)[moved.order]
        positions = None
        if self.unpooled:
            assert moved.order is not None
            counts = [batch.counts[k] for k in keys]
            where = torch.tensor([out_starts[f] for f in self.split_features], device=self._device)
            before = torch.tensor([0, *accumulate(counts)][:-1], device=self._device)
            count = torch.tensor(counts, device=self._device)
            shift = (where - before).repeat_interleave(count, output_size=sum(counts))
            positions = moved.order + shift[moved.order]
        order = None
        if batch.wants_weight_gradient:
            order = take(torch.arange(values.numel(), device=self._device), keys, key_starts)[moved.order]
        return _Split(moved.values, new_weights, moved.lengths, starts, positions, order)

    def _out_starts(self, batch: Batch) -> list[int]:
        """First row of each feature among the results' rows of its table's dim."""
        at: dict[int, int] = {}
        starts = []
        for feature in self.placement.features:
            dim = self.placement.tables[feature.table].dim
            starts.append(at.get(dim, 0))
            at[dim] = starts[-1] + batch.counts[batch.key_of[feature.index]]
        return starts

    def _spans(
        self,
        sources: list[tuple[bool, int]],
        batch: Batch,
        split: _Split | None,
        out_starts: list[int],
        destination: int,
    ) -> list[Span]:
        spans = []
        slots = self.placement.slots[self.destinations[destination]]
        for slot, (is_split, index) in zip(slots, sources, strict=True):
            if is_split and split is not None:
                spans.append(Span(True, split.starts[index], split.starts[index + 1]))
            else:
                start = out_starts[slot.feature]
                spans.append(Span(False, start, start + batch.counts[index]))
        return spans


@dataclass
class Received:
    """Payloads of all sources, cut; `lengths[s]` is (S, B_s)."""

    lengths: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    _slot_major: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict
    )

    def slot_major(self, sources: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids (N,), lengths (S, sum of B) and weights of `sources`, slot by slot and in the order of `sources`.

        Kept for the backward pass, which mostly asks for the same sources.
        """
        key = tuple(sources)
        if key not in self._slot_major:
            self._slot_major[key] = self._to_slot_major(sources)
        return self._slot_major[key]

    def _to_slot_major(self, sources: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        lengths = torch.cat([self.lengths[s] for s in sources], dim=1)
        if len(sources) == 1:
            only = sources[0]
            return self.ids[only], lengths, self.weights[only] if self.weights else None
        slots = lengths.shape[0]
        sums = torch.stack([self.lengths[s].sum(1) for s in sources]).tolist()

        def by_slot(parts: list[torch.Tensor]) -> torch.Tensor:
            cut = [parts[s].split(sums[i]) for i, s in enumerate(sources)]
            pieces = [cut[i][slot] for slot in range(slots) for i in range(len(sources))]
            return torch.cat(pieces) if pieces else parts[0][:0]

        return by_slot(self.ids), lengths, by_slot(self.weights) if self.weights else None

    def counts(self, sources: Sequence[int]) -> list[list[int]]:
        """Ids of each source's slots."""
        sums: list[list[int]] = torch.stack([self.lengths[s].sum(1) for s in sources]).tolist()
        return sums


def take(values: torch.Tensor, keys: Sequence[int], key_starts: Sequence[int]) -> torch.Tensor:
    """Values of these keys, joined; a view when they are one run."""
    if not keys:
        return values[:0]
    if list(keys) == list(range(keys[0], keys[0] + len(keys))):
        return values[key_starts[keys[0]] : key_starts[keys[-1] + 1]]
    return torch.cat([values[key_starts[k] : key_starts[k + 1]] for k in keys])


@dataclass
class Call:
    """What one forward keeps for its backward: the batch, what it sent, and what all ranks sent here."""

    batch: Batch
    sent: Sent
    received: Received
    batch_sizes: list[int]
