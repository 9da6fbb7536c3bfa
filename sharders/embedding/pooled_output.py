"""Output dist of pooled lookups: one exchange; placing, summing row partials and joining columns happen on receipt.

[Note: two dists]
Each sender's lookup is columns of features; the receiver writes them into its own columns, where several senders' of
the same columns (row partials) are summed. With two shard axes a first output dist inside the inner (fast) axis sums
what one host holds, for all hosts' samples; a second along the outer axis finishes. Backward runs them in reverse.
Where partials are fewer bytes than that they go straight to the ranks of the samples, in one, see stages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from sharders.channel import Channel, GroupChannel, Landing
from sharders.embedding.codec import Codecs
from sharders.embedding.output_dist import Beside, ResultExchange, landing_for, send_gradients
from sharders.embedding.partials import Partials
from sharders.embedding.ragged import Block, Columns, padded_rows, ragged, ragged_size

Blocks = Sequence[Sequence[Block]] | None  # of each rank: of all batches whose rows go there


class Move(NamedTuple):
    """Columns `source_column`.. of a source go to `column`..; `add` when others have written there."""

    source: int
    source_column: int
    column: int
    width: int
    add: bool

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What those of one run have in common."""
        return self.source, self.width, self.add


class MoveRun(NamedTuple):
    """`num` moves of one source and width, at even distances: one operation for all.

    Args:
        first: of the moves.
        source_step, step: columns from each move to the next, in the source and in the target.
    """

    first: Move
    num: int
    source_step: int
    step: int

    def of_source(self, rows: torch.Tensor) -> torch.Tensor:
        """The source's columns of these rows."""
        return self._columns(rows, self.first.source_column, self.source_step)

    def of_target(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's columns of these rows."""
        return self._columns(rows, self.first.column, self.step)

    def _columns(self, rows: torch.Tensor, start: int, step: int) -> torch.Tensor:
        if self.num == 1:
            return rows[:, start : start + self.first.width]
        row, each = rows.stride()
        shape, strides = (len(rows), self.num, self.first.width), (row, step * each, each)
        return rows.as_strided(shape, strides, rows.storage_offset() + start * each)


def runs_of(moves: Sequence[Move]) -> list[MoveRun]:
    """The moves in their order, neighbours at even distances taken together."""
    runs: list[MoveRun] = []
    for move in moves:
        last = runs[-1] if runs else None
        if last is not None and last.first.kind == move.kind:
            before = last.first.source_column + (last.num - 1) * last.source_step
            steps = move.source_column - before, move.column - last.first.column - (last.num - 1) * last.step
            if min(steps) >= move.width and (last.num == 1 or steps == (last.source_step, last.step)):
                runs[-1] = MoveRun(last.first, last.num + 1, *steps)
                continue
        runs.append(MoveRun(move, 1, 0, 0))
    return runs


def cut_columns(sources: Sequence[Sequence[Columns]]) -> list[Columns]:
    """Disjoint columns, by feature, that all the given ones are unions of."""
    cuts: dict[int, set[int]] = {}
    spans: dict[int, set[tuple[int, int]]] = {}
    for of_source in sources:
        for feature, column, width in of_source:
            cuts.setdefault(feature, set()).update((column, column + width))
            spans.setdefault(feature, set()).add((column, column + width))
    return [
        (feature, a, b - a)
        for feature in sorted(cuts)
        for a, b in pairwise(sorted(cuts[feature]))
        if any(start <= a and b <= stop for start, stop in spans[feature])
    ]


def compile_moves(sources: Sequence[Sequence[Columns]], target: Sequence[Columns]) -> list[Move]:
    """Moves that write every source's columns into the target's; adjacent ones are joined."""
    by_feature: dict[int, list[Columns]] = {}
    for smallest in cut_columns([*sources, target]):
        by_feature.setdefault(smallest[0], []).append(smallest)
    place = {(feature, column): at for feature, column, _, at in _placed(target, by_feature)}
    written: set[tuple[int, int]] = set()
    moves: list[Move] = []
    for source, of_source in enumerate(sources):
        for feature, column, width, at in _placed(of_source, by_feature):
            add = (feature, column) in written
            written.add((feature, column))
            _append(moves, Move(source, at, place[feature, column], width, add))
    return moves


def _placed(
    columns: Sequence[Columns], by_feature: Mapping[int, Sequence[Columns]]
) -> Iterator[tuple[int, int, int, int]]:
    """The smallest columns (feature, first column, width) that these ones are cut into, and their place in the row."""
    at = 0
    for feature, column, width in columns:
        for _, first, of_cut in by_feature[feature]:
            if column <= first < column + width:
                yield feature, first, of_cut, at + first - column
        at += width


def _append(moves: list[Move], move: Move) -> None:
    """Join a move to the last one where it goes on right behind it."""
    last = moves[-1] if moves else Move(-1, 0, 0, 0, False)
    if last == Move(move.source, move.source_column - last.width, move.column - last.width, last.width, move.add):
        moves[-1] = last._replace(width=last.width + move.width)
    else:
        moves.append(move)


class PooledOutputDist:
    """One exchange of pooled lookups, forward and backward; see [Note: two dists] and [Note: partials].

    Rows are grouped by destination: the others' in rank order, then this rank's own, which do not travel. What goes to
    a rank is its rows of the lookup, then its partials.

    Args:
        channel: between the ranks that take part.
        sources: columns of each of its ranks, then of a local lookup that does not travel (may be empty), then of
            groups of partials.
        target: this rank's columns.
    """

    def __init__(
        self, channel: Channel, codecs: Codecs, sources: Sequence[Sequence[Columns]], target: Sequence[Columns]
    ) -> None:
        self.channel, self.codecs, self.me = channel, codecs, channel.rank
        self.columns = [list(columns) for columns in sources[: channel.size]]
        self.widths = [sum(c[2] for c in columns) for columns in sources]
        self.width = sum(c[2] for c in target)
        self.group_widths = [columns[0][2] for columns in sources[channel.size + 1 :]]
        nobody_sends = not any(self.widths[: channel.size]) and not self.group_widths
        self._results = GroupChannel(None) if nobody_sends else channel
        self._others = [i for i in range(channel.size) if i != self.me]
        self._order = [*self._others, self.me]
        # What is here is placed first, while the others' rows travel.
        local = channel.size
        order = [self.me, local, *self._others, *range(local + 1, len(sources))]
        moves = compile_moves([sources[i] for i in order], target)
        self.moves = [move._replace(source=order[move.source]) for move in moves]
        self.runs = runs_of(self.moves)

    def memory(
        self, rows: int, dtype: torch.dtype, device: torch.device, partials: Partials | None
    ) -> torch.Tensor | None:
        """Flat memory that travels as it is: `rows` of this rank's lookup for the others, then partials for them.

        None where what travels is put together first: for several ranks of both, and in another dtype.
        """
        count = rows * self.widths[self.me]
        if self.codecs.results is not None or not count or (partials is not None and len(self._others) > 1):
            return None
        of_others = 0 if partials is None else sum(partials.sent[i] for i in self._others)
        return self.channel.empty(count + of_others, dtype, device)

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
        others: torch.Tensor,
        look_up_own: Callable[[], torch.Tensor],
        rows: Sequence[int],
        local: torch.Tensor | None,
        blocks: Blocks = None,
        partials: Partials | None = None,
        memory: torch.Tensor | None = None,
        landing: Landing | None = None,
    ) -> Callable[[torch.Tensor | None], torch.Tensor]:
        """Begin to exchange lookups.

        Args:
            others: (rows of the others, own width).
            look_up_own: gives (rows[me], own width); called when the exchange is under way.
            rows: of each destination.
            local: (rows[me], local width), or None.
            blocks: of each destination, where features have batch sizes of their own.
            partials: the call's.
            memory: in which `others` may lie.
            landing: for their gradients.

        Returns:
            What ends it and gives (rows[me], width): the tensor that it is given, in whose other columns there are
            results of other tables; else a new one.
        """
        mine = rows[self.me]
        to, came_from = self._sizes(rows, blocks)
        wire = others.reshape(-1)
        if blocks is not None:
            parts = zip(self._others, others.split([rows[i] for i in self._others]), strict=True)
            wire = torch.cat([wire[:0], *(ragged(part, self.columns[self.me], blocks[i]) for i, part in parts)])
        exchange = self._begin(wire, to, came_from, partials, memory, landing)
        came: dict[int, torch.Tensor] = {self.me: look_up_own()}
        if local is not None:
            came[self.channel.size] = local

        def placed(out: torch.Tensor | None) -> torch.Tensor:
            for run in self.runs:
                move = run.first
                if move.source not in came:
                    came.update(self._come(exchange, move.source, came_from, mine, blocks, partials))
                lookup = came[move.source]
                if out is None and run.num == 1 and move.width == self.width == lookup.shape[1]:
                    # One source covers every column: the others are added to it.
                    out = lookup.clone() if move.source in self._others and partials is None else lookup
                    continue
                if out is None:
                    out = others.new_empty(mine, self.width)
                source, target = run.of_source(lookup), run.of_target(out)
                target.add_(source) if move.add else target.copy_(source)
            exchange.end()
            return others.new_zeros(mine, self.width) if out is None else out

        return placed

    def _begin(
        self,
        wire: torch.Tensor,
        to: Sequence[int],
        came_from: Sequence[int],
        partials: Partials | None,
        memory: torch.Tensor | None,
        landing: Landing | None,
    ) -> ResultExchange:
        """Send flat lookups for the others, and partials."""
        codec = self.codecs.results
        if partials is None:
            return ResultExchange(self._results, codec, wire, to, came_from, landing=landing)
        wire = self._with_partials(wire, [to[i] for i in self._others], partials, memory)
        send_sizes = [n + m for n, m in zip(to, partials.sent, strict=True)]
        receive_sizes = [n + m for n, m in zip(came_from, partials.awaited, strict=True)]
        tail = partials.awaited[self.me]
        exchange = ResultExchange(self.channel, codec, wire, send_sizes, receive_sizes, tail, landing)
        if exchange.tail is not None:
            partials.look_up_own(exchange.tail)
        partials.prepare()
        return exchange

    def _with_partials(
        self, wire: torch.Tensor, sizes: Sequence[int], partials: Partials, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Flat lookups, `sizes` for each of the others, and behind them its partials."""
        num = wire.numel()
        if memory is None or wire.data_ptr() != memory.data_ptr():
            count = num + sum(partials.sent[i] for i in self._others)
            memory = None if self.codecs.results else self.channel.empty(count, wire.dtype, wire.device)
            if num:
                cuts = zip(wire.split(sizes), partials.by_source() or [()] * len(sizes), strict=True)
                return torch.cat([part for whole, runs in cuts for part in (whole, *runs)], out=memory)
            return partials.looked_up(memory)
        behind = memory[num:]
        found = partials.looked_up(behind)
        if found.data_ptr() != behind.data_ptr():
            behind.copy_(found)
        return memory

    def _come(
        self,
        exchange: ResultExchange,
        source: int,
        sizes: Sequence[int],
        mine: int,
        blocks: Blocks,
        partials: Partials | None,
    ) -> dict[int, torch.Tensor]:
        """What has come, by source: from this one where it can be read by itself, else from all."""
        if partials is None:
            came = exchange.part(source)
            if blocks is None:
                return {source: came.view(mine, self.widths[source])}
            return {source: padded_rows(came, self.columns[source], blocks[self.me])}
        found: dict[int, torch.Tensor] = {}
        starts, at = [], 0
        flat = exchange.wait()
        for i in self._others:
            lookup = flat[at : at + sizes[i]]
            if blocks is None:
                found[i] = lookup.view(mine, self.widths[i])
            else:
                found[i] = padded_rows(lookup, self.columns[i], blocks[self.me])
            starts.append(at + sizes[i])
            at = starts[-1] + partials.awaited[i]
        found.update(enumerate(partials.summed(flat, [*starts, at]), self.channel.size + 1))
        return found

    def backward(
        self,
        grad: torch.Tensor,
        rows: Sequence[int],
        scale: float,
        beside: Beside | None = None,
        blocks: Blocks = None,
        partials: Partials | None = None,
        landing: Landing | None = None,
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

        Returns:
            What ends it and gives flat gradients of what was sent to each rank, others first: (rows, own width) of the
            lookup, and partials.
        """
        mine, widths = rows[self.me], self.widths[: self.channel.size]
        came_from, to = self._sizes(rows, blocks)
        of_groups = [] if partials is None else [self._of_group(grad, i) for i in range(len(self.group_widths))]

        def pack(rank: int, out: torch.Tensor) -> None:
            """What the lookup of `rank` gave, column by column; a local lookup reads `grad` itself."""
            is_ragged = blocks is not None and rank != self.me
            flat = out[: to[rank]]
            lookup = grad.new_empty(mine, widths[rank]) if is_ragged else flat.view(mine, widths[rank])
            for run in self.runs:
                if run.first.source == rank:
                    torch.mul(run.of_target(grad), scale, out=run.of_source(lookup))
            if blocks is not None and is_ragged:
                flat.copy_(ragged(lookup, self.columns[rank], blocks[self.me]))
            if partials is not None:
                partials.pack(rank, of_groups, scale, out[to[rank] :])

        send_sizes, receive_sizes = list(to), list(came_from)
        if partials is not None:
            send_sizes = [n + m for n, m in zip(to, partials.awaited, strict=True)]
            receive_sizes = [n + m for n, m in zip(came_from, partials.sent, strict=True)]
        codec = self.codecs.gradients
        come = send_gradients(self.channel, codec, send_sizes, receive_sizes, grad, pack, beside, landing)
        return come if blocks is None else lambda: self._padded(come(), rows, came_from, receive_sizes, blocks)

    def _of_group(self, grad: torch.Tensor, number: int) -> torch.Tensor:
        """(B * U, width) gradients of the columns of a group of partials."""
        source = self.channel.size + 1 + number
        width = self.group_widths[number]
        runs = [run for run in self.runs if run.first.source == source]
        if len(runs) == 1 and runs[0].num == 1 and runs[0].first.width == self.width:
            return grad.reshape(-1, width)
        columns = grad.new_empty(grad.shape[0], self.widths[source])
        for run in runs:
            run.of_source(columns).copy_(run.of_target(grad))
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
        rows: Sequence[int],
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
