"""Input dist: a batch's ids become one payload for each rank, and payloads received become what the lookup reads.

[Note: the wire]
A payload is one flat integer tensor: for each slot of the receiver the lengths of the sender's bags `(S, B)`, or the
number of its ids `(S, 1)` where results are rows; then the ids slot by slot (relative to their row block), then the
weights' bits when there are any; on two shard axes last the tables whose bags may go straight, see stages.py. Words are
32-bit unless a table has more rows or is float64. Sizes travel before, in a header of fixed size, or right in front.
The order of keys is taken from every batch; what depends on it is compiled once for each order met.

[Note: distinct rows]
Where results are rows, a rank may send an id once for each row that its batch names (`lookup/distinct.py`): the row
comes back once and is put to the places of all its ids, and their gradients are summed before they go to its owner. He
need not know: what he gets are ids. Each rank decides by itself, for each key or (row block, feature), by whether ids
come again; not where nothing travels, nor where an optimizer clamps gradients before they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from sharders.embedding.batches.batch import Batch
from sharders.embedding.exchange.peers import Peers
from sharders.embedding.exchange.placement import Placement, Slot
from sharders.embedding.exchange.stages import TwoStages
from sharders.embedding.ids.call import Call, Places, Sent, Span, once_per_call
from sharders.embedding.ids.header import HEAD_BYTES, go_along
from sharders.embedding.ids.packing import Packable, Packing
from sharders.embedding.ids.received import Received, is_even
from sharders.embedding.lookup.bag_counts import bag_counts
from sharders.embedding.lookup.bucketize import Bucketizer
from sharders.embedding.lookup.distinct import distinct_rows
from sharders.embedding.lookup.numba_kernel import may_run

MOST_FILLED = 0.7
"""Of the bags of a row block those that have ids in it, for partials to travel; where most have, all columns cost less
to look up and to place. On two shard axes, of the elements that travel in two stages; see stages.py."""
_MAX_ORDERS = 16  # of keys, that are kept compiled


@dataclass(frozen=True)
class _Compiled:
    """For one order of keys: rows of lengths for all slots, and (is_split, first, last) runs of ids, by destination.

    `num_rows`: of each key, and of each (row block, split feature), as many as its ids address; 0 where nobody is sent
    them. `packing`: where one call packs all. `of_segments`: of a (row block, split feature) a (destination, slot).
    """

    rows: torch.Tensor
    runs: list[list[tuple[bool, int, int]]]
    sources: list[list[tuple[bool, int]]]
    num_rows: tuple[list[int], list[int]]
    packing: Packing | None
    of_segments: dict[int, tuple[int, int]]

    @cached_property
    def sources_are_split(self) -> bool:
        """Those of the first slot; where results are rows and one call packs all, of every slot."""
        return next(is_split for of_rank in self.sources for is_split, _ in of_rank)

    @cached_property
    def in_order(self) -> tuple[list[list[tuple[bool, int]]], list[list[tuple[bool, int, int]]]]:
        """`sources` and `runs` of ids that are in the order of all slots."""
        ends = [*accumulate(map(len, self.sources), initial=0)]
        sources = [[(False, i) for i in range(a, b)] for a, b in pairwise(ends)]
        return sources, [[(False, a, b - 1)] if a < b else [] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class _Ordered:
    """Ids in one order: by key, or those of split features by (row block, feature), each a segment of `counts`.

    Args:
        lengths: (segments, B).
        bags: with ids, in each segment; of split features that travel as partials.
        places: where each was in the batch; only for gradients of weights.
        rows: int32, where the row of each belongs among the results'; only of split features, and unpooled.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    lengths: torch.Tensor
    counts: Sequence[int]
    starts: list[int]
    bags: Sequence[int] = ()
    places: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def chosen(self, segments: torch.Tensor) -> _Ordered:
        """These segments, of ids of which all segments have as many: one operation, where cuts are one for each."""
        num, count = len(self.counts), self.counts[0]
        values, weights, places = (
            None if ids is None else ids.view(num, count).index_select(0, segments).view(-1)
            for ids in (self.values, self.weights, self.places)
        )
        assert values is not None
        counts = [count] * len(segments)
        starts = [*range(0, values.numel() + 1, count)]
        return _Ordered(values, weights, self.lengths, counts, starts, places=places)


class _SentIds(NamedTuple):
    """What is sent of ids in one order: as they are, or distinct rows.

    Args:
        counts: of each segment, which starts at `starts`.
        places: None where they are as they are, by key.
    """

    values: torch.Tensor
    counts: Sequence[int]
    starts: list[int]
    places: Places | None


class InputDist:
    """Compiled input dist of one module.

    Args:
        placement: all slots of all ranks.
        peers: to whom ids are sent.
        wide: use 64-bit words.
        unpooled: results are rows, not bags: remember where each id's row belongs.
        kernel: see `Bucketizer`.
        sums_first: whether the gradients of a row may be summed before they are sent.
    """

    def __init__(
        self,
        placement: Placement,
        peers: Peers,
        device: torch.device,
        wide: bool,
        unpooled: bool,
        kernel: str | None,
        sums_first: Callable[[], bool],
    ) -> None:
        self.placement = placement
        self.destinations = peers.table_ranks
        self.num_slots = len(placement.slots[peers.table.rank])
        self.word = torch.int64 if wide else torch.int32
        self.real = torch.float64 if wide else torch.float32  # of weights, as wide as a word
        self.unpooled = unpooled
        self._compiled: dict[tuple[int, tuple[int, ...]], _Compiled] = {}
        row_blocks = {f.index: placement.row_blocks[f.table] for f in placement.features}
        self.split_features = [f for f, blocks in row_blocks.items() if len(blocks) > 1]
        bounds = [[0, *(stop for _, stop in row_blocks[f])] for f in self.split_features]
        self._bucketizer = Bucketizer(bounds, device, kernel) if bounds else None
        self._num_blocks = max(map(len, bounds), default=1) - 1
        self._by_partials = any(placement.by_partials)
        self._in_split = {f: i for i, f in enumerate(self.split_features)}
        self.goes_along = go_along(peers.headers, device)
        """Whether payloads travel with their headers, for which there is room in front of each."""
        self._head = HEAD_BYTES // self.word.itemsize * self.goes_along
        self._channel, self._device = peers.headers if self.goes_along else peers.exchange, device
        self._compiles = may_run(kernel, device)
        self.are_words_compiled = self._compiles and not wide
        """Whether compiled code reads what comes."""
        can_join = unpooled and peers.exchange.size > 1 and self._compiles
        self._joins = sums_first if can_join else lambda: False
        self._two_stages = None if peers.outer.size == 1 or not self._by_partials else self._staged(peers)
        of_cpu = self._compiles and not wide and any(placement.slots)
        self._packs = of_cpu and (unpooled or Packing.can(bounds))
        self._num_segments = self._num_blocks * len(self.split_features)

    def send(self, batch: Batch, with_places: bool) -> tuple[torch.Tensor, list[int], Sent]:
        """The payloads for every rank of the exchange, one after the other, their words, and what is to be known later.

        Args:
            batch: checked.
            with_places: the weights get gradients, so remember where each was.
        """
        compiled = self._compiled_for(batch)
        weights = batch.weights
        bits = None if weights is None else weights.detach().to(self.real).contiguous().view(self.word)
        if compiled.packing is not None and not (self.unpooled or with_places) and batch.values.device.type == "cpu":
            return self._pack(compiled, compiled.packing, batch, bits)
        by_key = _Ordered(
            batch.values.to(self.word),
            bits,
            batch.lengths if self.unpooled and self._bucketizer is None else batch.lengths.to(self.word),
            batch.counts,
            batch.starts,
            places=batch.places if with_places else None,
        )
        row_starts = self._row_starts(batch) if self.unpooled else []
        orders = [by_key]
        if self._bucketizer is not None:
            orders.append(self._split(self._bucketizer, batch, by_key, row_starts))
        if self.unpooled:
            return self._send_for_rows(batch, compiled, orders, row_starts)
        lengths = torch.cat([ids.lengths for ids in orders]) if len(orders) > 1 else by_key.lengths
        lengths = lengths.index_select(0, compiled.rows)
        is_sparse, marks = self._settled(orders[-1].bags, batch.batch_size)
        sent = Sent([], [], [], [], [], is_sparse, [], [])
        of_slots = compiled.sources, compiled.runs
        if len(orders) == 1 and is_even(batch.counts):
            orders, of_slots = [by_key.chosen(compiled.rows)], compiled.in_order
        parts: list[torch.Tensor] = []
        words: list[int] = []
        at = 0
        for sources, runs in zip(*of_slots, strict=True):
            counts = [orders[is_split].counts[index] for is_split, index in sources]
            cuts = [(orders[s], orders[s].starts[first], orders[s].starts[last + 1]) for s, first, last in runs]
            sent.lengths.append(lengths[at : at + len(sources)])
            of_rank = [sent.lengths[-1].reshape(-1), *(ids.values[a:b] for ids, a, b in cuts)]
            of_rank += [ids.weights[a:b] for ids, a, b in cuts if ids.weights is not None]
            at += len(sources)
            words.append(len(sources) * batch.batch_size + sum(counts) * (1 if bits is None else 2) + self._num_marks)
            parts += self._in_its_room([*of_rank, *marks], words[-1])
            sent.counts.append(counts)
            if self._by_partials:
                sent.bags.append([orders[1].bags[index] if is_split else 0 for is_split, index in sources])
            if with_places:
                places = [ids.places[a:b] for ids, a, b in cuts if ids.places is not None]
                sent.weight_places.append(torch.cat(places) if places else batch.places[:0])
        return self._payload(parts, words), words, sent

    def _pack(
        self, compiled: _Compiled, packing: Packing, batch: Batch, bits: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[int], Sent]:
        """The same by one compiled call."""
        room = packing.room(batch.counts, batch.batch_size, bits is not None)
        memory = self._channel.empty(room, self.word, self._device)
        packed = packing(batch, bits, self._by_partials, memory)
        filled = [0] * self._num_segments
        for segment, (rank, slot) in compiled.of_segments.items():
            filled[segment] = packed.bags[rank][slot]
        is_sparse, marks = self._settled(filled, batch.batch_size)
        for of_marks in marks:
            for end in packed.ends:
                memory[end - len(of_marks) : end].copy_(of_marks)
        bags = packed.bags if self._by_partials else []
        sent = Sent(packed.counts, [], [], [], [], is_sparse, packed.lengths, bags)
        return memory[: packed.filled], packed.words, sent

    def room_for(self, words: int) -> int:
        """Of a payload, for the head in front, and filled up to 8 bytes, where it goes along with its header."""
        return -(-(self._head + words) // 2) * 2 if self.goes_along else words

    def _in_its_room(self, parts: list[torch.Tensor], words: int) -> list[torch.Tensor]:
        """A payload's parts, of so many words, and what is around them."""
        if not self.goes_along:
            return parts
        filling = parts[0].new_empty(self._head), parts[0].new_empty(self.room_for(words) - words - self._head)
        return [filling[0], *parts, filling[1]]

    def _payload(self, parts: Sequence[torch.Tensor], words: Sequence[int]) -> torch.Tensor:
        """The parts, of the payloads of so many words, in memory that they are sent from."""
        count = sum(map(self.room_for, words))
        memory = self._channel.empty(count, self.word, self._device)
        return torch.cat(list(parts), out=memory) if count else memory

    def _send_for_rows(
        self, batch: Batch, compiled: _Compiled, orders: list[_Ordered], row_starts: list[int]
    ) -> tuple[torch.Tensor, list[int], Sent]:
        """The same where results are rows."""
        joins = self._joins()
        sent_ids = [
            _sent_ids(ids, num_rows if joins else []) for ids, num_rows in zip(orders, compiled.num_rows, strict=False)
        ]
        sent = Sent([], [], row_starts, [ids.places for ids in sent_ids], [], False, [], [])
        for table_rank, sources in zip(self.destinations, compiled.sources, strict=True):
            spans = []
            for slot, (is_split, index) in zip(self.placement.slots[table_rank], sources, strict=True):
                of_rows, of_ids = sent_ids[is_split].starts, orders[is_split].starts
                first = of_ids[index]
                shift = 0 if is_split else row_starts[slot.feature] - first
                rows, ids = range(of_rows[index], of_rows[index + 1]), range(first, of_ids[index + 1])
                spans.append(Span(is_split, rows, ids, shift))
            sent.spans.append(spans)
        if compiled.packing is not None and batch.values.device.type == "cpu":
            values, counts, starts, _ = sent_ids[compiled.sources_are_split]
            memory = self._channel.empty(compiled.packing.room(counts, 1, False), self.word, self._device)
            packed = compiled.packing.ids_alone(values, counts, starts, memory)
            sent.counts.extend(packed.counts)
            return memory[: packed.filled], packed.words, sent
        for sources in compiled.sources:
            sent.counts.append([sent_ids[is_split].counts[index] for is_split, index in sources])
        numbers = torch.tensor([n for counts in sent.counts for n in counts], dtype=self.word, device=self._device)
        words = [len(counts) + sum(counts) for counts in sent.counts]
        parts: list[torch.Tensor] = []
        for of_rank, runs, num in zip(numbers.split([*map(len, sent.counts)]), compiled.runs, words, strict=True):
            cuts = [(sent_ids[s], sent_ids[s].starts[first], sent_ids[s].starts[last + 1]) for s, first, last in runs]
            parts += self._in_its_room([of_rank, *(ids.values[a:b] for ids, a, b in cuts)], num)
        return self._payload(parts, words), words, sent

    def _compiled_for(self, batch: Batch) -> _Compiled:
        """The oldest goes where there are too many: an order of keys that changes with every batch never comes back."""
        key = (len(batch.counts), batch.key_of)
        if key not in self._compiled:
            if len(self._compiled) >= _MAX_ORDERS:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = self._compile(*key)
        return self._compiled[key]

    @once_per_call
    def receive(self, call: Call) -> Received:
        """What all ranks have sent here, once it has come."""
        weighted = call.batch.weights is not None and not self.unpooled
        lengths, ids, weights, straight = [], [], [], frozenset[int]()
        came, stop = call.payload.wait(), 0
        del call.kept["payload"]
        num_marks, ends = self._num_marks, []
        for words, samples in zip(call.words, call.samples, strict=True):
            first, stop = stop + self._head, stop + self.room_for(words)
            start = first + self.num_slots * (1 if self.unpooled else samples)
            end = first + words - num_marks
            ends.append(first + words)
            count = (end - start) // (2 if weighted else 1)
            lengths.append(came[first:start].view(self.num_slots, -1 if start > first else samples))
            ids.append(came[start : start + count])
            if weighted:
                weights.append(came[start + count : end].view(self.real))
        if self._two_stages is not None:
            straight = self._two_stages.agreed(came, ends)
        counts, bags = zip(*bag_counts(lengths, self._compiles), strict=True)
        return Received(lengths, ids, weights if weighted else None, [*counts], [*bags], straight)

    def _compile(self, num_keys: int, key_of: tuple[int, ...]) -> _Compiled:
        rows: list[int] = []
        all_runs, all_sources = [], []
        num_rows = [0] * num_keys, [0] * (self._num_blocks * len(self.split_features))
        for table_rank in self.destinations:
            runs: list[tuple[bool, int, int]] = []
            sources: list[tuple[bool, int]] = []
            for slot in self.placement.slots[table_rank]:
                segment = self._segment(slot)
                is_split = segment is not None
                index = key_of[slot.feature] if segment is None else segment
                rows.append(num_keys + index if is_split else index)
                sources.append((is_split, index))
                num_rows[is_split][index] = min(num_rows[is_split][index] or slot.rows, slot.rows)
                if runs and runs[-1][0] == is_split and runs[-1][2] + 1 == index:
                    runs[-1] = (is_split, runs[-1][1], index)
                else:
                    runs.append((is_split, index, index))
            all_runs.append(runs)
            all_sources.append(sources)
        all_rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        of_segments: dict[int, tuple[int, int]] = {}
        for rank, sources in enumerate(all_sources):
            for number, (is_split, index) in enumerate(sources):
                if is_split:
                    of_segments.setdefault(index, (rank, number))
        packing = None
        of_ranks = [self.placement.slots[table_rank] for table_rank in self.destinations]
        if self._packs and not self.unpooled:
            packed = [[self._packable(key_of, slot) for slot in of] for of in of_ranks]
            packing = Packing(packed, self._head, self._num_marks)
        elif self._packs and len({is_split for sources in all_sources for is_split, _ in sources}) == 1:
            of_all = zip(of_ranks, all_sources, strict=True)
            whole = [[Packable(slot.feature, i, 0, -1) for slot, (_, i) in zip(*of, strict=True)] for of in of_all]
            packing = Packing(whole, self._head)
        return _Compiled(all_rows, all_runs, all_sources, num_rows, packing, of_segments)

    def _packable(self, key_of: tuple[int, ...], slot: Slot) -> Packable:
        rows = self.placement.row_blocks[slot.table][slot.row_block] if slot.feature in self._in_split else (0, -1)
        return Packable(slot.feature, key_of[slot.feature], *rows)

    def _split(self, bucketize: Bucketizer, batch: Batch, by_key: _Ordered, row_starts: list[int]) -> _Ordered:
        """Sort the ids of split features by row block; inside one they keep the order (feature, sample)."""
        keys, shifts = [batch.key_of[f] for f in self.split_features], None
        if self.unpooled:
            # An id's place among its feature's ids is kept, while the feature's first row differs from its first id.
            first_ids = accumulate((batch.counts[k] for k in keys), initial=0)
            shifts = [row_starts[f] - first for f, first in zip(self.split_features, first_ids, strict=False)]
        moved = bucketize(
            take(by_key.values, keys, batch.starts),
            by_key.lengths if keys == list(range(len(batch.counts))) else by_key.lengths[keys],
            with_order=by_key.weights is not None or by_key.places is not None,
            shifts=shifts,
        )
        ((counts, bags),) = bag_counts([moved.lengths], self._compiles)
        weights = None if by_key.weights is None else moved.moved(take(by_key.weights, keys, batch.starts))
        places = None if by_key.places is None else moved.moved(take(by_key.places, keys, batch.starts))
        starts = [0, *accumulate(counts)]
        return _Ordered(moved.values, weights, moved.lengths, counts, starts, bags, places, moved.rows)

    def _staged(self, peers: Peers) -> TwoStages:
        segments = [[self._segment(slot) for slot in of_rank] for of_rank in self.placement.slots]
        return TwoStages(self.placement, peers.table.rank, peers.inner.size, segments)

    def _segment(self, slot: Slot) -> int | None:
        """Of a split feature's slot its (row block, feature)."""
        feature = self._in_split.get(slot.feature)
        return None if feature is None else slot.row_block * len(self.split_features) + feature

    @property
    def _num_marks(self) -> int:
        """Words for the tables whose bags may go straight."""
        return 0 if self._two_stages is None else self._two_stages.num_words

    def _settled(self, bags: Sequence[int], samples: int) -> tuple[bool, list[torch.Tensor]]:
        """Whether this rank has all bags over row blocks travel as partials, and the words for some of them.

        Args:
            bags: with ids, of each (row block, split feature).
            samples: of this rank.
        """
        if self._two_stages is not None:
            is_all, tables = self._two_stages.settle(bags, samples, MOST_FILLED)
            return is_all, [self._two_stages.words(tables, self.word, self._device)]
        return self._by_partials and sum(bags) <= MOST_FILLED * len(bags) * samples, []

    def _row_starts(self, batch: Batch) -> list[int]:
        """First row of each feature among the results' rows of its table's dim."""
        at: dict[int, int] = {}
        starts = []
        for feature in self.placement.features:
            dim = self.placement.tables[feature.table].dim
            starts.append(at.get(dim, 0))
            at[dim] = starts[-1] + batch.counts[batch.key_of[feature.index]]
        return starts


def _sent_ids(ids: _Ordered, num_rows: Sequence[int]) -> _SentIds:
    """What is sent of ids whose results are rows.

    Args:
        num_rows: of each segment; none at all where they stay as they are.
    """
    found = distinct_rows(ids.values, ids.counts, num_rows, ids.rows) if any(num_rows) else None
    if found is None:
        return _SentIds(ids.values, ids.counts, ids.starts, None if ids.rows is None else Places(ids.rows, None))
    starts = [0, *accumulate(found.counts)]
    return _SentIds(found.values, found.counts, starts, Places(found.places, found.times, found.bounds))


def take(values: torch.Tensor, keys: Sequence[int], key_starts: Sequence[int]) -> torch.Tensor:
    """Values of these keys, joined; a view when they are one run."""
    if not keys:
        return values[:0]
    if list(keys) == list(range(keys[0], keys[0] + len(keys))):
        return values[key_starts[keys[0]] : key_starts[keys[-1] + 1]]
    return torch.cat([values[key_starts[k] : key_starts[k + 1]] for k in keys])
