"""Unpooled lookups: each id becomes a row, which goes back to the place its id came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dmp import ShardError
from sharders.embedding.batches.batch import Batch
from sharders.embedding.data_path.path import Path, Returned, Trained
from sharders.embedding.exchange.output_dist import Beside
from sharders.embedding.exchange.phases import FORWARD, INPUT, OUTPUT, phase
from sharders.embedding.ids.call import Call, Span, once_per_call
from sharders.embedding.ids.received import joined
from sharders.embedding.lookup.reads import Segmented
from sharders.embedding.lookup.torch_kernel import Into, RowGradients
from sharders.embedding.results.row_places import RowPlaces, RowsBack, row_places
from sharders.embedding.results.unpooled_output import UnpooledOutputDist


class UnpooledPath(Path[list[torch.Tensor]]):
    """Every id's row; see `Path`. What is sent to a source is its rows run by run, see `SlotRun`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        peers = self.peers
        self.output_dist = UnpooledOutputDist(self.store.placement, peers.table, peers.codecs)
        self.runs = self.store.runs_of(range(len(self.store.placement.tables)))

    def forward(self, call: Call) -> list[torch.Tensor]:
        """For each feature its ids' rows (N_f, dim)."""
        with phase(call.spent, INPUT):
            self.input_dist.receive(call)
        own, by_rank = self.peers.own, self._by_rank(call)
        with phase(call.spent, FORWARD):
            count = sum(by_rank) - by_rank[self.peers.table.rank]
            others = self._look_up(call, tuple(own[:-1]), self.output_dist.memory(count, self.dtype, self.device))
            local = self._local_rows(call)

        def look_up_own(out: torch.Tensor) -> None:
            with phase(call.spent, FORWARD):
                found = self._look_up(call, tuple(own[-1:]), out)
                if found.data_ptr() != out.data_ptr():
                    out.copy_(found)

        landing = None
        if self.wants_landing(call):
            landing = self.output_dist.landing(by_rank, self.dtype, self.device)
            call.kept["landing"] = landing
        with phase(call.spent, OUTPUT):
            out = self.output_dist.forward(
                others, look_up_own, by_rank, self._back(call), local, partial(self.order_ids, call), landing
            )
            return self._by_feature(call.batch, out)

    def _look_up(self, call: Call, sources: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """Flat rows of this rank's slots, source by source and there run by run.

        Args:
            out: flat memory of that size which may be used.
        """
        if not sources or not self.runs:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        if len(self.runs) == 1:  # source by source already
            ((run, read),) = zip(self.runs, self._ids(call, sources), strict=True)
            is_fitting = out is not None and run.tbe.bank.weights.dtype == self.dtype
            to = out.view(-1, run.width) if out is not None and is_fitting else None
            return run.tbe.lookup.rows(read, to).to(self.dtype).reshape(-1)
        blocks = [
            run.tbe.lookup.rows(read).to(self.dtype).reshape(-1)
            for run, read in zip(self.runs, self._ids(call, sources), strict=True)
        ]
        of_runs = zip(*self._run_sizes(call, sources), strict=True)
        cut = [block.split(of_sources) for block, of_sources in zip(blocks, of_runs, strict=True)]
        parts = [of_run[source] for source in range(len(sources)) for of_run in cut]
        return torch.cat(parts, out=out)

    def _by_feature(self, batch: Batch, out: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        counts: dict[int, list[int]] = {dim: [] for dim in out}
        for dim, key in zip(self.dims, batch.key_of, strict=True):
            counts[dim].append(batch.counts[key])
        # No views, to autograd: to make each of them no view took another 20 microseconds of 26.
        parts = {dim: iter(torch.unsafe_split_with_sizes(rows, counts[dim])) for dim, rows in out.items()}
        return [next(parts[dim]) for dim in self.dims]

    def row_counts(self, batch: Batch) -> list[list[int]]:
        """Rows of each segment of each result: all of each feature."""
        return [[batch.counts[key]] for key in batch.key_of]

    def _given(self, call: Call, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [grad if grad.dtype is self.dtype else grad.to(self.dtype) for grad in grads]

    def _send_back(
        self, call: Call, given: list[torch.Tensor], beside: Beside | None, meanwhile: Callable[[], None]
    ) -> Returned:
        back = self._back(call)
        if back.are_joined and not self.store.sums_first():
            raise ShardError(
                "gradient_clipping was set between a forward and its backward, whose gradients of a row are summed "
                "before they are sent, and so before they could be clamped; set it before the forward"
            )
        landing = call.kept.pop("landing", None)
        meanwhile()
        return [self.output_dist.backward(given, self._by_rank(call), back, self.factor, beside, landing)], None

    def _sizes(self, call: Call) -> list[list[int]]:
        return [[sum(of_source) for of_source in self._run_sizes(call, tuple(self.peers.sources))]]

    def _train(self, call: Call, grads: Sequence[torch.Tensor]) -> Trained:
        (grad,), sources = grads, tuple(self.peers.sources)
        # Source by source, run by run: a run's gradients are every so many of the cuts.
        cut = grad.split([n for of_source in self._run_sizes(call, sources) for n in of_source]) if self.runs else ()
        orders = iter(self._order(call))
        for i, ((tbe, _, width), read) in enumerate(zip(self.runs, self._ids(call, sources), strict=True)):
            if tbe.is_trainable:
                flat = grad if len(self.runs) == 1 else torch.cat(cut[i :: len(self.runs)])
                train = tbe.lookup.gradient_rows if tbe.bank.spec is None else tbe.lookup.update_rows
                yield tbe, train(flat.view(-1, width), read, order=next(orders))

    @once_per_call
    def _order(self, call: Call) -> list[Any]:
        of_runs = zip(self.runs, self._ids(call, tuple(self.peers.sources)), strict=True)
        return [run.tbe.lookup.order_rows(read) for run, read in of_runs if run.tbe.is_trainable]

    @once_per_call
    def _ids(self, call: Call, sources: tuple[int, ...]) -> list[Segmented]:
        """Ids of each run, source by source, and their (slot of the TBE, count) segments."""
        own, received = tuple(self.peers.own), self.input_dist.receive(call)
        if len(own) > 1 and sources in (own[:-1], own[-1:]):  # a part of what is trained, where it lies
            of_runs = zip(self.runs, self._ids(call, own), strict=True)
            return [_cut(read, len(run.slots), sources == own[-1:]) for run, read in of_runs]
        result: list[Segmented] = []
        for tbe, (slots,), _ in self.runs:
            parts = [received.ids[source][received.span(source, slots)] for source in sources]
            ranges = range(slots.start - tbe.slots.start, slots.stop - tbe.slots.start)
            counts = [received.counts[source][slots.start : slots.stop] for source in sources]
            segments = [pair for of_source in counts for pair in zip(ranges, of_source, strict=True)]
            result.append(Segmented(joined(parts), segments))
        return result

    @once_per_call
    def _run_sizes(self, call: Call, sources: tuple[int, ...]) -> list[list[int]]:
        """Elements of each source's rows, by run."""
        counts = self.input_dist.receive(call).counts
        return [[sum(counts[s][slots.start : slots.stop]) * width for _, (slots,), width in self.runs] for s in sources]

    def _by_rank(self, call: Call) -> list[int]:
        """Elements of each table rank's rows."""
        sizes = self._run_sizes(call, tuple(self.peers.own))
        of_source = {source: sum(of_runs) for source, of_runs in zip(self.peers.own, sizes, strict=True)}
        return [of_source[source] for source in self.peers.by_table_rank]

    @once_per_call
    def _back(self, call: Call) -> RowsBack:
        peers, counts = self.peers, [call.batch.counts[key] for key in call.batch.key_of]
        me = peers.table.rank
        return RowsBack(
            self.store.placement, call.sent, peers.by_table_rank, me, counts, self.device, self.store.kernel
        )

    def _local_rows(self, call: Call) -> list[tuple[RowPlaces, torch.Tensor]]:
        """Rows that this rank's own data-parallel tables give, and where they go."""
        return [
            (to, tbe.lookup.rows(Segmented(ids, [(slot, to.count)])).view(to.count, to.width).to(self.dtype))
            for tbe, places in zip(self.store.local, self._local_places(call), strict=True)
            for slot, (ids, to) in enumerate(places)
        ]

    def _local_row_gradients(self, call: Call, given: list[torch.Tensor]) -> Callable[[int, Into | None], RowGradients]:
        of_tbes = zip(self.store.local, self._local_places(call), strict=True)
        trained = [(tbe, places) for tbe, places in of_tbes if tbe.is_trainable]

        def of_tbe(number: int, into: Into | None) -> RowGradients:
            tbe, places = trained[number]
            by_width: dict[int, list[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]] = {}
            for slot, (f, (ids, to)) in enumerate(zip(tbe.features, places, strict=True)):
                by_width.setdefault(to.width, []).append((given[f] * self.factor, ids, (slot, to.count)))
            found: RowGradients = []
            for parts in by_width.values():
                grads, ids_of, segments = zip(*parts, strict=True)
                found += tbe.lookup.row_gradients(torch.cat(grads), Segmented(torch.cat(ids_of), segments))
            return found

        return of_tbe

    @once_per_call
    def _local_places(self, call: Call) -> list[list[tuple[torch.Tensor, RowPlaces]]]:
        """Ids of each feature of each local TBE, and where their rows go."""
        batch = call.batch
        result = []
        for tbe in self.store.local:
            places = []
            for f in tbe.features:
                key, dim, first = batch.key_of[f], self.dims[f], call.sent.row_starts[f]
                ids, count = batch.values[batch.starts[key] : batch.starts[key + 1]], batch.counts[key]
                places.append(
                    (ids, row_places(dim, 0, dim, Span(False, range(0), range(first, first + count), 0), None))
                )
            result.append(places)
        return result


def _cut(read: Segmented, num_last: int, of_last: bool) -> Segmented:
    """Of the ids of several sources those of the last, or of the others.

    Args:
        num_last: segments of the last.
    """
    at = len(read.segments) - num_last
    start = sum(count for _, count in read.segments[:at])
    if of_last:
        return Segmented(read.ids[start:], read.segments[at:])
    return Segmented(read.ids[:start], read.segments[:at])
