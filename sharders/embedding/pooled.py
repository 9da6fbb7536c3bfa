"""Pooled lookups: each feature's bags become (B, dim) columns of one result."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sharders.embedding.input_dist import Batch, Call, InputDist, take
from sharders.embedding.local_tables import TBE, TableStore
from sharders.embedding.peers import Peers
from sharders.embedding.pooled_output import Piece, Stage, cut_pieces
from sharders.embedding.replicas import Copies, make_rider, trainable_local

Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # ids, offsets, weights


class PooledPath:
    """Lookup and deliver of one module, and the way back.

    Args:
        dtype: of what travels.
        device: of the tables.
    """

    def __init__(
        self,
        peers: Peers,
        input_dist: InputDist,
        store: TableStore,
        copies: Copies,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.peers, self.input_dist, self.store, self.copies = peers, input_dist, store, copies
        self.dtype, self.device = dtype, device
        self.factor = copies.mean_factor
        placement = store.placement
        self.dims = [placement.tables[f.table].dim for f in placement.features]
        self.mean = [placement.tables[f.table].mean for f in placement.features]
        self.feature_of_column = torch.tensor([f for f, dim in enumerate(self.dims) for _ in range(dim)], device=device)
        self.stages = self._make_stages()

    def forward(self, call: Call) -> torch.Tensor:
        """(B, sum of dims)."""
        ids, lengths, weights = self._slot_major(call, self.peers.own)
        parts = [
            tbe.lookup.pooled(*self._bags(tbe, ids, lengths, weights)).to(self.dtype)
            for tbe in self.store.sharded
            if len(tbe.slots)
        ]
        if len(parts) == 1:
            out = parts[0]
        else:
            out = torch.cat(parts, 1) if parts else self._zeros(lengths.shape[1], 0)
        local = [tbe.lookup.pooled(*self._own_bags(call.batch, tbe)).to(self.dtype) for tbe in self.store.local]
        block = None if not local else local[0] if len(local) == 1 else torch.cat(local, 1)
        for i, stage in enumerate(self.stages):
            out = stage.forward(out, self._rows(call, i), block if i == len(self.stages) - 1 else None)
        scale = self._mean_scale(call.batch)
        return out if scale is None else out.mul_(scale)

    def backward(
        self, call: Call, grad: torch.Tensor, wants_weights: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients back to the owners, and updates.

        Returns:
            The gradient of the batch's weights where it is wanted; for each table its ordinary gradient, or None.
        """
        grad, scale = grad.to(self.dtype), self._mean_scale(call.batch)
        if scale is not None:
            grad = grad * scale
        given = grad
        rider = make_rider(self._local_gradients(call.batch, grad), self.dtype)
        rides = self.copies.rides(rider)
        grad, summed = self.stages[-1].backward(
            grad, self._rows(call, len(self.stages) - 1), self.factor, rider if rides else None
        )
        for i in reversed(range(len(self.stages) - 1)):
            grad, _ = self.stages[i].backward(grad, self._rows(call, i), 1.0, None)
        of_weights = self._weight_gradient(call, given, grad) if wants_weights else None  # before the tables change
        sources = self.copies.sources
        samples = [call.batch_sizes[i] for i in sources]
        width = grad.shape[1]
        grad = self.copies.share(grad.reshape(-1), [n * width for n in samples]).view(sum(samples), width)
        gradients = self._update(call, grad, sources)
        return of_weights, self.copies.finish(summed if rides else rider, rides, gradients)

    def _weight_gradient(self, call: Call, given: torch.Tensor, looked_up: torch.Tensor) -> torch.Tensor:
        """(N,) gradient of the batch's weights: from the owners of the rows, and from the local tables.

        Args:
            given: (B, sum of dims) gradient of the results.
            looked_up: gradient of this rank's lookup for the own sources, times `factor`.
        """
        weights = call.batch.weights
        assert weights is not None
        ids, lengths, bits = self._slot_major(call, self.peers.own)
        parts, column = [], 0
        for tbe in self.store.sharded:
            if len(tbe.slots):
                columns = looked_up[:, column : column + tbe.lookup.num_columns].to(tbe.bank.weights.dtype).contiguous()
                column += tbe.lookup.num_columns
                bag_ids, offsets, _ = self._bags(tbe, ids, lengths, bits)
                parts.append(tbe.lookup.gradient_weights(columns, bag_ids, offsets).to(self.dtype))
        slot_major = torch.cat(parts) if parts else self._zeros(0)
        # Slot-major to source by source, back to the sources, and there to the weights' places.
        counts = call.received.counts(self.peers.own)
        cut = slot_major.split([of[slot] for slot in range(len(counts[0])) for of in counts]) if parts else ()
        each = len(counts)
        by_source = {s: [cut[k] for k in range(i, len(cut), each)] for i, s in enumerate(self.peers.own)}
        send = [torch.cat(by_source[s]) if by_source[s] else self._zeros(0) for s in self.peers.by_table_rank]
        receive_sizes = [sum(call.sent.counts[s]) for s in self.peers.by_table_rank]
        transfer = self.peers.table.all_to_all(torch.cat(send), [t.numel() for t in send], receive_sizes)
        result = torch.zeros(weights.numel(), dtype=self.dtype, device=self.device)
        for s, part in zip(self.peers.by_table_rank, transfer.wait().split(receive_sizes), strict=True):
            result.index_add_(0, call.sent.weight_places[s], part, alpha=1.0 / self.factor)
        starts, key_starts = [0, *accumulate(self.dims)], [0, *accumulate(call.batch.counts)]
        for tbe in self.store.local:
            columns = torch.cat([given[:, starts[f] : starts[f + 1]] for f in tbe.features], 1)
            bag_ids, offsets, _ = self._own_bags(call.batch, tbe)
            part = tbe.lookup.gradient_weights(columns.to(tbe.bank.weights.dtype), bag_ids, offsets).to(self.dtype)
            places = torch.arange(weights.numel(), device=self.device)
            result.index_add_(0, take(places, [call.batch.key_of[f] for f in tbe.features], key_starts), part)
        return result.to(weights.dtype)

    def _update(self, call: Call, grad: torch.Tensor, sources: Sequence[int]) -> dict[int, torch.Tensor]:
        ids, lengths, weights = self._slot_major(call, sources)
        gradients: dict[int, torch.Tensor] = {}
        column = 0
        for tbe in self.store.sharded:
            of_tbe = grad[:, column : column + tbe.lookup.num_columns]
            column += tbe.lookup.num_columns
            if not tbe.is_trainable:
                continue
            bags = self._bags(tbe, ids, lengths, weights) if len(tbe.slots) else None
            of_tbe = of_tbe.to(tbe.bank.weights.dtype).contiguous()
            if tbe.bank.spec is None:
                flat = tbe.lookup.gradient_pooled(of_tbe, *bags) if bags else torch.zeros_like(tbe.bank.weights)
                gradients[id(tbe)] = flat
                continue
            tbe.bank.step()
            if bags:
                tbe.lookup.update_pooled(of_tbe, *bags)
        return gradients

    def _make_stages(self) -> list[Stage]:
        peers = self.peers
        pieces: list[list[Piece]] = [
            [(s.feature, s.column, s.width) for s in of_rank] for of_rank in self.store.placement.slots
        ]
        target: list[Piece] = [(f, 0, dim) for f, dim in enumerate(self.dims)]
        local: list[Piece] = [(f, 0, self.dims[f]) for tbe in self.store.local for f in tbe.features]
        if peers.outer.size == 1:
            return [Stage(peers.table, [*pieces, local], target)]
        hosts = [pieces[h * peers.inner.size : (h + 1) * peers.inner.size] for h in range(peers.outer.size)]
        host = peers.outer.rank
        joined = [cut_pieces(of_host) for of_host in hosts]
        return [
            Stage(peers.inner, [*hosts[host], []], joined[host]),
            Stage(peers.outer, [*joined, local], target),
        ]

    def _rows(self, call: Call, stage: int) -> list[int]:
        """Samples of each rank of a stage's group: what is sent to it, and what it has sent."""
        peers = self.peers
        size = [call.batch_sizes[i] for i in peers.by_table_rank]
        inner, outer = peers.inner, peers.outer
        if outer.size == 1:
            return size
        if stage == 0:
            return [sum(size[h * inner.size + i] for h in range(outer.size)) for i in range(inner.size)]
        return [size[h * inner.size + inner.rank] for h in range(outer.size)]

    def _slot_major(self, call: Call, sources: Sequence[int]) -> Bags:
        ids, lengths, bits = call.received.slot_major(sources)
        return ids, lengths, None if bits is None else self.input_dist.weights_of(bits)

    def _bags(self, tbe: TBE, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None) -> Bags:
        """Bags of a TBE's slots."""
        if len(tbe.slots) != lengths.shape[0]:
            bounds = [0, *lengths.sum(1).cumsum(0).tolist()]
            lengths = lengths[tbe.slots.start : tbe.slots.stop]
            span = slice(bounds[tbe.slots.start], bounds[tbe.slots.stop])
            ids, weights = ids[span], None if weights is None else weights[span]
        return ids, _offsets(lengths), None if weights is None else weights.to(tbe.bank.weights.dtype)

    def _own_bags(self, batch: Batch, tbe: TBE) -> Bags:
        """This rank's own bags for the features of a local TBE."""
        keys = [batch.key_of[f] for f in tbe.features]
        starts = [0, *accumulate(batch.counts)]
        ids = take(batch.values, keys, starts)
        weights = None if batch.weights is None else take(batch.weights, keys, starts).to(tbe.bank.weights.dtype)
        return ids, _offsets(batch.lengths[keys].to(ids.dtype)), weights

    def _local_gradients(self, batch: Batch, grad: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(flat gradient, touched rows) of each trainable local TBE, from this rank's own bags."""
        starts = [0, *accumulate(self.dims)]
        result = []
        for tbe in trainable_local(self.store):
            columns = torch.cat([grad[:, starts[f] : starts[f + 1]] for f in tbe.features], 1).mul_(self.factor)
            ids, offsets, weights = self._own_bags(batch, tbe)
            flat = tbe.lookup.gradient_pooled(columns.to(tbe.bank.weights.dtype), ids, offsets, weights)
            result.append((flat, tbe.lookup.touched_pooled(ids, offsets)))
        return result

    def _mean_scale(self, batch: Batch) -> torch.Tensor | None:
        """(B, sum of dims) 1 / bag length in columns of mean features, 1 in others; None without mean features."""
        if not any(self.mean):
            return None
        scale = torch.ones(len(self.mean), batch.batch_size, dtype=self.dtype, device=self.device)
        for f, is_mean in enumerate(self.mean):
            if is_mean:
                scale[f] = 1.0 / batch.lengths[batch.key_of[f]].clamp(min=1)
        return scale.t().index_select(1, self.feature_of_column)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """(S * B + 1,) bounds of the bags whose lengths are (S, B)."""
    flat = lengths.reshape(-1)
    offsets = flat.new_zeros(flat.numel() + 1)
    torch.cumsum(flat, 0, out=offsets[1:])
    return offsets
