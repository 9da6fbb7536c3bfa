"""Pooled lookups: each feature's bags become (B, dim) columns of one result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch

from sharders.embedding.batch import Batch
from sharders.embedding.call import Call, once_per_call
from sharders.embedding.codec import decoded, encoded
from sharders.embedding.input_dist import take
from sharders.embedding.local_tables import TBE, SlotRun
from sharders.embedding.lookup.reads import Bags, Segmented
from sharders.embedding.lookup.torch_kernel import RowGradients
from sharders.embedding.output_dist import Beside
from sharders.embedding.partials import Awaited, OwnedBags, Partials, PartialsPlan, elements_of_sources, owned_bags
from sharders.embedding.path import Path, Returned, Trained
from sharders.embedding.peers import Peers, own_last
from sharders.embedding.phases import FORWARD, INPUT, OUTPUT, phase
from sharders.embedding.pooled_output import Blocks, PooledOutputDist, cut_columns
from sharders.embedding.ragged import Columns


@dataclass(frozen=True)
class _Way:
    """How lookups travel in a call.

    Args:
        peers: between whom. Partials go straight to the ranks of the samples.
        whole: TBEs whose lookups do with all their columns.
        runs: of the slots whose lookups travel as partials.
        partials: None where none do, on any rank.
    """

    peers: Peers
    whole: list[TBE]
    runs: list[SlotRun]
    partials: PartialsPlan | None
    output_dists: list[PooledOutputDist]

    @cached_property
    def width(self) -> int:
        """Columns of this rank's lookup."""
        return sum(tbe.lookup.num_columns for tbe in self.whole)

    @cached_property
    def num_slots(self) -> int:
        """Of that lookup: the first."""
        return sum(len(tbe.slots) for tbe in self.whole)


class PooledPath(Path[torch.Tensor]):
    """Every feature's bags; see `Path`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        placement = self.store.placement
        self.mean_columns = _runs_of_mean(self.dims, [placement.tables[f.table].mean for f in placement.features])
        self.ways = [self._make_way(by_partials=False)]
        if any(placement.by_partials):
            self.ways.append(self._make_way(by_partials=True))

    def forward(self, call: Call) -> list[torch.Tensor]:
        """[(B, sum of dims)]."""
        with phase(call.spent, INPUT):
            self.input_dist.receive(call)
        way = self._way(call)
        own = way.peers.own
        others = tuple(own[: -way.peers.outer.size])
        with phase(call.spent, FORWARD):
            num = sum(call.samples[s] for s in others)
            partials = self._partials(call)
            memory = way.output_dists[0].memory(num, self.dtype, self.device, partials)
            looked_up = self._look_up(call, others, None if memory is None else memory[: num * way.width].view(num, -1))
            local = self._look_up_local(call)

        def rest() -> torch.Tensor:
            with phase(call.spent, FORWARD):
                found = self._look_up(call, tuple(own[len(others) :]), None)
            self.order_ids(call)
            return found

        with phase(call.spent, OUTPUT):
            for i, output_dist in enumerate(way.output_dists):
                is_last = i == len(way.output_dists) - 1
                last = (local, partials) if is_last else (None, None)
                rows, blocks = self._rows(call, i), self._blocks(call, i)
                landing = None
                if self.wants_landing(call):
                    landing = output_dist.landing(rows, blocks, last[1], self.dtype, self.device)
                    call.kept["landing", i] = landing
                found = output_dist.forward(looked_up, rest, rows, last[0], blocks, last[1], memory, landing)
                if not is_last:
                    looked_up, mine = found.tensor_split([len(found) - call.batch.batch_size])
                    rest = lambda mine=mine: mine  # type: ignore[misc]  # noqa: E731
            inverse = self._inverse_lengths(call) if self.mean_columns else None
            if inverse is not None:
                self._scaled_means(inverse, found, found)
        return [found]

    def _look_up(self, call: Call, sources: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """(samples of these sources, columns of this rank's slots).

        Args:
            out: memory of that shape which may be used.
        """
        way, rows = self._way(call), sum(call.samples[s] for s in sources)
        if not rows or not way.width:
            return self._zeros(rows, way.width)
        read = [(tbe, bags) for tbe, bags in zip(way.whole, self._bags(call, sources), strict=True) if bags is not None]
        if len(read) == 1:
            tbe, bags = read[0]
            return tbe.lookup.pooled(bags, self._fitting(tbe, out)).to(self.dtype)
        out = torch.empty(rows, way.width, dtype=self.dtype, device=self.device) if out is None else out
        for (tbe, bags), columns in zip(read, out.split([t.lookup.num_columns for t, _ in read], 1), strict=True):
            found = tbe.lookup.pooled(bags, self._fitting(tbe, columns))
            if found.data_ptr() != columns.data_ptr():
                columns.copy_(found)
        return out

    def _fitting(self, tbe: TBE, out: torch.Tensor | None) -> torch.Tensor | None:
        """Memory for a TBE's results, where these have its dtype."""
        return out if tbe.bank.weights.dtype == self.dtype else None

    def _look_up_local(self, call: Call) -> torch.Tensor | None:
        """(B, columns) of the local tables."""
        local_bags = zip(self.store.local, self._local_bags(call), strict=True)
        local = [tbe.lookup.pooled(of_tbe).to(self.dtype) for tbe, of_tbe in local_bags]
        return None if not local else local[0] if len(local) == 1 else torch.cat(local, 1)

    def row_counts(self, batch: Batch) -> list[list[int]]:
        """Rows of each segment of each result."""
        return [[batch.batch_size]]

    def split(self, batch: Batch, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As they are: features are columns."""
        return list(results)

    def _given(self, call: Call, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        grad = grads[0].to(self.dtype)
        inverse = self._inverse_lengths(call) if self.mean_columns else None
        if self.mean_columns and not self.store.sums_first():
            grad = grad.clone() if grad is grads[0] else grad
            self._clip_means(grad)
        return grad if inverse is None else self._scaled_means(inverse, grad, torch.empty_like(grad))

    def _send_back(self, call: Call, given: torch.Tensor, beside: Beside | None) -> Returned:
        dists = self._way(call).output_dists
        last = len(dists) - 1
        rows, blocks = self._rows(call, last), self._blocks(call, last)
        landings = [call.kept.pop(("landing", i), None) for i in range(len(dists))]
        grad = dists[last].backward(given, rows, self.factor, beside, blocks, self._partials(call), landings[last])
        for i in reversed(range(last)):
            of_joined = grad.view(sum(rows), dists[i].width)
            rows = self._rows(call, i)
            grad = dists[i].backward(of_joined, rows, 1.0, None, self._blocks(call, i), landing=landings[i])
        return grad, self._weight_gradient(call, given, grad) if call.wants_weight_gradient else None

    def _sizes(self, call: Call, sources: tuple[int, ...]) -> list[int]:
        way = self._way(call)
        of_partials = elements_of_sources(way.runs, self._owned(call, sources)) or [0] * len(sources)
        return [call.samples[i] * way.width + n for i, n in zip(sources, of_partials, strict=True)]

    def _train(self, call: Call, grad: torch.Tensor, sources: tuple[int, ...]) -> Trained:
        lookup, of_runs = self._cut(call, grad, sources)
        orders = iter(self._orders(call, sources))
        for tbe, columns, bags in self._by_tbe(call, lookup, sources):
            if tbe.is_trainable:
                train = tbe.lookup.gradient_pooled if tbe.bank.spec is None else tbe.lookup.update_pooled
                yield tbe, train(columns.to(tbe.bank.weights.dtype).contiguous(), bags, order=next(orders))
        for (tbe, _, _), rows, owned in zip(self._way(call).runs, of_runs, self._owned(call, sources), strict=True):
            if tbe.is_trainable:
                learn = tbe.lookup.gradient_rows if tbe.bank.spec is None else tbe.lookup.update_rows
                yield tbe, learn(rows.to(tbe.bank.weights.dtype), owned.read(), order=next(orders))

    @once_per_call
    def _orders(self, call: Call, sources: tuple[int, ...]) -> list[Any]:
        way = self._way(call)
        whole = zip(way.whole, self._bags(call, sources), strict=True)
        found = [tbe.lookup.order_pooled(bags) for tbe, bags in whole if bags is not None and tbe.is_trainable]
        of_runs = zip(way.runs, self._owned(call, sources), strict=True)
        return found + [run.tbe.lookup.order_rows(bags.read()) for run, bags in of_runs if run.tbe.is_trainable]

    def _cut(self, call: Call, grad: torch.Tensor, sources: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients of this rank's lookup (samples, width), and of each run of partials (bags, width)."""
        way = self._way(call)
        samples = [call.samples[i] for i in sources]
        if not way.runs:
            return grad.view(sum(samples), way.width), []
        if not way.width and len(way.runs) == 1:
            return grad.new_empty(sum(samples), 0), [grad.view(-1, way.runs[0].width)]
        of_runs = [
            [n * run.width for n, _, _ in bags.of_sources]
            for run, bags in zip(way.runs, self._owned(call, sources), strict=True)
        ]
        of_lookup = [n * way.width for n in samples]
        cut = grad.split([n for of_source in zip(of_lookup, *of_runs, strict=True) for n in of_source])
        lookup, *runs = (torch.cat(cut[i :: 1 + len(of_runs)]) for i in range(1 + len(of_runs)))
        by_run = [flat.view(-1, run.width) for run, flat in zip(way.runs, runs, strict=True)]
        return lookup.view(sum(samples), way.width), by_run

    def _by_tbe(
        self, call: Call, grad: torch.Tensor, sources: tuple[int, ...]
    ) -> Iterator[tuple[TBE, torch.Tensor, Bags]]:
        """Each TBE whose lookup travels whole, with slots here, its columns of the gradient, and its bags."""
        column = 0
        for tbe, bags in zip(self._way(call).whole, self._bags(call, sources), strict=True):
            if bags is not None:
                yield tbe, grad[:, column : column + tbe.lookup.num_columns], bags
                column += tbe.lookup.num_columns

    @once_per_call
    def _owned(self, call: Call, sources: tuple[int, ...]) -> list[OwnedBags]:
        """Bags of each run of partials."""
        received = self.input_dist.receive(call)
        return [owned_bags(received, run, sources) for run in self._way(call).runs]

    @once_per_call
    def _partials(self, call: Call) -> Partials | None:
        """Those of the own sources."""
        way = self._way(call)
        plan = way.partials
        if plan is None:
            return None
        of_ranks, sent = list(zip(way.peers.own, plan.ranges, strict=True)), call.sent
        lengths = [sent.lengths[i][slots.start : slots.stop] for i, slots in of_ranks]
        bags = [n for i, slots in of_ranks for n in sent.bags[i][slots.start : slots.stop]]
        awaited = Awaited(plan, lengths, bags, call.batch.shortest > 0)
        return Partials(way.runs, self._owned(call, tuple(way.peers.own)), awaited, self.dtype, call.spent)

    def _weight_gradient(self, call: Call, given: torch.Tensor, looked_up: torch.Tensor) -> torch.Tensor:
        """(N,) gradient of the batch's weights: from the owners of the rows, and from the local tables.

        Args:
            given: (B, sum of dims) gradient of the results.
            looked_up: gradient of this rank's lookup for the own sources, times `factor`.
        """
        weights = call.batch.weights
        assert weights is not None
        result = torch.zeros(weights.numel(), dtype=self.dtype, device=self.device)
        send = self._weight_gradients_of_sources(call, looked_up)
        receive_sizes = [sum(call.sent.counts[s]) for s in self.peers.by_table_rank]
        codec, channel = self.peers.codecs.gradients, self.peers.table
        wire = encoded(codec, torch.cat(send), channel)
        came = channel.all_to_all(wire, [t.numel() for t in send], receive_sizes).wait()
        by_rank = decoded(codec, came, self.dtype).split(receive_sizes)
        for s, part in zip(self.peers.by_table_rank, by_rank, strict=True):
            result.index_add_(0, call.sent.weight_places[s], part, alpha=1.0 / self.factor)
        for tbe, bags in zip(self.store.local, self._local_bags(call), strict=True):
            columns = self._columns_of(tbe, given).to(tbe.bank.weights.dtype)
            part = tbe.lookup.gradient_weights(columns, bags).to(self.dtype)
            keys = [call.batch.key_of[f] for f in tbe.features]
            result.index_add_(0, take(call.batch.places, keys, call.batch.starts), part)
        return result.to(weights.dtype)

    def _weight_gradients_of_sources(self, call: Call, looked_up: torch.Tensor) -> list[torch.Tensor]:
        """For each table rank the gradients of the weights that it has sent here, in the order it sent them."""
        sources, parts = tuple(self.peers_of(call).own), []
        lookup, of_runs = self._cut(call, looked_up, sources)
        for tbe, columns, bags in self._by_tbe(call, lookup, sources):
            columns = columns.to(tbe.bank.weights.dtype).contiguous()
            parts.append(tbe.lookup.gradient_weights(columns, bags).to(self.dtype))
        # They come slot by slot, and there source by source: cut, and joined source by source.
        counts = self.input_dist.receive(call).counts
        sizes = [counts[s][slot] for slot in range(self._way(call).num_slots) for s in sources]
        cut = torch.cat(parts).split(sizes) if parts else ()
        of_sources = [[self._zeros(0), *cut[i :: len(sources)]] for i in range(len(sources))]
        for (tbe, _, _), rows, owned in zip(self._way(call).runs, of_runs, self._owned(call, sources), strict=True):
            read = Segmented(owned.ids, owned.segments, owned.bounds())
            flat = tbe.lookup.gradient_row_weights(rows.to(tbe.bank.weights.dtype), read)
            for found, part in zip(of_sources, flat.split([n for _, n, _ in owned.of_sources]), strict=True):
                found.append(part.to(self.dtype))
        by_source = {s: torch.cat(found) for s, found in zip(sources, of_sources, strict=True)}
        return [by_source[s] for s in self.peers.by_table_rank]

    def _way(self, call: Call) -> _Way:
        return self.ways[call.by_partials]

    def peers_of(self, call: Call) -> Peers:
        """See `Path`."""
        return self._way(call).peers

    def _make_way(self, by_partials: bool) -> _Way:
        store, peers = self.store, self.peers.in_one_stage() if by_partials else self.peers
        order = [peers.table_ranks[source] for source in peers.own]
        plan = PartialsPlan(store.placement, order, self.device) if by_partials else None
        whole = [tbe for tbe in store.sharded if not (by_partials and tbe.by_partials)]
        runs = store.runs_of([tbe for tbe in store.sharded if by_partials and tbe.by_partials])
        return _Way(peers, whole, runs, plan, self._make_output_dists(peers, plan))

    def _make_output_dists(self, peers: Peers, plan: PartialsPlan | None) -> list[PooledOutputDist]:
        codecs, placement = peers.codecs, self.store.placement
        columns: list[list[Columns]] = [
            [(s.feature, s.column, s.width) for s in of_rank] for of_rank in placement.slots
        ]
        target: list[Columns] = [(f, 0, dim) for f, dim in enumerate(self.dims)]
        local: list[Columns] = [(f, 0, self.dims[f]) for tbe in self.store.local for f in tbe.features]
        if plan is not None:
            columns = [of_rank[: placement.partial_slots(rank).start] for rank, of_rank in enumerate(columns)]
        if peers.outer.size == 1:
            groups = plan.groups if plan is not None else []
            return [PooledOutputDist(peers.table, codecs, [*columns, local, *(g.columns for g in groups)], target)]
        hosts = [columns[h * peers.inner.size : (h + 1) * peers.inner.size] for h in range(peers.outer.size)]
        host = peers.outer.rank
        joined = [cut_columns(of_host) for of_host in hosts]
        return [
            PooledOutputDist(peers.inner, codecs, [*hosts[host], []], joined[host]),
            PooledOutputDist(peers.outer, codecs, [*joined, local], target),
        ]

    def _rows(self, call: Call, index: int) -> list[int]:
        """Samples of each rank of an output dist: what is sent to it, and what it has sent."""
        peers = self.peers_of(call)
        size = [call.samples[i] for i in peers.by_table_rank]
        inner, outer = peers.inner, peers.outer
        if outer.size == 1:
            return size
        if index == 0:
            return [sum(size[h * inner.size + i] for h in range(outer.size)) for i in range(inner.size)]
        return [size[h * inner.size + inner.rank] for h in range(outer.size)]

    def _blocks(self, call: Call, index: int) -> Blocks:
        """Of each rank of an output dist; None where every batch has one size for all features."""
        if not call.has_sizes:
            return None
        peers = self.peers_of(call)
        size = [call.batch_sizes[i] for i in peers.by_table_rank]
        inner, outer = peers.inner, peers.outer
        if outer.size == 1:
            return [[of_rank] for of_rank in size]
        if index == 0:
            return [[size[h * inner.size + i] for h in own_last(outer)] for i in range(inner.size)]
        return [[size[h * inner.size + inner.rank]] for h in range(outer.size)]

    @once_per_call
    def _bags(self, call: Call, sources: tuple[int, ...]) -> list[Bags | None]:
        """Bags of the slots of each TBE whose lookup travels whole; None where it has none here."""
        received = self.input_dist.receive(call)
        ids, lengths, weights = received.slot_major(sources, self._way(call).num_slots)
        cuts = {at for tbe in self._way(call).whole for at in (tbe.slots.start, tbe.slots.stop)}
        starts = {at: sum(sum(received.counts[s][:at]) for s in sources) for at in cuts}
        result: list[Bags | None] = []
        for tbe in self._way(call).whole:
            first, stop = tbe.slots.start, tbe.slots.stop
            of_tbe = slice(starts[first], starts[stop])
            reals = None if weights is None else weights[of_tbe].to(tbe.bank.weights.dtype)
            result.append(Bags(ids[of_tbe], _offsets(lengths[first:stop]), reals) if len(tbe.slots) else None)
        return result

    @once_per_call
    def _local_bags(self, call: Call) -> list[Bags]:
        """This rank's own bags for the features of each local TBE."""
        batch, result = call.batch, []
        for tbe in self.store.local:
            keys = [batch.key_of[f] for f in tbe.features]
            ids = take(batch.values, keys, batch.starts)
            weights = batch.weights
            if weights is not None:
                weights = take(weights, keys, batch.starts).to(tbe.bank.weights.dtype)
            result.append(Bags(ids, _offsets(batch.lengths[keys].to(ids.dtype)), weights))
        return result

    def _local_gradients(self, call: Call, given: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        result = []
        for tbe, bags in zip(self.store.local, self._local_bags(call), strict=True):
            if tbe.is_trainable:
                columns = self._columns_of(tbe, given).mul_(self.factor).to(tbe.bank.weights.dtype)
                touched = tbe.lookup.touched_pooled(bags)
                result.append((tbe.lookup.gradient_pooled(columns, bags), touched))
        return result

    def _local_row_gradients(self, call: Call, given: torch.Tensor) -> list[RowGradients]:
        return [
            tbe.lookup.pooled_row_gradients(
                self._columns_of(tbe, given).mul_(self.factor).to(tbe.bank.weights.dtype), bags
            )
            for tbe, bags in zip(self.store.local, self._local_bags(call), strict=True)
            if tbe.is_trainable
        ]

    def _columns_of(self, tbe: TBE, grad: torch.Tensor) -> torch.Tensor:
        """Columns of a local TBE's features, copied."""
        starts = [0, *accumulate(self.dims)]
        return torch.cat([grad[:, starts[f] : starts[f + 1]] for f in tbe.features], 1)

    def _clip_means(self, grad: torch.Tensor) -> None:
        """Clamp the gradient of means where an optimizer's options ask for it: as FBGEMM, before it is divided.

        That of sums is clamped with the update, where it is the same.
        """
        placement = self.store.placement
        starts = [0, *accumulate(self.dims)]
        for tbe in self.store.tbes:
            if tbe.bank.options.get("gradient_clipping"):
                for f, feature in enumerate(placement.features):
                    if feature.table in tbe.tables and placement.tables[feature.table].mean:
                        columns = grad[:, starts[f] : starts[f + 1]]
                        columns.copy_(tbe.bank.clipped(columns, self.factor))

    def _scaled_means(self, inverse: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` with the values, whose columns of mean features are divided by the lengths of their bags."""
        at = 0
        for columns, features, dim in self.mean_columns:
            if out is not values and at < columns.start:
                out[:, at : columns.start].copy_(values[:, at : columns.start])
            each, to = (of[:, columns].unflatten(1, (-1, dim)) for of in (values, out))
            torch.mul(each, inverse[:, features].unsqueeze(2), out=to)
            at = columns.stop
        if out is not values and at < out.shape[1]:
            out[:, at:].copy_(values[:, at:])
        return out

    @once_per_call
    def _inverse_lengths(self, call: Call) -> torch.Tensor | None:
        """(B, F) 1 / ids of each bag; None where means are sums: no bag has more than one."""
        if call.batch.longest <= 1:
            return None
        return call.batch.lengths[[*call.batch.key_of]].t().clamp(min=1).to(self.dtype).reciprocal_()

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _runs_of_mean(dims: Sequence[int], means: Sequence[bool]) -> list[tuple[slice, slice, int]]:
    """(columns, features, dim) of each run of features that are pooled by mean and have one dim."""
    runs, column, feature = [], 0, 0
    for (is_mean, dim), run in groupby(zip(means, dims, strict=True)):
        num = len(list(run))
        if is_mean:
            runs.append((slice(column, column + num * dim), slice(feature, feature + num), dim))
        column, feature = column + num * dim, feature + num
    return runs


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """(S * B + 1,) bounds of the bags whose lengths are (S, B)."""
    flat = lengths.reshape(-1)
    offsets = flat.new_zeros(flat.numel() + 1)
    torch.cumsum(flat, 0, out=offsets[1:])
    return offsets
