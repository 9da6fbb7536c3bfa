"""Output dist of pooled lookups: one exchange; placing, summing row partials and joining columns happen on receipt.

[Note: two dists]
Each sender's lookup is columns of features; the receiver writes them into its own columns, where several senders' of
the same columns (row partials) are summed. With two shard axes a first output dist inside the inner (fast) axis sums
what one host holds, for all hosts' samples; a second along the outer axis finishes. Backward runs them in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from sharders.channel import Channel
from sharders.embedding.codec import Codecs
from sharders.embedding.output_dist import ResultExchange, Sum, send_gradients
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
    """One exchange of pooled lookups, forward and backward; see [Note: two dists].

    Rows are grouped by destination: the others' in rank order, then this rank's own, which do not travel.

    Args:
        channel: between the ranks that take part.
        sources: columns of each of its ranks, then of a local lookup that does not travel (may be empty).
        target: this rank's columns.
    """

    def __init__(
        self, channel: Channel, codecs: Codecs, sources: Sequence[Sequence[Columns]], target: Sequence[Columns]
    ) -> None:
        self.channel, self.codecs, self.me = channel, codecs, channel.rank
        self.columns = [list(columns) for columns in sources[: channel.size]]
        self.widths = [sum(c[2] for c in columns) for columns in sources]
        self.width = sum(c[2] for c in target)
        # What is here is placed first, while the others' rows travel.
        local = channel.size
        order = [self.me, local, *(i for i in range(channel.size) if i != self.me)]
        moves = compile_moves([sources[i] for i in order], target)
        self.moves = [move._replace(source=order[move.source]) for move in moves]
        self.runs = runs_of(self.moves)

    def forward(
        self, send: torch.Tensor, rows: Sequence[int], local: torch.Tensor | None, blocks: Blocks = None
    ) -> torch.Tensor:
        """Exchange lookups.

        Args:
            send: (sum of rows, own width).
            rows: of each destination.
            local: (rows[me], local width), or None.
            blocks: of each destination, where features have batch sizes of their own.

        Returns:
            (rows[me], width).
        """
        mine, own = rows[self.me], self.widths[self.me]
        to, came_from = self._sizes(rows, blocks)
        flat = send.reshape(-1) if blocks is None else self._ragged(send, rows, blocks)
        exchange = ResultExchange(self.channel, self.codecs.results, flat, to, came_from)
        out: torch.Tensor | None = None
        came: dict[int, torch.Tensor] = {}
        for run in self.runs:
            move = run.first
            if move.source == self.me:
                lookup = exchange.own.view(mine, own)
            elif move.source == self.channel.size:
                assert local is not None
                lookup = local
            elif blocks is None:
                lookup = exchange.wait()[move.source].view(mine, self.widths[move.source])
            else:
                if move.source not in came:
                    flat = exchange.wait()[move.source]
                    came[move.source] = padded_rows(flat, self.columns[move.source], blocks[self.me])
                lookup = came[move.source]
            if out is None and run.num == 1 and move.width == self.width == lookup.shape[1]:
                out = lookup  # one source covers every column: the others are added to it
                continue
            if out is None:
                out = send.new_empty(mine, self.width)
            source, target = run.of_source(lookup), run.of_target(out)
            target.add_(source) if move.add else target.copy_(source)
        exchange.wait()
        return send.new_zeros(mine, self.width) if out is None else out

    def backward(
        self,
        grad: torch.Tensor,
        rows: Sequence[int],
        scale: float,
        beside: Sum | None = None,
        blocks: Blocks = None,
    ) -> torch.Tensor:
        """Exchange gradients the other way.

        Args:
            grad: (rows[me], width).
            rows: of each rank.
            scale: multiplies the gradients on the way.
            beside: a sum over the ranks, in the same exchange.
            blocks: of each rank, where features have batch sizes of their own.

        Returns:
            Gradients of this rank's lookup (sum of rows, own width).
        """
        mine, widths = rows[self.me], self.widths[:-1]

        def pack(rank: int, out: torch.Tensor) -> None:
            """What the lookup of `rank` gave, column by column; a local lookup reads `grad` itself."""
            is_ragged = blocks is not None and rank != self.me
            lookup = grad.new_empty(mine, widths[rank]) if is_ragged else out.view(mine, widths[rank])
            for run in self.runs:
                if run.first.source == rank:
                    torch.mul(run.of_target(grad), scale, out=run.of_source(lookup))
            if blocks is not None and is_ragged:
                out.copy_(ragged(lookup, self.columns[rank], blocks[self.me]))

        came_from, to = self._sizes(rows, blocks)
        flat = send_gradients(self.channel, self.codecs.gradients, to, came_from, grad, pack, beside)
        return flat.view(sum(rows), widths[self.me]) if blocks is None else self._padded(flat, rows, blocks)

    def _sizes(self, rows: Sequence[int], blocks: Blocks) -> tuple[list[int], list[int]]:
        """Elements of the lookups that go to each rank, and that come from it; this rank's own do not travel."""
        mine, own = rows[self.me], self.widths[self.me]
        to, came_from = [n * own for n in rows], [mine * w for w in self.widths[:-1]]
        if blocks is not None:
            for i in self._others():
                to[i] = ragged_size(self.columns[self.me], blocks[i])
                came_from[i] = ragged_size(self.columns[i], blocks[self.me])
        return to, came_from

    def _ragged(self, lookup: torch.Tensor, rows: Sequence[int], blocks: Sequence[Sequence[Block]]) -> torch.Tensor:
        """Flat: the others' rows without padding, then this rank's own."""
        order = self._others()
        *parts, own = lookup.split([rows[i] for i in (*order, self.me)])
        columns = self.columns[self.me]
        cut = [ragged(part, columns, blocks[i]) for i, part in zip(order, parts, strict=True)]
        return torch.cat([*cut, own.reshape(-1)])

    def _padded(self, flat: torch.Tensor, rows: Sequence[int], blocks: Sequence[Sequence[Block]]) -> torch.Tensor:
        """Inverse of `_ragged`."""
        order, columns = self._others(), self.columns[self.me]
        sizes = [ragged_size(columns, blocks[i]) for i in order]
        *parts, own = flat.split([*sizes, rows[self.me] * self.widths[self.me]])
        whole = [padded_rows(part, columns, blocks[i]) for i, part in zip(order, parts, strict=True)]
        return torch.cat([*whole, own.view(rows[self.me], self.widths[self.me])])

    def _others(self) -> list[int]:
        return [i for i in range(self.channel.size) if i != self.me]
