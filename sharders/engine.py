"""The embedding data path of one module: route, lookup, deliver, and back.

One call is: header exchange -> payload exchange -> lookup -> output exchange; backward is one exchange of gradients and
the update. All tables of a module travel together whatever their layouts. Gradients are means over the data ranks.
A module called twice in a step is updated once for each call, in the order of their backward passes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from dmp import InputError, Layout, ShardError, ShardingEnv
from sharders.deliver import Piece, Stage, cut_pieces
from sharders.deliver_rows import Patch, RowDelivery
from sharders.exchange import all_reduce_sum, all_to_all
from sharders.faults import Fault, Kind, dtype_index
from sharders.kernels import update_dense
from sharders.placement import Placement, Table
from sharders.route import Batch, Received, Router, Sent
from sharders.store import Holding, TableStore
from sharders.topology import find_peers

_HEADER = 8  # words: fingerprint, batch size, payload words, flags, fault (4)
_RIDER_BYTES = 64 << 20  # a larger sum of data-parallel gradients goes by all-reduce, not in the gradients' exchange


@dataclass
class Call:
    """What one forward keeps for its backward."""

    batch: Batch
    sent: Sent
    received: Received
    batch_sizes: list[int]
    is_training: bool


class Engine:
    """The data path of one module's tables.

    Args:
        tables: in the order of the module's results.
        layouts: one for each table.
        env: the mesh.
        device: of the tables.
        unpooled: results are rows instead of bags.
        validate: check every batch before any exchange (ids in range, lengths, weights).
        sync_interval: with a replicate axis: 1 shares gradients between the copies at every step, so that they stay
            equal to one process; k > 1 averages weights and optimizer state every k updates.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        layouts: Sequence[Layout],
        env: ShardingEnv,
        device: torch.device,
        *,
        unpooled: bool = False,
        validate: bool = True,
        sync_interval: int = 1,
    ) -> None:
        _check_supported(tables, env, sync_interval)
        self.env, self.unpooled, self.validate, self.sync_interval = env, unpooled, validate, sync_interval
        self.tables = list(tables)
        self.name = "the embedding module"
        self.placement = Placement(tables, layouts, env, unpooled)
        self.peers = find_peers(env, sync_interval == 1)
        self.store = TableStore(self.placement, env.table_rank, device)
        self.dtype = torch.float64 if any(t.dtype == torch.float64 for t in tables) else torch.float32
        self._content = repr([(t, str(lay)) for t, lay in zip(tables, layouts, strict=True)])
        self._compile(device)

    def _compile(self, device: torch.device) -> None:
        self.device = device
        rows = max((s.stop - s.start for s in self.placement.segments), default=0)
        wide = rows >= 2**31 or self.dtype == torch.float64
        self.router = Router(self.placement, self.peers.table_ranks, device, wide, self.unpooled)
        self.num_slots = len(self.placement.slots[self.env.table_rank])
        self._fingerprint: int | None = None
        self._rows = torch.tensor(
            [self.tables[f.table].rows for f in self.placement.features], dtype=torch.int64, device=device
        )
        self._dims = [self.tables[f.table].dim for f in self.placement.features]
        self._feature_of_column = torch.tensor(
            [f.index for f in self.placement.features for _ in range(self._dims[f.index])], device=device
        )
        self._mean = [self.tables[f.table].mean for f in self.placement.features]
        self._trainable = any(t.trainable for t in self.tables)
        if self.unpooled:
            self.rows_out = RowDelivery(self.placement, self.peers.table, self.peers.by_table_rank)
        else:
            self.stages = self._make_stages()

    def _make_stages(self) -> list[Stage]:
        peers, slots = self.peers, self.placement.slots
        pieces: list[list[Piece]] = [[(s.feature, s.column, s.width) for s in of_rank] for of_rank in slots]
        target: list[Piece] = [(f.index, 0, self._dims[f.index]) for f in self.placement.features]
        local: list[Piece] = [
            (f, 0, self._dims[f]) for h in self.store.local for f in h.features
        ]
        if peers.outer_size == 1:
            return [Stage(peers.table, peers.table_rank, [*pieces, local], target)]
        hosts = [pieces[h * peers.inner_size : (h + 1) * peers.inner_size] for h in range(peers.outer_size)]
        host, inner = divmod(peers.table_rank, peers.inner_size)
        joined = [cut_pieces(of_host) for of_host in hosts]
        return [
            Stage(peers.inner, inner, [*hosts[host], []], joined[host]),
            Stage(peers.outer, host, [*joined, local], target),
        ]

    def set_name(self, name: str) -> None:
        """Name the module in messages; part of what ranks compare."""
        self.name, self._fingerprint = name or "the model", None

    def move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace storage by `fn` of it, and compile for its device."""
        self.store.apply(fn)
        device = next((h.bank.weights.device for h in self.store.holdings), self.device)
        if device != self.device:
            self._compile(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        new = copy.copy(self)
        memo[id(self)] = new
        new.store = copy.deepcopy(self.store, memo)
        return new

    def pooled(self, parse: Callable[[], Batch]) -> torch.Tensor:
        """(B, sum of dims): results of all features side by side. `parse` may raise `Fault`."""
        assert not self.unpooled
        call = self._start(parse)
        result: torch.Tensor = _Pooled.apply(self, call, *self._inputs(call))
        return result

    def rows(self, parse: Callable[[], Batch]) -> list[torch.Tensor]:
        """For each feature its ids' rows (N_f, dim). `parse` may raise `Fault`."""
        assert self.unpooled
        call = self._start(parse)
        out: tuple[torch.Tensor, ...] = _Rows.apply(self, call, *self._inputs(call))
        dims = self._distinct_dims()
        counts = [call.batch.counts[call.batch.key_of[f.index]] for f in self.placement.features]
        split = {
            dim: iter(rows.split([n for n, d in zip(counts, self._dims, strict=True) if d == dim]))
            for dim, rows in zip(dims, out, strict=True)
        }
        return [next(split[dim]) for dim in self._dims]

    def _inputs(self, call: Call) -> list[torch.Tensor]:
        return list(self.store.parameters) if call.is_training else []

    # Forward: header, payload.

    def _start(self, parse: Callable[[], Batch]) -> Call:
        batch, sent, fault = None, None, None
        try:
            batch = parse()
            if self.validate:
                self._validate(batch)
            sent = self.router.send(batch)
        except Fault as found:
            fault = found
        is_training = torch.is_grad_enabled() and self._trainable
        headers = self._exchange_headers(batch, sent, fault, is_training)
        assert batch is not None and sent is not None
        words = [h[2] for h in headers]
        payload = all_to_all(sent.payload, sent.words, words, self.peers.exchange)
        batch_sizes = [h[1] for h in headers]
        received = self.router.receive(payload, words, batch_sizes, self.num_slots, batch.weights is not None)
        return Call(batch, sent, received, batch_sizes, is_training)

    def _exchange_headers(
        self, batch: Batch | None, sent: Sent | None, fault: Fault | None, is_training: bool
    ) -> list[list[int]]:
        """Every rank's header; raises on every rank what any rank found."""
        if self._fingerprint is None:
            digest = hashlib.sha256((self.name + self._content).encode()).digest()
            self._fingerprint = int.from_bytes(digest[:7], "big")
        is_weighted = batch is not None and batch.weights is not None
        flags = int(is_training) + 2 * int(is_weighted)
        size, words = (batch.batch_size, sent.words) if batch is not None and sent is not None else (0, [])
        count = len(self.peers.table_ranks)
        tail = fault.packed() if fault else [0, 0, 0, 0]
        mine = [[self._fingerprint, size, words[i] if words else 0, flags, *tail] for i in range(count)]
        headers = mine
        if count > 1:
            send = torch.tensor(mine, dtype=torch.int64, device=self.device).view(-1)
            sizes = [_HEADER] * count
            headers = all_to_all(send, sizes, sizes, self.peers.exchange).view(count, _HEADER).tolist()
        if any(h[0] != self._fingerprint for h in headers):
            self._raise_mismatch()
        for rank, header in enumerate(headers):
            if header[4] != Kind.NONE:
                names = [f.name for f in self.placement.features]
                raise Fault.unpacked(header[4:]).error(names, self.name, rank)
        for rank, header in enumerate(headers):
            if header[3] != headers[0][3]:
                raise InputError(
                    f"ranks disagree on how they call {self.name}: rank 0 {_flags(headers[0][3])}, rank {rank} "
                    f"{_flags(header[3])}; call it the same way on every rank"
                )
        return headers

    def _raise_mismatch(self) -> None:
        told: list[Any] = [None] * len(self.peers.table_ranks)
        dist.all_gather_object(told, (self.name, self._content), group=self.peers.exchange)
        for rank, (name, content) in enumerate(told):
            if (name, content) != told[0]:
                what = f"calls {name!r}" if name != told[0][0] else f"has other tables or layouts in {name!r}"
                raise InputError(
                    f"ranks are not at the same module: rank 0 calls {told[0][0]!r}, rank {rank} {what}; every rank "
                    "must run the same modules in the same order, with the same plan"
                )
        raise AssertionError("fingerprints differ, contents do not")

    def _validate(self, batch: Batch) -> None:
        if batch.values.dtype not in (torch.int32, torch.int64):
            raise Fault(Kind.ID_DTYPE, value=dtype_index(batch.values.dtype))
        if batch.lengths.numel() and int(batch.lengths.min()) < 0:
            key = int((batch.lengths.min(1).values < 0).nonzero()[0])
            feature = next((f for f, k in enumerate(batch.key_of) if k == key), -1)
            raise Fault(Kind.LENGTH_NEGATIVE, feature, int(batch.lengths[key].min()))
        total = sum(batch.counts)
        if total != batch.values.numel():
            raise Fault(Kind.LENGTH_SUM, value=total, expected=batch.values.numel())
        if batch.weights is not None:
            if batch.weights.numel() != batch.values.numel():
                raise Fault(Kind.WEIGHTS_LENGTH, value=batch.weights.numel(), expected=batch.values.numel())
            if not batch.weights.is_floating_point():
                raise Fault(Kind.WEIGHTS_DTYPE, value=dtype_index(batch.weights.dtype))
            if batch.weights.requires_grad and torch.is_grad_enabled():
                raise Fault(Kind.WEIGHTS_GRADIENT)
        self._validate_ids(batch)

    def _validate_ids(self, batch: Batch) -> None:
        """One pass over all ids; the slow search for the culprit only when there is one."""
        limit = [2**63 - 1] * len(batch.counts)
        for f, key in enumerate(batch.key_of):
            limit[key] = min(limit[key], self.tables[self.placement.features[f].table].rows)
        unread = [k for k, n in enumerate(limit) if n == 2**63 - 1]
        if batch.values.numel() == 0:
            return
        bound = torch.tensor(limit, device=batch.values.device).repeat_interleave(
            torch.tensor(batch.counts, device=batch.values.device), output_size=batch.values.numel()
        )
        bad = (batch.values < 0) | (batch.values >= bound)
        if not bool(bad.any()):
            return
        starts = [0, *accumulate(batch.counts)]
        for f, key in enumerate(batch.key_of):
            ids = batch.values[starts[key] : starts[key + 1]]
            rows = self.tables[self.placement.features[f].table].rows
            wrong = ids[(ids < 0) | (ids >= rows)]
            if wrong.numel():
                raise Fault(Kind.ID_RANGE, f, int(wrong[0]), rows)
        assert unread, "an id out of range belongs to a feature, or to a key that none reads"

    # Pooled.

    def pooled_forward(self, call: Call) -> torch.Tensor:
        """Lookup and deliver."""
        ids, lengths, weights = self._slot_major(call, self.peers.own)
        samples = lengths.shape[1]
        parts = [
            h.lookup.pooled(*self._of_holding(h, ids, lengths, weights)).to(self.dtype)
            for h in self.store.sharded
            if len(h.slots)
        ]
        looked_up = parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else self._empty(samples, 0)
        local = [h.lookup.pooled(*self._local_bags(call.batch, h)).to(self.dtype) for h in self.store.local]
        block = None if not local else local[0] if len(local) == 1 else torch.cat(local, 1)
        out = looked_up
        for i, stage in enumerate(self.stages):
            out = stage.forward(out, self._stage_rows(call, i), block if i == len(self.stages) - 1 else None)
        scale = self._mean_scale(call.batch)
        return out if scale is None else out.mul_(scale)

    def pooled_backward(self, call: Call, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients back to the owners, and updates; returns the gradients of ordinary parameters."""
        scale = self._mean_scale(call.batch)
        grad = grad.to(self.dtype)
        if scale is not None:
            grad = grad * scale
        factor = 1.0 / self.env.data_size
        local_grad: torch.Tensor | None = None
        rider, flats, rides = None, None, False
        for i in reversed(range(len(self.stages))):
            stage, is_last = self.stages[i], i == len(self.stages) - 1
            if is_last and self.store.local:
                flats = self._local_gradients_pooled(call, grad, stage, factor)
                rider = torch.cat([f for pair in flats for f in pair]) if flats else None
                rides = self._rides(rider)
            grad, local_grad, summed = stage.backward(
                grad, self._stage_rows(call, i), factor if is_last else 1.0, rider if is_last and rides else None
            )
            if is_last and rides:
                rider = summed
        del local_grad
        if rider is not None and not rides:
            all_reduce_sum(rider, self.peers.exchange)
        sources = self.peers.own
        if self.peers.num_replicas > 1:
            sources = self.peers.everyone
            samples = sum(call.batch_sizes[i] for i in sources)
            sizes = self._replica_sizes(call, grad.shape[1])
            grad = self._share(grad.reshape(-1), sizes).view(samples, grad.shape[1])
        ids, lengths, weights = self._slot_major(call, sources)
        gradients: dict[int, torch.Tensor] = {}
        column = 0
        for h in self.store.sharded:
            columns = h.lookup.num_columns
            of_holding = grad[:, column : column + columns]
            column += columns
            if not h.is_trainable:
                continue
            arguments = self._of_holding(h, ids, lengths, weights) if len(h.slots) else None
            of_holding = of_holding.to(h.bank.weights.dtype).contiguous()
            if h.bank.spec is None:
                gradients[id(h)] = (
                    h.lookup.gradient_pooled(of_holding, *arguments) if arguments else torch.zeros_like(h.bank.weights)
                )
            else:
                h.bank.step()
                if arguments:
                    h.lookup.update_pooled(of_holding, *arguments)
        self._finish_local(rider, flats, gradients)
        self._average_copies()
        return self._parameter_gradients(gradients)

    def _slot_major(
        self, call: Call, sources: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ids, lengths, bits = call.received.slot_major(sources)
        return ids, lengths, None if bits is None else self.router.weights_of(bits)

    def _of_holding(
        self, h: Holding, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(ids, offsets, weights) of a holding's slots."""
        if len(h.slots) != lengths.shape[0]:
            bounds = lengths.sum(1).cumsum(0).tolist()
            start = bounds[h.slots.start - 1] if h.slots.start else 0
            stop = bounds[h.slots.stop - 1]
            lengths = lengths[h.slots.start : h.slots.stop]
            ids, weights = ids[start:stop], None if weights is None else weights[start:stop]
        return ids, _offsets(lengths), None if weights is None else weights.to(h.bank.weights.dtype)

    def _local_bags(self, batch: Batch, h: Holding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(ids, offsets, weights) of this rank's own bags for the features of a local holding."""
        keys = [batch.key_of[f] for f in h.features]
        starts = [0, *accumulate(batch.counts)]
        ids = _take(batch.values, keys, starts)
        weights = None if batch.weights is None else _take(batch.weights, keys, starts).to(h.bank.weights.dtype)
        return ids, _offsets(batch.lengths[keys].to(ids.dtype)), weights

    def _stage_rows(self, call: Call, stage: int) -> list[int]:
        """Samples of each rank of a stage's group: what is sent to it, and what it has sent."""
        peers = self.peers
        size = [call.batch_sizes[i] for i in peers.by_table_rank]
        if peers.outer_size == 1:
            return size
        host, inner = divmod(peers.table_rank, peers.inner_size)
        if stage == 0:
            return [
                sum(size[h * peers.inner_size + i] for h in range(peers.outer_size)) for i in range(peers.inner_size)
            ]
        return [size[h * peers.inner_size + inner] for h in range(peers.outer_size)]

    def _mean_scale(self, batch: Batch) -> torch.Tensor | None:
        """(B, sum of dims) 1 / bag length in columns of mean features, 1 in others; None without mean features."""
        if not any(self._mean):
            return None
        scale = torch.ones(len(self._mean), batch.batch_size, dtype=self.dtype, device=self.device)
        for f, is_mean in enumerate(self._mean):
            if is_mean:
                scale[f] = 1.0 / batch.lengths[batch.key_of[f]].clamp(min=1)
        return scale.t().index_select(1, self._feature_of_column)

    def _local_gradients_pooled(
        self, call: Call, grad: torch.Tensor, stage: Stage, factor: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(flat gradient, touched rows) of each trainable local holding, from this rank's own bags."""
        starts = [0, *accumulate(self._dims)]
        result = []
        for h in self.store.local:
            if not h.is_trainable:
                continue
            columns = torch.cat([grad[:, starts[f] : starts[f + 1]] for f in h.features], 1)
            arguments = self._local_bags(call.batch, h)
            flat = h.lookup.gradient_pooled(columns.mul_(factor).to(h.bank.weights.dtype), *arguments)
            touched = h.lookup.touched_pooled(arguments[0], arguments[1])
            result.append((flat.to(self.dtype), touched.to(self.dtype)))
        return result

    # Rows.

    def rows_forward(self, call: Call) -> list[torch.Tensor]:
        """Lookup and deliver; one tensor for each distinct dim."""
        parts, sizes = self._lookup_rows(call)
        send = torch.cat(parts) if len(parts) != 1 else parts[0]
        patches = self.rows_out.patches(call.sent)
        order = self._by_table_rank([sizes[i] for i in range(len(sizes))])
        out = self.rows_out.forward(send, order, patches, self._num_rows(call.batch), self._local_rows(call.batch))
        return [out[dim] for dim in self._distinct_dims()]

    def rows_backward(self, call: Call, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients back to the owners, and updates; returns the gradients of ordinary parameters."""
        factor = 1.0 / self.env.data_size
        by_dim = {dim: g.to(self.dtype) for dim, g in zip(self._distinct_dims(), grads, strict=True)}
        flats = self._local_gradients_rows(call.batch, by_dim, factor) if self.store.local else None
        rider = torch.cat([f for pair in flats for f in pair]) if flats else None
        rides = self._rides(rider)
        sizes = self._row_sizes(call, self.peers.own)
        grad, summed = self.rows_out.backward(
            by_dim,
            self._by_table_rank([sum(s) for s in sizes]),
            self.rows_out.patches(call.sent),
            factor,
            rider if rides else None,
            self.peers.table_rank,
        )
        rider = summed if rides else rider
        if rider is not None and not rides:
            all_reduce_sum(rider, self.peers.exchange)
        # From the order of table ranks to the order of sources.
        table_sizes = self._by_table_rank([sum(s) for s in sizes])
        by_rank = grad.split(table_sizes)
        position = {i: t for t, i in enumerate(self.peers.by_table_rank)}
        grad = torch.cat([by_rank[position[i]] for i in self.peers.own])
        sources = self.peers.own
        if self.peers.num_replicas > 1:
            sources = self.peers.everyone
            per_copy = [
                sum(sum(s) for s in self._row_sizes(call, sources[c * len(self.peers.own) : (c + 1) * len(self.peers.own)]))
                for c in range(self.peers.num_replicas)
            ]
            grad = self._share(grad, per_copy)
        gradients = self._update_rows(call, grad, sources)
        self._finish_local(rider, flats, gradients)
        self._average_copies()
        return self._parameter_gradients(gradients)

    def _width_groups(self) -> list[tuple[Holding, range, int]]:
        """Runs of this rank's slots that share a bank and a width: (holding, slots, width)."""
        slots = self.placement.slots[self.env.table_rank]
        groups: list[tuple[Holding, range, int]] = []
        for h in self.store.sharded:
            for i in h.slots:
                if groups and groups[-1][0] is h and groups[-1][2] == slots[i].width:
                    groups[-1] = (h, range(groups[-1][1].start, i + 1), slots[i].width)
                else:
                    groups.append((h, range(i, i + 1), slots[i].width))
        return groups

    def _group_ids(
        self, call: Call, sources: Sequence[int], counts: list[list[int]], slots: range
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Ids of some slots, source by source, and their (slot, count) segments."""
        pieces, segments = [], []
        for source, of_slots in zip(sources, counts, strict=True):
            start = sum(of_slots[: slots.start])
            stop = start + sum(of_slots[slots.start : slots.stop])
            pieces.append(call.received.ids[source][start:stop])
            segments += [(i, of_slots[i]) for i in slots]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0], segments

    def _lookup_rows(self, call: Call) -> tuple[list[torch.Tensor], list[int]]:
        """Flat rows for each source, in table-rank order and there by width group; elements for each own source."""
        own = self.peers.own
        counts = call.received.counts(own)
        blocks: list[tuple[torch.Tensor, ...]] = []
        for h, slots, width in self._width_groups():
            ids, segments = self._group_ids(call, own, counts, slots)
            rows = h.lookup.rows(ids, [(i - h.slots.start, n) for i, n in segments]).to(self.dtype).reshape(-1)
            blocks.append(rows.split([sum(of[slots.start : slots.stop]) * width for of in counts]))
        sizes = [sum(s) for s in self._row_sizes(call, own)]
        if len(blocks) == 1 and own == self.peers.by_table_rank and len(own) == 1:
            return [blocks[0][0]], sizes
        place = {source: i for i, source in enumerate(own)}
        parts = [block[place[i]] for i in self.peers.by_table_rank for block in blocks]
        return parts or [self._empty(0)], sizes

    def _update_rows(self, call: Call, grad: torch.Tensor, sources: Sequence[int]) -> dict[int, torch.Tensor]:
        gradients: dict[int, torch.Tensor] = {}
        counts = call.received.counts(sources)
        groups = self._width_groups()
        sizes = self._row_sizes(call, sources)
        cut = grad.split([n for of_source in sizes for n in of_source]) if groups else []
        for h in self.store.sharded:
            if h.bank.spec is not None and h.is_trainable:
                h.bank.step()
            if h.bank.spec is None and h.is_trainable:
                gradients[id(h)] = torch.zeros_like(h.bank.weights)
        for g, (h, slots, width) in enumerate(groups):
            if not h.is_trainable:
                continue
            ids, segments = self._group_ids(call, sources, counts, slots)
            local = [(i - h.slots.start, n) for i, n in segments]
            pieces = [cut[s * len(groups) + g] for s in range(len(sources))]
            rows = (torch.cat(pieces) if len(pieces) != 1 else pieces[0]).view(-1, width).to(h.bank.weights.dtype)
            if h.bank.spec is None:
                gradients[id(h)] += h.lookup.gradient_rows(rows, ids, local)
            else:
                h.lookup.update_rows(rows, ids, local)
        return gradients

    def _row_sizes(self, call: Call, sources: Sequence[int]) -> list[list[int]]:
        """Elements of each source's rows, by width group."""
        groups = self._width_groups()
        return [
            [sum(of[slots.start : slots.stop]) * width for _, slots, width in groups]
            for of in call.received.counts(sources)
        ]

    def _by_table_rank(self, of_own: Sequence[int]) -> list[int]:
        """Values given in the order of sources, in table-rank order."""
        place = {source: i for i, source in enumerate(self.peers.own)}
        return [of_own[place[i]] for i in self.peers.by_table_rank]

    def _num_rows(self, batch: Batch) -> dict[int, int]:
        rows = dict.fromkeys(self._distinct_dims(), 0)
        for f, dim in enumerate(self._dims):
            rows[dim] += batch.counts[batch.key_of[f]]
        return rows

    def _distinct_dims(self) -> list[int]:
        return list(dict.fromkeys(self._dims))

    def _local_patches(self, batch: Batch, h: Holding) -> list[Patch]:
        at = dict.fromkeys(self._distinct_dims(), 0)
        starts = []
        for f, dim in enumerate(self._dims):
            starts.append(at[dim])
            at[dim] += batch.counts[batch.key_of[f]]
        return [
            Patch(self._dims[f], 0, self._dims[f], n, slice(starts[f], starts[f] + n))
            for f in h.features
            for n in (batch.counts[batch.key_of[f]],)
        ]

    def _local_ids(self, batch: Batch, feature: int) -> torch.Tensor:
        starts = [0, *accumulate(batch.counts)]
        key = batch.key_of[feature]
        return batch.values[starts[key] : starts[key + 1]]

    def _local_rows(self, batch: Batch) -> list[tuple[Patch, torch.Tensor]]:
        result = []
        for h in self.store.local:
            for i, (f, patch) in enumerate(zip(h.features, self._local_patches(batch, h), strict=True)):
                rows = h.lookup.rows(self._local_ids(batch, f), [(i, patch.count)])
                result.append((patch, rows.view(patch.count, patch.width).to(self.dtype)))
        return result

    def _local_gradients_rows(
        self, batch: Batch, grads: dict[int, torch.Tensor], factor: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        result = []
        for h in self.store.local:
            if not h.is_trainable:
                continue
            flat = torch.zeros_like(h.bank.weights)
            touched = torch.zeros(h.bank.total_rows, dtype=torch.bool, device=flat.device)
            for i, (f, patch) in enumerate(zip(h.features, self._local_patches(batch, h), strict=True)):
                rows = (grads[patch.dim][patch.where] * factor).to(flat.dtype)
                ids, segments = self._local_ids(batch, f), [(i, patch.count)]
                flat += h.lookup.gradient_rows(rows, ids, segments)
                touched |= h.lookup.touched_rows(ids, segments)
            result.append((flat.to(self.dtype), touched.to(self.dtype)))
        return result

    # Both.

    def _rides(self, rider: torch.Tensor | None) -> bool:
        """Whether data-parallel gradients are summed in the exchange of the others."""
        return (
            rider is not None
            and self.peers.outer_size == 1
            and self.peers.num_replicas == 1
            and rider.numel() * rider.element_size() * self.env.table_size <= _RIDER_BYTES
        )

    def _share(self, flat: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Every copy's gradients of this rank's pieces, one copy after the other."""
        count = self.peers.num_replicas
        return all_to_all(flat.repeat(count), [flat.numel()] * count, sizes, self.peers.replicas)

    def _replica_sizes(self, call: Call, width: int) -> list[int]:
        per_copy = len(self.peers.own)
        order = self.peers.everyone
        return [
            sum(call.batch_sizes[i] for i in order[c * per_copy : (c + 1) * per_copy]) * width
            for c in range(self.peers.num_replicas)
        ]

    def _finish_local(
        self,
        rider: torch.Tensor | None,
        flats: list[tuple[torch.Tensor, torch.Tensor]] | None,
        gradients: dict[int, torch.Tensor],
    ) -> None:
        """Update data-parallel tables by the summed gradient, or hand it to their parameters."""
        if rider is None or flats is None:
            return
        parts = rider.split([f.numel() for pair in flats for f in pair])
        trainable = [h for h in self.store.local if h.is_trainable]
        for i, h in enumerate(trainable):
            flat, touched = parts[2 * i].to(h.bank.weights.dtype), parts[2 * i + 1] > 0
            if h.bank.spec is None:
                gradients[id(h)] = flat
            else:
                h.bank.step()
                update_dense(h.bank, flat, touched)

    def _parameter_gradients(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """For each table its ordinary gradient, None for those updated here."""
        result: list[torch.Tensor | None] = [None] * len(self.tables)
        for h in self.store.holdings:
            flat = gradients.get(id(h))
            for i, index in enumerate(h.tables if flat is not None else ()):
                result[index] = h.bank.table_view(i, self.tables[index].dim, flat)
        return result

    def _average_copies(self) -> None:
        """With a sync interval: the copies' weights and state become their mean, every so many updates."""
        if self.sync_interval == 1 or self.peers.replicas is None:
            return
        count = dist.get_world_size(self.peers.replicas)
        for h in self.store.holdings:
            if h.is_trainable and int(h.bank.steps[0]) % self.sync_interval == 0:
                for tensor in (h.bank.weights, *h.bank.state.values()):
                    all_reduce_sum(tensor, self.peers.replicas)
                    tensor.div_(count)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class _Pooled(torch.autograd.Function):
    """Forward: (B, D) pooled results. Backward: gradients to their owners, who update or return `.grad`."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, call: Call, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.engine, ctx.call = engine, call
        return engine.pooled_forward(call)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, *ctx.engine.pooled_backward(ctx.call, grad)


class _Rows(torch.autograd.Function):
    """Forward: one (N, dim) tensor of rows for each distinct dim. Backward: as `_Pooled`."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, call: Call, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.call = engine, call
        return tuple(engine.rows_forward(call))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.engine.rows_backward(ctx.call, grads)


def _check_supported(tables: Sequence[Table], env: ShardingEnv, sync_interval: int) -> None:
    if any(env.shape[env.names.index(a)] > 1 for a in env.axes("tensor")):
        raise ShardError(
            f"tables on a mesh with a tensor axis ({env.axes('tensor')}) of more than one rank are not supported yet; "
            "use a mesh of shard and replicate axes"
        )
    if env.mesh is None and env.size > 1:
        raise ShardError(f"{env} is abstract: it can be planned for, not run on; use ShardingEnv.from_mesh")
    if not isinstance(sync_interval, int) or sync_interval < 1:
        raise ShardError(f"sync_interval must be an integer >= 1; got {sync_interval!r}")
    plain = [t.parameter for t in tables if t.trainable and t.optimizer is None]
    if sync_interval > 1 and plain:
        raise ShardError(
            f"sync_interval={sync_interval} averages copies of tables that are updated in the backward pass; "
            f"{plain[0]!r} has no in-backward optimizer: apply one, or use sync_interval=1"
        )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """(S * B + 1,) bounds of the bags whose lengths are (S, B)."""
    flat = lengths.reshape(-1)
    offsets = flat.new_zeros(flat.numel() + 1)
    torch.cumsum(flat, 0, out=offsets[1:])
    return offsets


def _take(values: torch.Tensor, keys: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    parts = [values[starts[k] : starts[k + 1]] for k in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else values[:0]


def _flags(flags: int) -> str:
    return f"is {'training' if flags & 1 else 'not training'} and {'has' if flags & 2 else 'has no'} weights"
