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
import torch.distributed as dist

from sharders.exchange import RiderExchange, all_to_all

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

    Args:
        group: ranks that take part; None for this process alone.
        me: this rank's index in the group.
        sources: pieces of each rank of the group, then of a local block that does not travel (may be empty).
        target: this rank's columns.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, me: int, sources: Sequence[Sequence[Piece]], target: Sequence[Piece]
    ) -> None:
        self.group, self.me = group, me
        self.size = len(sources) - 1
        self.widths = [sum(p[2] for p in pieces) for pieces in sources]
        self.width = sum(p[2] for p in target)
        self.runs = compile_runs(sources, target)

    def forward(self, send: torch.Tensor, rows: Sequence[int], local: torch.Tensor | None) -> torch.Tensor:
        """Exchange lookups.

        Args:
            send: (sum of rows, own width), rows grouped by destination.
            rows: of each destination.
            local: (rows[me], local width), or None.

        Returns:
            (rows[me], width).
        """
        mine = rows[self.me]
        received = all_to_all(
            send.reshape(-1),
            [n * self.widths[self.me] for n in rows],
            [mine * w for w in self.widths[: self.size]],
            self.group,
        )
        blocks: list[torch.Tensor | None] = [
            part.view(mine, width)
            for part, width in zip(
                received.split([mine * w for w in self.widths[: self.size]]), self.widths, strict=False
            )
        ]
        blocks.append(local)
        out: torch.Tensor | None = None
        for run in self.runs:
            block = blocks[run.source]
            assert block is not None
            if out is None and run.width == self.width == block.shape[1]:
                out = block  # one source covers every column: sum into what came
                continue
            if out is None:
                out = send.new_empty(mine, self.width)
            source = block[:, run.source_column : run.source_column + run.width]
            target = out[:, run.column : run.column + run.width]
            target.add_(source) if run.add else target.copy_(source)
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
        exchange = RiderExchange(rider, self.me, [mine * w for w in widths], [n * own for n in rows])
        parts = exchange.parts(grad)
        blocks = [part.view(mine, w) for part, w in zip(parts, widths, strict=True)]
        for run in self.runs:
            if run.source == self.size:
                continue  # the local block's lookup takes its gradient from `grad` itself
            torch.mul(
                grad[:, run.column : run.column + run.width],
                scale,
                out=blocks[run.source][:, run.source_column : run.source_column + run.width],
            )
        received, total = exchange.run(self.group)
        return received.view(sum(rows), own), total
