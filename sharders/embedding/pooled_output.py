"""Output dist of pooled lookups: one exchange; placing, summing row partials and joining columns happen on receipt.

[Note: stages]
A *stage* is an exchange along one group of ranks. Each sender's rows are columns of pieces `(feature, column, width)`;
the receiver writes them into its own columns, where several pieces of the same columns (row partials) are summed. With
two shard axes a first stage inside the inner (fast) axis sums what one host holds, for all hosts' samples; a second
stage along the outer axis finishes. With one axis there is one stage. Backward runs the stages in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sharders.channel import Channel
from sharders.embedding.output_dist import GradientExchange, OthersExchange

Piece = tuple[int, int, int]  # feature, first column, width


@dataclass(frozen=True)
class Run:
    """Columns `source_column`.. of a source go to `column`..; `add` when others have written there."""

    source: int
    source_column: int
    column: int
    width: int
    add: bool


def cut_pieces(sources: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Disjoint pieces, by feature and column, that every given piece is a union of."""
    cuts: dict[int, set[int]] = {}
    spans: dict[int, set[tuple[int, int]]] = {}
    for pieces in sources:
        for feature, column, width in pieces:
            cuts.setdefault(feature, set()).update((column, column + width))
            spans.setdefault(feature, set()).add((column, column + width))
    return [
        (feature, a, b - a)
        for feature in sorted(cuts)
        for a, b in pairwise(sorted(cuts[feature]))
        if any(start <= a and b <= stop for start, stop in spans[feature])
    ]


def compile_runs(sources: Sequence[Sequence[Piece]], target: Sequence[Piece]) -> list[Run]:
    """Runs that write every source piece into the target's columns; adjacent ones are joined."""
    atoms = cut_pieces([*sources, target])
    by_feature: dict[int, list[Piece]] = {}
    for atom in atoms:
        by_feature.setdefault(atom[0], []).append(atom)
    place: dict[tuple[int, int], int] = {}
    for (feature, column, width), at in zip(target, accumulate((p[2] for p in target), initial=0), strict=False):
        for _, a, _ in by_feature[feature]:
            if column <= a < column + width:
                place[feature, a] = at + a - column
    written: set[tuple[int, int]] = set()
    runs: list[Run] = []
    for source, pieces in enumerate(sources):
        at = 0
        for feature, column, width in pieces:
            for _, a, w in by_feature[feature]:
                if not column <= a < column + width:
                    continue
                add = (feature, a) in written
                written.add((feature, a))
                _append(runs, Run(source, at + a - column, place[feature, a], w, add))
            at += width
    return runs


def _append(runs: list[Run], run: Run) -> None:
    last = runs[-1] if runs else None
    if (
        last
        and (last.source, last.add) == (run.source, run.add)
        and last.source_column + last.width == run.source_column
        and last.column + last.width == run.column
    ):
        runs[-1] = Run(last.source, last.source_column, last.column, last.width + run.width, last.add)
    else:
        runs.append(run)


class Stage:
    """One exchange of an output dist, forward and backward.

    Rows are grouped by destination: the others' in rank order, then this rank's own, which do not travel.

    Args:
        channel: between the ranks that take part.
        sources: pieces of each of its ranks, then of a local block that does not travel (may be empty).
        target: this rank's columns.
    """

    def __init__(self, channel: Channel, sources: Sequence[Sequence[Piece]], target: Sequence[Piece]) -> None:
        self.channel, self.me = channel, channel.rank
        self.size = len(sources) - 1
        self.widths = [sum(p[2] for p in pieces) for pieces in sources]
        self.width = sum(p[2] for p in target)
        # What is here is placed first, while the others' rows travel.
        order = [self.me, self.size, *(i for i in range(self.size) if i != self.me)]
        runs = compile_runs([sources[i] for i in order], target)
        self.runs = [Run(order[r.source], r.source_column, r.column, r.width, r.add) for r in runs]

    def forward(self, send: torch.Tensor, rows: Sequence[int], local: torch.Tensor | None) -> torch.Tensor:
        """Exchange lookups.

        Args:
            send: (sum of rows, own width).
            rows: of each destination.
            local: (rows[me], local width), or None.

        Returns:
            (rows[me], width).
        """
        mine, own = rows[self.me], self.widths[self.me]
        others = send.shape[0] - mine
        transfer = OthersExchange(
            self.channel,
            send[:others].reshape(-1),
            [n * own for n in rows],
            [mine * w for w in self.widths[: self.size]],
        )
        blocks: list[torch.Tensor] | None = None
        out: torch.Tensor | None = None
        for run in self.runs:
            if run.source == self.me:
                block = send[others:]
            elif run.source == self.size:
                assert local is not None
                block = local
            else:
                if blocks is None:
                    came = zip(transfer.wait(), self.widths, strict=False)
                    blocks = [part.view(mine if part.numel() else 0, w) for part, w in came]
                block = blocks[run.source]
            if out is None and run.width == self.width == block.shape[1]:
                out = block  # one source covers every column: the others are added to it
                continue
            if out is None:
                out = send.new_empty(mine, self.width)
            source = block[:, run.source_column : run.source_column + run.width]
            target = out[:, run.column : run.column + run.width]
            target.add_(source) if run.add else target.copy_(source)
        if blocks is None:
            transfer.wait()
        return send.new_zeros(mine, self.width) if out is None else out

    def backward(
        self, grad: torch.Tensor, rows: Sequence[int], scale: float, rider: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange gradients the other way.

        Args:
            grad: (rows[me], width).
            rows: of each rank.
            scale: multiplies the gradients on the way.
            rider: (n,) flat values to be summed over the group in the same exchange, or None.

        Returns:
            Gradients of this rank's lookup (sum of rows, own width), and the summed rider.
        """
        mine, widths = rows[self.me], self.widths[: self.size]
        own = widths[self.me]
        exchange = GradientExchange(self.channel, rider, [mine * w for w in widths], [n * own for n in rows], grad)
        blocks = [part.view(mine, w) for part, w in zip(exchange.parts, widths, strict=True)]
        self._pack(grad, scale, blocks, is_own=False)
        exchange.start()
        self._pack(grad, scale, blocks, is_own=True)
        flat, total = exchange.finish()
        return flat.view(sum(rows), own), total

    def _pack(self, grad: torch.Tensor, scale: float, blocks: list[torch.Tensor], is_own: bool) -> None:
        """Columns of `grad` into this rank's own block, or into the others'; a local lookup reads `grad` itself."""
        for run in self.runs:
            if run.source != self.size and (run.source == self.me) == is_own:
                torch.mul(
                    grad[:, run.column : run.column + run.width],
                    scale,
                    out=blocks[run.source][:, run.source_column : run.source_column + run.width],
                )
