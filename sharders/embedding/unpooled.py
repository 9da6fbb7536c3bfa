"""Unpooled lookups: each id becomes a row, which goes back to the place its id came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from sharders.embedding.input_dist import Batch, Call
from sharders.embedding.local_tables import TBE, TableStore
from sharders.embedding.peers import Peers
from sharders.embedding.replicas import Copies, make_rider, trainable_local
from sharders.embedding.unpooled_output import Patch, RowDelivery


class UnpooledPath:
    """Lookup and deliver of one module, and the way back.

    [Note: groups] This rank's slots that share a bank and a width are looked up together, source by source; what is
    sent to a source is its rows group by group.

    Args:
        dtype: of what travels.
    """

    def __init__(
        self,
        peers: Peers,
        store: TableStore,
        copies: Copies,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.peers, self.store, self.copies, self.dtype, self.device = peers, store, copies, dtype, device
        self.factor = copies.mean_factor
        placement = store.placement
        self.dims = [placement.tables[f.table].dim for f in placement.features]
        self.distinct_dims = list(dict.fromkeys(self.dims))
        self.delivery = RowDelivery(placement, peers.table, peers.by_table_rank)
        self.groups = self._find_groups()

    def forward(self, call: Call) -> list[torch.Tensor]:
        """One tensor (N, dim) for each distinct dim: rows of all its features, feature-major."""
        counts = call.received.counts(self.peers.own)
        blocks: list[torch.Tensor] = []
        for tbe, slots, _ in self.groups:
            ids, segments = self._ids(call, self.peers.own, counts, tbe, slots)
            blocks.append(tbe.lookup.rows(ids, segments).to(self.dtype).reshape(-1))
        if len(blocks) == 1:
            send = blocks[0]  # source by source already
        else:
            cut = [
                block.split([sum(of[slots.start : slots.stop]) * width for of in counts])
                for block, (_, slots, width) in zip(blocks, self.groups, strict=True)
            ]
            parts = [of_group[source] for source in range(len(counts)) for of_group in cut]
            send = torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype, device=self.device)
        out = self.delivery.forward(
            send,
            self._by_rank(counts),
            self.delivery.patches(call.sent),
            self._num_rows(call.batch),
            self._local_rows(call.batch),
        )
        return [out[dim] for dim in self.distinct_dims]

    def backward(self, call: Call, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients back to the owners, and updates; for each table its ordinary gradient, or None."""
        by_dim = {dim: g.to(self.dtype) for dim, g in zip(self.distinct_dims, grads, strict=True)}
        rider = make_rider(self._local_gradients(call.batch, by_dim), self.dtype)
        rides = self.copies.rides(rider)
        grad, summed = self.delivery.backward(
            by_dim,
            self._by_rank(call.received.counts(self.peers.own)),
            self.delivery.patches(call.sent),
            self.factor,
            rider if rides else None,
        )
        sources = self.copies.sources
        counts = call.received.counts(sources)
        sizes = self._sizes(counts)
        grad = self.copies.share(grad, [sum(of_source) for of_source in sizes])
        gradients = self._update(call, grad, sources, counts, sizes)
        return self.copies.finish(summed if rides else rider, rides, gradients)

    def counts_by_dim(self, batch: Batch) -> list[list[int]]:
        """For each distinct dim the rows of each of its features."""
        features = list(zip(self.dims, batch.key_of, strict=True))
        return [[batch.counts[key] for d, key in features if d == dim] for dim in self.distinct_dims]

    def split(self, batch: Batch, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each feature its rows (N_f, dim)."""
        parts: dict[int, Iterator[torch.Tensor]] = {}
        for dim, rows, counts in zip(self.distinct_dims, out, self.counts_by_dim(batch), strict=True):
            parts[dim] = iter(_Parts.apply(rows, counts))  # type: ignore[no-untyped-call]
        return [next(parts[dim]) for dim in self.dims]

    def _update(
        self,
        call: Call,
        grad: torch.Tensor,
        sources: Sequence[int],
        counts: list[list[int]],
        sizes: list[list[int]],
    ) -> dict[int, torch.Tensor]:
        gradients: dict[int, torch.Tensor] = {}
        for tbe in self.store.sharded:
            if tbe.is_trainable and tbe.bank.spec is not None:
                tbe.bank.step()
            elif tbe.is_trainable:
                gradients[id(tbe)] = torch.zeros_like(tbe.bank.weights)
        cut = grad.split([n for of_source in sizes for n in of_source]) if self.groups else ()
        for g, (tbe, slots, width) in enumerate(self.groups):
            if not tbe.is_trainable:
                continue
            ids, segments = self._ids(call, sources, counts, tbe, slots)
            pieces = [cut[s * len(self.groups) + g] for s in range(len(sources))]
            flat = grad if len(self.groups) == 1 else torch.cat(pieces)
            rows = flat.view(-1, width).to(tbe.bank.weights.dtype)
            if tbe.bank.spec is None:
                gradients[id(tbe)] += tbe.lookup.gradient_rows(rows, ids, segments)
            else:
                tbe.lookup.update_rows(rows, ids, segments)
        return gradients

    def _find_groups(self) -> list[tuple[TBE, range, int]]:
        """(tbe, slots, width); see [Note: groups]."""
        slots = self.store.placement.slots[self.store.rank]
        groups: list[tuple[TBE, range, int]] = []
        for tbe in self.store.sharded:
            for i in tbe.slots:
                if groups and groups[-1][0] is tbe and groups[-1][2] == slots[i].width:
                    groups[-1] = (tbe, range(groups[-1][1].start, i + 1), slots[i].width)
                else:
                    groups.append((tbe, range(i, i + 1), slots[i].width))
        return groups

    def _ids(
        self, call: Call, sources: Sequence[int], counts: list[list[int]], tbe: TBE, slots: range
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Ids of some slots, source by source, and their (slot of the TBE, count) segments."""
        pieces, segments = [], []
        for source, of_slots in zip(sources, counts, strict=True):
            start = sum(of_slots[: slots.start])
            stop = start + sum(of_slots[slots.start : slots.stop])
            pieces.append(call.received.ids[source][start:stop])
            segments += [(i - tbe.slots.start, of_slots[i]) for i in slots]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0], segments

    def _sizes(self, counts: list[list[int]]) -> list[list[int]]:
        """Elements of each source's rows, by group."""
        return [[sum(of[slots.start : slots.stop]) * width for _, slots, width in self.groups] for of in counts]

    def _by_rank(self, counts: list[list[int]]) -> list[int]:
        """Elements of each table rank's rows, given the counts of the own sources."""
        sizes = [sum(of_source) for of_source in self._sizes(counts)]
        place = {source: i for i, source in enumerate(self.peers.own)}
        return [sizes[place[source]] for source in self.peers.by_table_rank]

    def _num_rows(self, batch: Batch) -> dict[int, int]:
        return dict(zip(self.distinct_dims, map(sum, self.counts_by_dim(batch)), strict=True))

    def _local_rows(self, batch: Batch) -> list[tuple[Patch, torch.Tensor]]:
        """Rows that this rank's own copies give, and where they go."""
        return [
            (patch, tbe.lookup.rows(ids, [(slot, patch.count)]).view(patch.count, patch.width).to(self.dtype))
            for tbe in self.store.local
            for slot, ids, patch in self._local_patches(batch, tbe)
        ]

    def _local_gradients(self, batch: Batch, grads: dict[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(flat gradient, touched rows) of each trainable local TBE, from this rank's own ids."""
        result = []
        for tbe in trainable_local(self.store):
            flat = torch.zeros_like(tbe.bank.weights)
            touched = torch.zeros(tbe.bank.total_rows, dtype=torch.bool, device=flat.device)
            for slot, ids, patch in self._local_patches(batch, tbe):
                rows = (grads[patch.dim][patch.where] * self.factor).to(flat.dtype)
                flat += tbe.lookup.gradient_rows(rows, ids, [(slot, patch.count)])
                touched |= tbe.lookup.touched_rows(ids, [(slot, patch.count)])
            result.append((flat, touched))
        return result

    def _local_patches(self, batch: Batch, tbe: TBE) -> list[tuple[int, torch.Tensor, Patch]]:
        """(slot, ids, where the rows go) of each feature of a local TBE."""
        key_starts = [0, *accumulate(batch.counts)]
        at = dict.fromkeys(self.distinct_dims, 0)
        starts = []
        for dim, key in zip(self.dims, batch.key_of, strict=True):
            starts.append(at[dim])
            at[dim] += batch.counts[key]
        result = []
        for slot, f in enumerate(tbe.features):
            key, dim = batch.key_of[f], self.dims[f]
            ids = batch.values[key_starts[key] : key_starts[key + 1]]
            where = slice(starts[f], starts[f] + batch.counts[key])
            result.append((slot, ids, Patch(dim, 0, dim, batch.counts[key], where)))
        return result


class _Parts(torch.autograd.Function):
    """Rows cut into parts that may be changed in place, as those of `split` may not, and whose gradients are joined
    once: each slice of a tensor would have a gradient as large as the whole."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(part.detach() for part in rows.split(counts))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat(gradients), None
