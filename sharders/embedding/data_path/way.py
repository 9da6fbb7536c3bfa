"""A way: tables of pooled lookups whose results travel alike in a call, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from sharders.embedding.data_path.path import Trained
from sharders.embedding.data_path.whole import Whole, offsets, whole_of
from sharders.embedding.exchange.local_tables import TableStore
from sharders.embedding.exchange.output_dist import Beside
from sharders.embedding.exchange.peers import Peers, own_last
from sharders.embedding.exchange.phases import FORWARD, OUTPUT, phase
from sharders.embedding.ids.call import Call, once_per_call
from sharders.embedding.ids.input_dist import InputDist
from sharders.embedding.ids.received import joined
from sharders.embedding.lookup.kernels import MOST_APART, can_place
from sharders.embedding.lookup.numba_layout import ALL_BITS, int64, shift
from sharders.embedding.lookup.pages import to_write
from sharders.embedding.lookup.reads import Bags, Given, Segmented, Sources
from sharders.embedding.results.partials import Awaited, OwnedBags, Partials, PartialsPlan, elements_from, owned_bags
from sharders.embedding.results.pooled_output import Blocks, output_dists


@dataclass(frozen=True)
class Kind:
    """Which tables of a module go one way, and how.

    Args:
        peers: between whom. Partials go straight to the ranks of the samples.
        whole: tables whose lookups travel with all their columns.
        partial: tables whose lookups travel as partials.
    """

    peers: Peers
    whole: Collection[int]
    partial: Collection[int]


class Way:
    """Lookup, exchanges and update of some sharded tables.

    Args:
        kind: which.
        dtype, device: see `Path`.
    """

    def __init__(
        self, kind: Kind, store: TableStore, input_dist: InputDist, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.peers, self.store, self.input_dist, self.dtype, self.device = kind.peers, store, input_dist, dtype, device
        placement, peers = store.placement, kind.peers
        self.sources = tuple(peers.sources)
        self.pieces = placement.pieces(store.rank, kind.whole)
        """Slots here whose lookups travel whole."""
        self.whole = [w for tbe in store.sharded if (w := whole_of(store, tbe, kind.whole)).num_slots]
        slots, ends = [slot for piece in self.pieces for slot in piece], accumulate(of.num_slots for of in self.whole)
        self._slots = [slots[a:b] for a, b in pairwise([0, *ends])]
        """Of each of these its slots."""
        num_slots = len(placement.slots[store.rank])
        self._chosen = [int64([int(slot in of_whole) for slot in range(num_slots)]) for of_whole in self._slots]
        self.runs = store.runs_of(kind.partial)
        widths = [of.chunk.width for whole in self.whole for of in whole.lookup.ranges]
        self.width = sum(widths)
        """Columns of this rank's lookup."""
        self._placing = [of.lookup for of in self.whole if can_place(of.lookup, dtype)]
        self._places = len(self._placing) == len(self.whole)
        self._in_a_row = tuple(accumulate(widths, initial=0))[:-1]
        order = [peers.table_ranks[source] for source in peers.own]
        self.partials = PartialsPlan(placement, order, kind.partial, device) if kind.partial else None
        self.output_dists = output_dists(placement, peers, kind.whole, self.partials, store.kernel)
        self._own_partials = self._find_own_partials()

    def forward(
        self,
        call: Call,
        out: torch.Tensor,
        wants_landing: bool,
        meanwhile: Callable[[], None],
    ) -> Callable[[], None]:
        """Look up, and begin to give to the ranks of the samples, in the last exchange of this way.

        Args:
            out: (B, sum of dims), in whose other columns there are other tables' results.
            wants_landing: gradients come back, and no sums beside them.
            meanwhile: called when results are under way.

        Returns:
            What ends it.
        """
        dists, own = self.output_dists, self.peers.own
        others, mine = own[: -self.peers.outer.size], own[-self.peers.outer.size :]
        with phase(call.spent, FORWARD):
            partials = self._partials(call)
            memory, looked_up = self._look_up_others(call, others, partials)
        targets = [out]
        if len(dists) > 1:
            targets.insert(0, out.new_empty(sum(call.samples[s] for s in mine), dists[0].width))

        def look_up_own() -> torch.Tensor | None:
            with phase(call.spent, FORWARD):
                found = self._look_up_own(call, mine, targets[0])
            meanwhile()
            return found

        with phase(call.spent, OUTPUT):
            for i, (output_dist, target) in enumerate(zip(dists, targets, strict=True)):
                of_last = partials if target is out else None
                rows, blocks = self._rows(call, i), self._blocks(call, i)
                landing = None
                if wants_landing:
                    landing = output_dist.landing(rows, blocks, of_last, self.dtype, self.device)
                    call.kept["landing", self, i] = landing
                place = output_dist.forward(looked_up, look_up_own, target, rows, blocks, of_last, memory, landing)
                if target is not out:
                    place()
                    looked_up, of_host = target.tensor_split([len(target) - call.batch.batch_size])
                    look_up_own = lambda of_host=of_host: of_host  # type: ignore[misc]  # noqa: E731
        return place

    def send_back(
        self, call: Call, given: torch.Tensor, factor: float, beside: Beside | None
    ) -> Callable[[], torch.Tensor]:
        """Begin to send the gradients of the results back.

        Args:
            given: (B, sum of dims).
            factor: multiplies them.
            beside: travels with them.

        Returns:
            What ends it, and gives flat ones of what was looked up here for the own sources.
        """
        dists = self.output_dists
        last = len(dists) - 1
        rows, blocks = self._rows(call, last), self._blocks(call, last)
        landings = [call.kept.pop(("landing", self, i), None) for i in range(len(dists))]
        reads_given = self._reads_given(call, given)
        if reads_given:
            call.kept["given", self] = given, factor
        reads_partials = self._own_lengths(call) is not None
        if reads_partials:
            call.kept["given of partials", self] = given, factor
        of_call = beside, blocks, self._partials(call), landings[last], not reads_given, not reads_partials
        come = dists[last].backward(given, rows, factor, *of_call)
        if not last:
            return come

        def of_both() -> torch.Tensor:
            of_joined, blocks = come().view(sum(rows), dists[0].width), self._blocks(call, 0)
            return dists[0].backward(of_joined, self._rows(call, 0), 1.0, None, blocks, landing=landings[0])()

        return of_both

    def _reads_given(self, call: Call, given: torch.Tensor) -> bool:
        """Whether the update reads gradients of this rank's own samples where the model's backward left them.

        Of two ranks' 13.6 MB of gradients half was written and read once more. It pays where bags are short.
        """
        trained = [of.tbe.bank for of in self.whole if of.tbe.is_trainable]
        return (
            bool(trained)
            and not (call.wants_weight_gradient or call.has_sizes)
            and self.peers.outer.size == self.peers.num_replicas == 1
            and self._places
            and given.stride(1) == 1
            and not any(bank.clips for bank in trained)
            and self._saved(call, given.shape[0]) > 0
        )

    def _find_own_partials(self) -> tuple[range, tuple[int, ...]] | None:
        """See `PartialsPlan.own`; None where the update does not read their gradients in place."""
        plan, peers = self.partials, self.peers
        if plan is None or len(self.runs) != 1 or peers.outer.size > 1 or peers.num_replicas > 1:
            return None
        (run,) = self.runs
        return plan.own(run) if run.tbe.is_trainable and can_place(run.tbe.lookup, self.dtype) else None

    @once_per_call
    def _own_lengths(self, call: Call) -> torch.Tensor | None:
        """(slots, samples) of this rank's own bags of partials, whose gradients the update reads where the model's
        backward left them; None where they are packed as others' are.

        Of bags of one id, which are a row each: half of two ranks' gradients was written and read once more.
        """
        partials = self._partials(call)
        if self._own_partials is None or partials is None or call.wants_weight_gradient or call.has_sizes:
            return None
        (owned,), ((tbe, _, _),) = self._owned(call, self.sources), self.runs
        is_told = len(tbe.lookup.ranges) << shift(owned.num_bags + call.batch.batch_size) <= 1 << ALL_BITS
        if owned.bags is not None or tbe.bank.clips or not is_told:
            return None
        slots, _ = self._own_partials
        return partials.coming.lengths[slots.start : slots.stop].to(torch.int32)

    def _saved(self, call: Call, num_samples: int) -> float:
        """Nanoseconds of all lookups; see `PlacingLookup.saved_by_given`."""
        read = zip(self._placing, self._bags(call, self.sources), strict=True)
        return sum(lookup.saved_by_given(num_samples, bags.ids.numel()) for lookup, bags in read)

    def sizes(self, call: Call) -> list[int]:
        """Elements of the gradients from each of `sources`."""
        sources = self.sources
        of_partials = elements_from(self.runs, self._owned(call, sources)) or [0] * len(sources)
        return [call.samples[i] * self.width + n for i, n in zip(sources, of_partials, strict=True)]

    def train(self, call: Call, grad: torch.Tensor) -> Trained:
        """See `Path`; flat gradients of all `sources`."""
        sources = self.sources
        given, factor = call.kept.pop(("given", self), (None, 1.0))
        of_partials = call.kept.pop(("given of partials", self), None)
        apart, clips = self._apart(call) is not None, any(of.tbe.bank.clips for of in self.whole)
        as_it_lies = apart and not clips  # which may be asked for since the forward
        lookup, of_runs = self._cut(call, grad, sources, (given is None, of_partials is None), as_it_lies)
        orders, at = iter(self.order(call)), 0
        for (tbe, of_whole, num_slots), columns, bags in self._by_whole(call, lookup, sources):
            own = self.output_dists[0].columns_read[at : at + num_slots]
            at += num_slots
            if not tbe.is_trainable:
                continue
            train = of_whole.gradient_pooled if tbe.bank.spec is None else of_whole.update_pooled
            where = {"given": Given(given, own, factor)} if given is not None else {}
            order = next(orders)
            yield tbe, train(columns, bags, order=order if as_it_lies == apart else None, **where)
        for (tbe, _, _), rows, owned in zip(self.runs, of_runs, self._owned(call, sources), strict=True):
            if tbe.is_trainable:
                learn = tbe.lookup.gradient_rows if tbe.bank.spec is None else tbe.lookup.update_rows
                where = {}
                if of_partials is not None and self._own_partials is not None:
                    matrix, factor = of_partials
                    rows = tbe.bank.clipped(rows)  # since the forward, that it asks for it
                    where = {"given": Given(tbe.bank.clipped(matrix, factor), self._own_partials[1], factor)}
                yield tbe, learn(rows, owned.read(), order=next(orders), **where)

    def read_to_train(self, call: Call) -> None:
        """Read all that `train` wants of what has come."""
        self._bags(call, self.sources)
        self._owned(call, self.sources)

    @once_per_call
    def order(self, call: Call) -> list[Any]:
        """Of each lookup that `train` updates; see `Lookup`."""
        sources = self.sources
        whole = zip(self.whole, self._bags(call, sources), strict=True)
        how = {} if (apart := self._apart(call)) is None else {"sources": apart}
        found = [of.lookup.order_pooled(bags, **how) for of, bags in whole if of.tbe.is_trainable]
        of_runs = zip(self.runs, self._owned(call, sources), strict=True)
        own = self._own_lengths(call)
        last = {} if own is None else {"last": own}
        return found + [run.tbe.lookup.order_rows(bags.read(), **last) for run, bags in of_runs if run.tbe.is_trainable]

    @once_per_call
    def _apart(self, call: Call) -> Sources | None:
        """Where gradients of lookups lie, with those of partials between them, for the update to read them there; None
        where they are put together."""
        are_few = len(self.sources) <= 1 + MOST_APART
        reads = are_few and self.runs and self.width and self._places and self.peers.num_replicas == 1
        if not reads or call.wants_weight_gradient or any(of.tbe.bank.clips for of in self.whole):
            return None
        samples = tuple(call.samples[i] for i in self.sources)
        sources = Sources(samples, tuple(accumulate(self.sizes(call)[:-1], initial=0)), self.width)
        is_in_one = len(samples) <= 2 and self._saved(call, samples[-1]) > 0  # and the update reads this rank's own
        return None if is_in_one or not all(of.can_order(sources) for of in self._placing) else sources

    def weight_gradients(self, call: Call, grad: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(source, slot, gradients of its weights) of each of the own sources and each slot here.

        Args:
            grad: flat, of what was looked up here for them.
        """
        sources, counts = tuple(self.peers.own), self.input_dist.receive(call).counts
        lookup, of_runs = self._cut(call, grad, sources)
        slots = [slot for piece in self.pieces for slot in piece]
        for (_, of_whole, num_slots), columns, bags in self._by_whole(call, lookup, sources):
            found = of_whole.gradient_weights(columns, bags).to(self.dtype)
            places = [(source, slot) for slot in slots[:num_slots] for source in sources]
            parts = found.split([counts[source][slot] for source, slot in places])
            yield from ((*place, part) for place, part in zip(places, parts, strict=True))
            slots = slots[num_slots:]
        for run, rows, owned in zip(self.runs, of_runs, self._owned(call, sources), strict=True):
            read = Segmented(owned.ids, owned.segments, owned.bounds())
            found = run.tbe.lookup.gradient_row_weights(rows, read).to(self.dtype)
            places = [(source, slot) for source in sources for slot in run.slots]
            parts = found.split([counts[source][slot] for source, slot in places])
            yield from ((*place, part) for place, part in zip(places, parts, strict=True))

    def _look_up_others(
        self, call: Call, sources: Sequence[int], partials: Partials | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Memory that travels, with what was looked up for these sources; else that, as it is."""
        found, rows = None, self._rows(call, 0)
        if self._places and not call.has_sizes and (partials is None or len(sources) <= MOST_APART):
            found = self.output_dists[0].memory(rows, self.dtype, self.device, partials)
        if found is None:
            return None, self._look_up(call, sources)
        memory, places = found
        of_places = [sources] if len(places) == 1 else [[source] for source in sources]
        for (num, at), of in zip(places, of_places, strict=True):
            if num:
                self._write(call, of, memory[at : at + num * self.width].view(num, self.width), self._in_a_row)
        return memory, None

    def _look_up(self, call: Call, sources: Sequence[int]) -> torch.Tensor:
        """(samples of these sources, which are neighbours; columns of this rank's slots)."""
        rows = sum(call.samples[s] for s in sources)
        if not rows or not self.width:
            return torch.zeros(rows, self.width, dtype=self.dtype, device=self.device)
        if self._places:
            out = to_write(torch.empty(rows, self.width, dtype=self.dtype, device=self.device))
            self._write(call, sources, out, self._in_a_row)
            return out
        read = zip(self.whole, self._bags(call, tuple(sources)), strict=True)
        return joined([whole.lookup.pooled(bags).to(self.dtype) for whole, bags in read], 1)

    def _look_up_own(self, call: Call, sources: Sequence[int], target: torch.Tensor) -> torch.Tensor | None:
        """What was looked up here for this rank's own samples, where it does not lie in the target already."""
        columns = self.output_dists[0].own_columns
        if not self._places or columns is None:
            return self._look_up(call, sources)
        if target.shape[0]:
            self._write(call, sources, target, columns)
        return None

    def _write(self, call: Call, sources: Sequence[int], out: torch.Tensor, columns: tuple[int, ...]) -> None:
        """Look up for these sources, into columns of `out`."""
        starts = [*accumulate((call.samples[s] for s in self.sources), initial=0)]
        first = self.sources.index(sources[0])
        samples, at = range(starts[first], starts[first + len(sources)]), 0
        for lookup, bags in zip(self._placing, self._bags(call, self.sources), strict=True):
            num_slots = len(lookup.ranges)
            lookup.pooled_to(bags, samples, out, columns[at : at + num_slots])
            at += num_slots

    def _cut(
        self,
        call: Call,
        grad: torch.Tensor,
        sources: tuple[int, ...],
        with_own: tuple[bool, bool] = (True, True),
        as_it_lies: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients of this rank's lookup (samples, width), and of each run of partials (bags, width).

        Args:
            with_own: of the lookup, and of partials; else nobody reads those of this rank's own samples, the last.
            as_it_lies: of the lookup all is given, with what lies between; see `_apart`.
        """
        samples = [call.samples[i] for i in sources]
        if not self.runs:
            return grad.view(sum(samples), self.width), []
        if not self.width and len(self.runs) == 1:
            return grad.new_empty(sum(samples), 0), [grad.view(-1, self.runs[0].width)]
        of_runs = [
            [n * run.width for n, _, _ in bags.of_sources]
            for run, bags in zip(self.runs, self._owned(call, sources), strict=True)
        ]
        of_lookup = [n * self.width for n in samples]
        cut = grad.split([n for of_source in zip(of_lookup, *of_runs, strict=True) for n in of_source])
        read = slice(None if with_own[1] else -1)
        runs = [joined(cut[i :: 1 + len(of_runs)][read]) for i in range(1, 1 + len(of_runs))]
        by_run = [flat.view(-1, run.width) for run, flat in zip(self.runs, runs, strict=True)]
        if as_it_lies:
            rows = grad.numel() // self.width
            return grad[: rows * self.width].view(rows, self.width), by_run
        of_sources = cut[:: 1 + len(of_runs)]
        if with_own[0] or len(sources) > 2:
            return torch.cat(of_sources).view(sum(samples), self.width), by_run
        # Those of the other lie in front; behind them there is something, which is not read.
        return grad[: sum(of_lookup)].view(sum(samples), self.width), by_run

    def _by_whole(
        self, call: Call, grad: torch.Tensor, sources: tuple[int, ...]
    ) -> Iterator[tuple[Whole, torch.Tensor, Bags]]:
        """Each lookup that travels whole, its columns of the gradient, and its bags."""
        widths = [whole.lookup.num_columns for whole in self.whole]
        columns = grad.split(widths, 1) if len(widths) > 1 else [grad][: len(widths)]
        yield from zip(self.whole, columns, self._bags(call, sources), strict=True)

    def _bags(self, call: Call, sources: tuple[int, ...]) -> list[Bags]:
        """Bags of each lookup that travels whole; those that `train` needs are kept."""
        if not self.whole:
            return []
        return self._trained_bags(call) if sources == self.sources else self._bags_of(call, sources)

    @once_per_call
    def _trained_bags(self, call: Call) -> list[Bags]:
        return self._bags_of(call, self.sources)

    def _bags_of(self, call: Call, sources: tuple[int, ...]) -> list[Bags]:
        received = self.input_dist.receive(call)
        if self.input_dist.are_words_compiled and len(sources) > 1:
            of_whole = zip(self.whole, self._slots, self._chosen, strict=True)
            return [received.bags_of(sources, slots, of, w.tbe.bank.weights.dtype) for w, slots, of in of_whole]
        ids, lengths, weights = received.slot_major(sources, self.pieces)
        counts = [sum(received.counts[s][slot] for s in sources) for piece in self.pieces for slot in piece]
        starts = [0, *accumulate(counts)]
        result, first = [], 0
        for tbe, _, num_slots in self.whole:
            stop = first + num_slots
            of_lookup = slice(starts[first], starts[stop])
            reals = None if weights is None else weights[of_lookup].to(tbe.bank.weights.dtype)
            result.append(Bags(ids[of_lookup], offsets(lengths[first:stop]), reals))
            first = stop
        return result

    @once_per_call
    def _owned(self, call: Call, sources: tuple[int, ...]) -> list[OwnedBags]:
        """Bags of each run of partials."""
        received = self.input_dist.receive(call)
        return [owned_bags(received, run, sources) for run in self.runs]

    @once_per_call
    def _partials(self, call: Call) -> Partials | None:
        """Those of the own sources."""
        plan = self.partials
        if plan is None:
            return None
        sent, own = call.sent, self.peers.own
        of_ranks = [(i, piece) for i, pieces in zip(own, plan.slots, strict=True) for piece in pieces]
        lengths = [sent.lengths[i][piece.start : piece.stop] for i, piece in of_ranks]
        bags = [n for i, piece in of_ranks for n in sent.bags[i][piece.start : piece.stop]]
        coming = Awaited(plan, lengths, bags, call.batch.shortest > 0)
        return Partials(self.runs, self._owned(call, tuple(own)), coming, self.dtype, call.spent)

    def _rows(self, call: Call, index: int) -> list[int]:
        """Samples of each rank of an output dist: what is sent to it, and what it has sent."""
        size = [call.samples[i] for i in self.peers.by_table_rank]
        inner, outer = self.peers.inner, self.peers.outer
        if outer.size == 1:
            return size
        if index == 0:
            return [sum(size[h * inner.size + i] for h in range(outer.size)) for i in range(inner.size)]
        return [size[h * inner.size + inner.rank] for h in range(outer.size)]

    def _blocks(self, call: Call, index: int) -> Blocks:
        """Of each rank of an output dist; None where every batch has one size for all features."""
        if not call.has_sizes:
            return None
        size = [call.batch_sizes[i] for i in self.peers.by_table_rank]
        inner, outer = self.peers.inner, self.peers.outer
        if outer.size == 1:
            return [[of_rank] for of_rank in size]
        if index == 0:
            return [[size[h * inner.size + i] for h in own_last(outer)] for i in range(inner.size)]
        return [[size[h * inner.size + inner.rank]] for h in range(outer.size)]
