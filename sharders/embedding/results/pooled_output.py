"""Output dist of pooled lookups: one exchange; placing, summing row partials and joining columns happen on receipt.

What a rank looks up for its own samples is written where it belongs, and only what others send is placed: of two ranks'
26 tables (2,048 samples, 13.6 MB of results) half was written twice and read once more than it had to be.

[Note: two dists]
Each sender's lookup is columns of features; the receiver writes them into its own columns, where several senders' of
the same columns (row partials) are summed. With two shard axes a first output dist inside the inner (fast) axis sums
what one host holds, for all hosts' samples; a second along the outer axis finishes. Backward runs them in reverse.
Where partials are fewer bytes than that they go straight to the ranks of the samples, in one, see stages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

import torch

from sharders.channel import Channel, GroupChannel, Landing
from sharders.embedding.exchange.codec import Codecs
from sharders.embedding.exchange.output_dist import Beside, ResultExchange, landing_for, send_gradients
from sharders.embedding.exchange.peers import Peers
from sharders.embedding.exchange.placement import Placement
from sharders.embedding.results.columns import Placing, cut_columns, first_columns, runs_of
from sharders.embedding.results.partial_columns import PartialColumns
from sharders.embedding.results.partials import Partials, PartialsPlan
from sharders.embedding.results.ragged import Block, Columns, padded_rows, ragged, ragged_size

Blocks = Sequence[Sequence[Block]] | None  # of each rank: of all batches whose rows go there


class PooledOutputDist:
    """One exchange of pooled lookups, forward and backward; see [Note: two dists] and [Note: partials].

    Rows are grouped by destination: the others' in rank order, then this rank's own, which do not travel. What goes to
    a rank is its rows of the lookup, then its partials.

    Args:
        channel: between the ranks that take part.
        sources: columns of each of its ranks, then of groups of partials.
        target: this rank's columns.
        kernel: see `Placing`.
        plan: of the partials, if there are any.
    """

    def __init__(
        self,
        channel: Channel,
        codecs: Codecs,
        sources: Sequence[Sequence[Columns]],
        target: Sequence[Columns],
        kernel: str | None,
        plan: PartialsPlan | None = None,
    ) -> None:
        self.channel, self.codecs, self.me = channel, codecs, channel.rank
        self.columns = [list(columns) for columns in sources[: channel.size]]
        self.widths = [sum(c[2] for c in columns) for columns in sources]
        self.width = sum(c[2] for c in target)
        self.group_widths = [columns[0][2] for columns in sources[channel.size :]]
        nobody_sends = not any(self.widths[: channel.size]) and not self.group_widths
        self._results = GroupChannel(None) if nobody_sends else channel
        self._others = [i for i in range(channel.size) if i != self.me]
        self._order = [*self._others, self.me]
        # This rank's own is what others' sums are added to, and is placed first, while the others' rows travel.
        order = [self.me, *self._others, *range(channel.size, len(sources))]
        runs = runs_of({i: sources[i] for i in order}, target)
        of_groups = [run for run in runs if max(run.numbers) >= channel.size]
        there = [run for run in runs if run.numbers != (self.me,) and run not in of_groups]
        self._here = Placing([run for run in runs if run.numbers == (self.me,)], kernel)
        self._there = Placing(there, kernel)
        self._beside_own = Placing([run.onto(self.me) for run in there], kernel)
        self._of_groups = Placing(of_groups, kernel)
        self._partial_columns = None if plan is None else PartialColumns(plan, target, kernel)
        back = {i: [run.back(of) for run in runs for of in run.sources if of.number == i] for i in order}
        self._back = {i: Placing(of, kernel) for i, of in back.items()}
        is_one = len(runs) == 1 and runs[0].num == 1 and runs[0].width == self.width
        self._all_in_one = runs[0].numbers if is_one else None  # those that give all columns, in one piece
        self.columns_read = tuple(first_columns(self.columns[self.me], target))
        """Of each of the own columns the first in the target."""
        self.own_columns = self.columns_read if _are_apart(self.columns[self.me], self.columns_read) else None
        """The same to be written; None where some have the same, to be summed."""

    def memory(
        self, rows: Sequence[int], dtype: torch.dtype, device: torch.device, partials: Partials | None
    ) -> tuple[torch.Tensor, list[tuple[int, int]]] | None:
        """Flat memory that travels: for each of the others its `rows` of this rank's lookup, then its partials.

        Returns:
            With it, runs of rows that lie one behind the other: how many, and the first element. None where what
            travels has another dtype.
        """
        width, others = self.widths[self.me], [i for i in self._others if rows[i]]
        if self.codecs.results is not None or not width or not others:
            return None
        sent = [0] * len(rows) if partials is None else partials.sent
        sizes = [rows[i] * width + sent[i] for i in self._others]
        places = [(rows[i], at) for i, at in zip(self._others, accumulate(sizes, initial=0), strict=False)]
        if len(places) > 1 and not any(sent[i] for i in self._others):
            places = [(sum(rows[i] for i in self._others), 0)]
        return self.channel.empty(sum(sizes), dtype, device), places

    def landing(
        self, rows: Sequence[int], blocks: Blocks, partials: Partials | None, dtype: torch.dtype, device: torch.device
    ) -> Landing | None:
        """Where the gradients are to come of what `forward` sends; the same arguments."""
        sizes, _ = self._sizes(rows, blocks)
        if partials is not None:
            sizes = [n + m for n, m in zip(sizes, partials.sent, strict=True)]
        return landing_for(self._results, self.codecs, sizes, dtype, device)

    def forward(
        self,
        others: torch.Tensor | None,
        look_up_own: Callable[[], torch.Tensor | None],
        out: torch.Tensor,
        rows: Sequence[int],
        blocks: Blocks = None,
        partials: Partials | None = None,
        memory: torch.Tensor | None = None,
        landing: Landing | None = None,
    ) -> Callable[[], None]:
        """Begin to exchange lookups.

        Args:
            others: (rows of the others, own width); None where they are in `memory`.
            look_up_own: called when the exchange is under way; writes `own_columns` of `out`, or gives
                (rows[me], own width).
            out: (rows[me], width), in whose other columns there are results of other tables.
            rows: of each destination.
            blocks: of each destination, where features have batch sizes of their own.
            partials: the call's.
            memory: see `memory`.
            landing: for their gradients.

        Returns:
            What ends it: all columns of these tables are in `out` then.
        """
        mine = rows[self.me]
        to, came_from = self._sizes(rows, blocks)
        wire = None if others is None else others.reshape(-1)
        if blocks is not None and others is not None:
            parts = zip(self._others, others.split([rows[i] for i in self._others]), strict=True)
            none = others.new_empty(0)
            wire = torch.cat([none, *(ragged(part, self.columns[self.me], blocks[i]) for i, part in parts)])
        exchange, own_partials = self._begin(wire, to, came_from, partials, memory, landing)
        own = look_up_own()
        came, there = {self.me: out}, self._beside_own
        if own is not None:
            came, there = {self.me: own}, self._there
            self._here(came, out)

        def place() -> None:
            whole = [i for i in there.numbers if i != self.me]
            if partials is None:
                came.update((i, self._lookup(exchange.part(i), i, mine, blocks)) for i in whole)
            else:
                parts = self._parts(exchange, came_from, partials, own_partials is not None)
                came.update((i, self._lookup(parts[i][0], i, mine, blocks)) for i in whole)
                of_partials = [parts[i][1] for i in self._order if i in parts]
                if self._partial_columns is not None and own_partials is not None:
                    self._partial_columns.add_up(partials.coming, [*of_partials, own_partials], out, partials.own_rows)
                else:
                    flat = exchange.wait()
                    starts = [int(of.storage_offset() - flat.storage_offset()) for of in of_partials]
                    sums = partials.coming.summed(flat, starts)
                    self._of_groups(dict(enumerate(sums, self.channel.size)), out)
            there(came, out)
            exchange.end()

        return place

    def _parts(
        self, exchange: ResultExchange, lookups: Sequence[int], partials: Partials, as_they_lie: bool
    ) -> dict[int, tuple[torch.Tensor, ...]]:
        """What has come from each rank, flat: lookups, and partials; else cut out of all, and of the tail this one's.

        Args:
            lookups: elements of each rank's.
            as_they_lie: read the others' where these are.
        """
        if as_they_lie:
            return {i: exchange.part(i).tensor_split([lookups[i]]) for i in self._others}
        sizes = [n for i in self._others for n in (lookups[i], partials.awaited[i])]
        cut = exchange.wait().split([*sizes, 0, partials.awaited[self.me]])
        return {i: cut[2 * k : 2 * k + 2] for k, i in enumerate(self._order)}

    def _begin(
        self,
        wire: torch.Tensor | None,
        to: Sequence[int],
        came_from: Sequence[int],
        partials: Partials | None,
        memory: torch.Tensor | None,
        landing: Landing | None,
    ) -> tuple[ResultExchange, torch.Tensor | None]:
        """Send flat lookups for the others, and partials; and where compiled code adds up this rank's own partials, but
        for those that it reads from tables."""
        codec = self.codecs.results
        if partials is None:
            wire = memory if wire is None else wire
            assert wire is not None
            return ResultExchange(self._results, codec, wire, to, came_from, landing=landing), None
        wire = self._with_partials(wire, [to[i] for i in self._others], partials, memory)
        send_sizes = [n + m for n, m in zip(to, partials.sent, strict=True)]
        receive_sizes = [n + m for n, m in zip(came_from, partials.awaited, strict=True)]
        own, tail = None, partials.awaited[self.me]
        if self._compiles(wire):
            own, tail = wire.new_empty(0 if partials.own_rows else tail), 0
        exchange = ResultExchange(self.channel, codec, wire, send_sizes, receive_sizes, tail, landing)
        if own is None:
            partials.coming.prepare()
        to_own = exchange.tail if own is None else own
        if to_own is not None and to_own.numel():
            partials.look_up_own(to_own)
        return exchange, own

    def _compiles(self, matrix: torch.Tensor) -> bool:
        """Whether compiled code moves partials and such results or gradients."""
        return self._partial_columns is not None and self._partial_columns.takes(matrix)

    def _with_partials(
        self, wire: torch.Tensor | None, sizes: Sequence[int], partials: Partials, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Flat lookups, `sizes` for each of the others, and behind each its partials; in memory without `wire`."""
        cuts = [n for i, size in zip(self._others, sizes, strict=True) for n in (size, partials.sent[i])]
        if wire is not None:
            is_sent = self.codecs.results is None
            of_wire = sum(cuts), wire.dtype, wire.device
            memory = self.channel.empty(*of_wire) if is_sent else wire.new_empty(sum(cuts))
        assert memory is not None
        parts = memory.split(cuts)
        if wire is not None and wire.numel():
            for part, lookup in zip(parts[::2], wire.split(list(sizes)), strict=True):
                part.copy_(lookup)
        partials.look_up_others(parts[1::2] if any(sizes) else [memory])
        return memory

    def _lookup(self, came: torch.Tensor, source: int, mine: int, blocks: Blocks) -> torch.Tensor:
        """(mine, its width) of what has come from a rank, flat."""
        if blocks is None:
            return came.view(mine, self.widths[source])
        return padded_rows(came, self.columns[source], blocks[self.me])

    def backward(
        self,
        grad: torch.Tensor,
        rows: Sequence[int],
        scale: float,
        beside: Beside | None = None,
        blocks: Blocks = None,
        partials: Partials | None = None,
        landing: Landing | None = None,
        packs_own: bool = True,
        packs_own_partials: bool = True,
    ) -> Callable[[], torch.Tensor]:
        """Begin to exchange gradients the other way.

        Args:
            grad: (rows[me], width).
            rows: of each rank.
            scale: multiplies the gradients on the way.
            beside: a sum over the ranks, in the same exchange.
            blocks: of each rank, where features have batch sizes of their own.
            partials: the call's.
            landing: for the gradients that come.
            packs_own, packs_own_partials: else nobody reads those of this rank's own lookup, or partials.

        Returns:
            What ends it and gives flat gradients of what was sent to each rank, others first: (rows, own width) of the
            lookup, and partials.
        """
        mine, widths = rows[self.me], self.widths[: self.channel.size]
        came_from, to = self._sizes(rows, blocks)
        picks = self._compiles(grad)
        num_groups = 0 if partials is None or picks else len(self.group_widths)
        of_groups = [self._of_group(grad, i) for i in range(num_groups)]

        def pack(rank: int, out: torch.Tensor) -> None:
            """What the lookup of `rank` gave, column by column, and gradients of its partials."""
            if to[rank]:
                pack_lookup(rank, out[: to[rank]])
                out = out[to[rank] :]
            if rank == self.me and not packs_own_partials:
                return
            if partials is not None and self._partial_columns is not None and picks:
                self._partial_columns.pick(partials.coming, rank, grad, scale, out)
            elif partials is not None:
                partials.coming.pack(rank, of_groups, scale, out)

        def pack_lookup(rank: int, flat: torch.Tensor) -> None:
            is_ragged = blocks is not None and rank != self.me
            lookup = grad.new_empty(mine, widths[rank]) if is_ragged else flat.view(mine, widths[rank])
            if rank != self.me or packs_own:
                self._back[rank]({0: grad}, lookup, scale)
            if blocks is not None and is_ragged:
                flat.copy_(ragged(lookup, self.columns[rank], blocks[self.me]))

        send_sizes, receive_sizes = list(to), list(came_from)
        if partials is not None:
            send_sizes = [n + m for n, m in zip(to, partials.awaited, strict=True)]
            receive_sizes = [n + m for n, m in zip(came_from, partials.sent, strict=True)]
        codec = self.codecs.gradients
        channel = self._results if beside is None else self.channel
        come = send_gradients(channel, codec, send_sizes, receive_sizes, grad, pack, beside, landing)
        return come if blocks is None else lambda: self._padded(come(), came_from, receive_sizes, blocks)

    def _of_group(self, grad: torch.Tensor, number: int) -> torch.Tensor:
        """(B * U, width) gradients of the columns of a group of partials."""
        source, width = self.channel.size + number, self.group_widths[number]
        if self._all_in_one == (source,):
            return grad.reshape(-1, width)
        columns = grad.new_empty(grad.shape[0], self.widths[source])
        self._back[source]({0: grad}, columns)
        return columns.view(-1, width)

    def _sizes(self, rows: Sequence[int], blocks: Blocks) -> tuple[list[int], list[int]]:
        """Elements of the lookups that go to each rank, and that come from it; this rank's own do not travel."""
        mine, own = rows[self.me], self.widths[self.me]
        to, came_from = [n * own for n in rows], [mine * w for w in self.widths[: self.channel.size]]
        if blocks is not None:
            for i in self._others:
                to[i] = ragged_size(self.columns[self.me], blocks[i])
                came_from[i] = ragged_size(self.columns[i], blocks[self.me])
        return to, came_from

    def _padded(
        self,
        flat: torch.Tensor,
        lookups: Sequence[int],
        sizes: Sequence[int],
        blocks: Sequence[Sequence[Block]],
    ) -> torch.Tensor:
        """Flat gradients with the padding of the others' rows; `lookups` are their elements among `sizes`."""
        parts = []
        for i, part in zip(self._order, flat.split([sizes[i] for i in self._order]), strict=True):
            lookup = part[: lookups[i]]
            parts.append(lookup if i == self.me else padded_rows(lookup, self.columns[self.me], blocks[i]).view(-1))
            parts.append(part[lookups[i] :])
        return torch.cat(parts)


def _are_apart(columns: Sequence[Columns], places: Sequence[int]) -> bool:
    """Whether no two of these, which lie there, have one in common."""
    spans = sorted((place, place + width) for place, (_, _, width) in zip(places, columns, strict=True))
    return all(a[1] <= b[0] for a, b in pairwise(spans))


def output_dists(
    placement: Placement, peers: Peers, whole: Collection[int], plan: PartialsPlan | None, kernel: str | None
) -> list[PooledOutputDist]:
    """One for each stage.

    Args:
        whole: tables whose lookups travel with all their columns.
        plan: of those that travel as partials.
        kernel: see `Placing`.
    """
    codecs = peers.codecs
    dims = [placement.tables[feature.table].dim for feature in placement.features]
    columns: list[list[Columns]] = [
        [(s.feature, s.column, s.width) for s in of_rank if s.table in whole] for of_rank in placement.slots
    ]
    target: list[Columns] = [(f, 0, dim) for f, dim in enumerate(dims)]
    if peers.outer.size == 1:
        groups = [] if plan is None else plan.groups
        sources = [*columns, *(g.columns for g in groups)]
        return [PooledOutputDist(peers.table, codecs, sources, target, kernel, plan)]
    hosts = [columns[h * peers.inner.size : (h + 1) * peers.inner.size] for h in range(peers.outer.size)]
    host = peers.outer.rank
    joined = [cut_columns(of_host) for of_host in hosts]
    return [
        PooledOutputDist(peers.inner, codecs, hosts[host], joined[host], kernel),
        PooledOutputDist(peers.outer, codecs, joined, target, kernel),
    ]
