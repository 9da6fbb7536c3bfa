"""Pooled lookups: each feature's bags become (B, dim) columns of one result, whichever way its table's results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from sharders.embedding.batches.batch import Batch
from sharders.embedding.data_path.path import Path, Returned, Trained
from sharders.embedding.data_path.way import Kind, Way
from sharders.embedding.data_path.whole import offsets
from sharders.embedding.exchange.codec import decoded, encoded
from sharders.embedding.exchange.local_tables import TBE
from sharders.embedding.exchange.output_dist import Beside
from sharders.embedding.exchange.phases import FORWARD, INPUT, OUTPUT, phase
from sharders.embedding.ids.call import Call, once_per_call
from sharders.embedding.ids.input_dist import take
from sharders.embedding.lookup.kernels import can_place
from sharders.embedding.lookup.pages import to_write
from sharders.embedding.lookup.reads import Bags
from sharders.embedding.lookup.torch_kernel import Into, RowGradients
from sharders.embedding.results.columns import Placing, runs_of

APART_BYTES = 1 << 20
"""Of a rank's gradients: where there are more, sums are not sent beside them."""
_MAX_WAYS = 16  # of a call's tables, that are kept compiled


class _Local(NamedTuple):
    """Tables that are whole on every rank.

    Args:
        columns: first one of each feature in the result.
        taking: places their columns of a gradient of all features.
    """

    tbe: TBE
    columns: tuple[int, ...]
    taking: Placing

    def row_gradients(self, grad: torch.Tensor, bags: Bags, factor: float, into: Into | None) -> RowGradients:
        """Of (B, sum of dims), multiplied: read where they are, but for kernels that cannot."""
        lookup = self.tbe.lookup
        if can_place(lookup, grad.dtype) and not lookup.bank.clips:
            return lookup.row_gradients_in(grad, bags, self.columns, factor, into)
        return lookup.pooled_row_gradients(self.columns_of(grad, factor), bags, into=into)

    def columns_of(self, grad: torch.Tensor, factor: float) -> torch.Tensor:
        """(B, their columns) of (B, sum of dims), multiplied."""
        taken = grad.new_empty(len(grad), self.tbe.lookup.num_columns)
        self.taking({0: grad}, taken, factor)
        return taken


class PooledPath(Path[torch.Tensor]):
    """Every feature's bags; see `Path`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        placement = self.store.placement
        self.mean_columns = _runs_of_mean(self.dims, [placement.tables[f.table].mean for f in placement.features])
        self._partial = frozenset(t for t, is_partial in enumerate(placement.by_partials) if is_partial)
        starts, target = [0, *accumulate(self.dims)], [(f, 0, dim) for f, dim in enumerate(self.dims)]
        placement = self.store.placement
        sharded = [dim for f, dim in zip(placement.features, self.dims, strict=True) if not placement.is_local[f.table]]
        self._sharded_columns = sum(sharded)
        self._local = []
        for tbe in self.store.local:
            runs = runs_of({0: target}, [target[f] for f in tbe.features])
            columns = tuple(starts[f] for f in tbe.features)
            self._local.append(_Local(tbe, columns, Placing(runs, self.store.kernel)))
        self._made: dict[tuple[frozenset[int], bool], list[Way]] = {}
        self._make_ways(frozenset(), False)
        if self._partial:
            self._make_ways(self._partial, True)

    def forward(self, call: Call) -> list[torch.Tensor]:
        """[(B, sum of dims)]."""
        with phase(call.spent, INPUT):
            self.input_dist.receive(call)
        out = to_write(torch.empty(call.batch.batch_size, sum(self.dims), dtype=self.dtype, device=self.device))
        ways, wants_landing = self._ways(call), self.wants_landing(call)
        under_way = [way.forward(call, out, wants_landing, lambda: None) for way in ways[:-1]]
        under_way.append(ways[-1].forward(call, out, wants_landing, partial(self._while_results_travel, call, out)))
        with phase(call.spent, OUTPUT):
            while under_way:
                under_way.pop()()
            inverse = self._inverse_lengths(call) if self.mean_columns else None
            if inverse is not None:
                self._scaled_means(inverse, out, out)
        return [out]

    @once_per_call
    def _ways(self, call: Call) -> list[Way]:
        """How results travel, the straight ones first; all ranks have the same."""
        straight = self._partial if call.by_partials else self.input_dist.receive(call).straight
        return self._made.get((straight, call.by_partials)) or self._make_ways(straight, call.by_partials)

    def _make_ways(self, straight: frozenset[int], goes_along: bool) -> list[Way]:
        """The oldest go where there are too many.

        Args:
            straight: tables whose partials go straight to the ranks of the samples.
            goes_along: all others' results do so too.
        """
        if len(self._made) >= _MAX_WAYS:
            del self._made[next(iter(self._made))]
        sharded = frozenset(t for t, is_local in enumerate(self.store.placement.is_local) if not is_local)
        others = sharded - straight
        kinds = [Kind(self.peers, others, straight)]
        if straight:
            kinds = [Kind(self.peers.in_one_stage(), others, straight)]
        if straight and others and not goes_along:
            kinds = [Kind(kinds[0].peers, (), straight), Kind(self.peers, others, ())]
        ways = [Way(kind, self.store, self.input_dist, self.dtype, self.device) for kind in kinds]
        self._made[straight, goes_along] = ways
        return ways

    def _while_results_travel(self, call: Call, out: torch.Tensor) -> None:
        """Look up the local tables, into their columns of (B, sum of dims), and order ids."""
        with phase(call.spent, FORWARD):
            for (tbe, columns, _), bags in zip(self._local, self._local_bags(call), strict=True):
                if can_place(tbe.lookup, self.dtype):
                    tbe.lookup.pooled_to(bags, range(len(out)), out, columns)
                    continue
                widths = [self.dims[feature] for feature in tbe.features]
                for column, part in zip(columns, tbe.lookup.pooled(bags).split(widths, 1), strict=True):
                    out[:, column : column + part.shape[1]].copy_(part)
        self.order_ids(call)

    def row_counts(self, batch: Batch) -> list[list[int]]:
        """Rows of each segment of each result."""
        return [[batch.batch_size]]

    def _sends_apart(self, call: Call) -> bool:
        of_all = sum(call.samples[i] for i in self.peers.by_table_rank) * self._sharded_columns * self.dtype.itemsize
        return not self._sharded_columns or of_all >= APART_BYTES * len(self.peers.by_table_rank)

    def _given(self, call: Call, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        grad = grads[0].to(self.dtype)
        if grad.stride(1) != 1:  # the gradient of a sum is one number
            grad = grad.contiguous()
        inverse = self._inverse_lengths(call) if self.mean_columns else None
        if self.mean_columns and not self.store.sums_first():
            grad = grad.clone() if grad is grads[0] else grad
            self._clip_means(grad)
        return grad if inverse is None else self._scaled_means(inverse, grad, torch.empty_like(grad))

    def _send_back(
        self, call: Call, given: torch.Tensor, beside: Beside | None, meanwhile: Callable[[], None]
    ) -> Returned:
        ways = self._ways(call)
        under_way = [way.send_back(call, given, self.factor, beside if way is ways[0] else None) for way in ways]
        meanwhile()
        grads = [come() for come in reversed(under_way)][::-1]
        return grads, self._weight_gradient(call, given, grads) if call.wants_weight_gradient else None

    def _sizes(self, call: Call) -> list[list[int]]:
        return [way.sizes(call) for way in self._ways(call)]

    def _train(self, call: Call, grads: Sequence[torch.Tensor]) -> Trained:
        for way, grad in zip(self._ways(call), grads, strict=True):
            yield from way.train(call, grad)

    def _order(self, call: Call) -> None:
        """Called when this rank has looked up all that is asked for."""
        for way in self._ways(call):
            way.read_to_train(call)
        if self.peers.num_replicas == 1:  # else gradients of weights are worked out of other sources' ids
            self.input_dist.receive(call).let_go()
        for way in self._ways(call):
            way.order(call)

    def _weight_gradient(self, call: Call, given: torch.Tensor, looked_up: Sequence[torch.Tensor]) -> torch.Tensor:
        """(N,) gradient of the batch's weights: from the owners of the rows, and from the local tables.

        Args:
            given: (B, sum of dims) gradient of the results.
            looked_up: gradients of what each way looked up here for the own sources, times `factor`.
        """
        weights = call.batch.weights
        assert weights is not None
        result = torch.zeros(weights.numel(), dtype=self.dtype, device=self.device)
        of_slots: dict[int, list[tuple[int, torch.Tensor]]] = {source: [] for source in self.peers.by_table_rank}
        for way, grad in zip(self._ways(call), looked_up, strict=True):
            for source, slot, part in way.weight_gradients(call, grad):
                of_slots[source].append((slot, part))
        # For each source slot by slot, as its ids came.
        in_order = [[part for _, part in sorted(of, key=lambda at: at[0])] for of in of_slots.values()]
        send = [torch.cat([result[:0], *parts]) for parts in in_order]
        receive_sizes = [sum(call.sent.counts[s]) for s in self.peers.by_table_rank]
        codec, channel = self.peers.codecs.gradients, self.peers.table
        wire = encoded(codec, torch.cat(send), channel)
        came = channel.all_to_all(wire, [t.numel() for t in send], receive_sizes).wait()
        by_rank = decoded(codec, came, self.dtype).split(receive_sizes)
        for s, part in zip(self.peers.by_table_rank, by_rank, strict=True):
            result.index_add_(0, call.sent.weight_places[s], part, alpha=1.0 / self.factor)
        for local, bags in zip(self._local, self._local_bags(call), strict=True):
            part = local.tbe.lookup.gradient_weights(local.columns_of(given, 1.0), bags).to(self.dtype)
            keys = [call.batch.key_of[f] for f in local.tbe.features]
            result.index_add_(0, take(call.batch.places, keys, call.batch.starts), part)
        return result.to(weights.dtype)

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
            result.append(Bags(ids, offsets(batch.lengths[keys].to(ids.dtype)), weights))
        return result

    def _local_row_gradients(self, call: Call, given: torch.Tensor) -> Callable[[int, Into | None], RowGradients]:
        trained = [
            (local, bags)
            for local, bags in zip(self._local, self._local_bags(call), strict=True)
            if local.tbe.is_trainable
        ]

        def of_tbe(number: int, into: Into | None) -> RowGradients:
            local, bags = trained[number]
            return local.row_gradients(given, bags, self.factor, into)

        return of_tbe

    def _clip_means(self, grad: torch.Tensor) -> None:
        """Clamp the gradient of means where an optimizer's options ask for it: as FBGEMM, before it is divided.

        That of sums is clamped with the update, where it is the same.
        """
        placement = self.store.placement
        starts = [0, *accumulate(self.dims)]
        for tbe in self.store.tbes:
            if tbe.bank.clips:
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


def _runs_of_mean(dims: Sequence[int], means: Sequence[bool]) -> list[tuple[slice, slice, int]]:
    """(columns, features, dim) of each run of features that are pooled by mean and have one dim."""
    runs, column, feature = [], 0, 0
    for (is_mean, dim), run in groupby(zip(means, dims, strict=True)):
        num = len(list(run))
        if is_mean:
            runs.append((slice(column, column + num * dim), slice(feature, feature + num), dim))
        column, feature = column + num * dim, feature + num
    return runs
