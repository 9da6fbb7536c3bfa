"""Output dist of unpooled lookups: each id's row goes back to the place its id came from, in one exchange.

Results are one tensor per table dim: rows of all features of that dim, feature-major. Pieces of a row from several
column rectangles are joined on receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sharders.channel import Channel
from sharders.embedding.call import Sent, Span
from sharders.embedding.output_dist import GradientExchange, OthersExchange
from sharders.embedding.placement import Placement, Slot


@dataclass
class Patch:
    """A run of a destination's slots with one dim, column and width: `count` rows, to `where` of the dim's result."""

    dim: int
    column: int
    width: int
    count: int
    where: slice | torch.Tensor


class RowDelivery:
    """Compiled output dist of one module's unpooled lookups.

    Args:
        placement: all slots of all ranks.
        channel: between the table ranks.
        sources: for each of them its index among the destinations of `Sent`.
    """

    def __init__(self, placement: Placement, channel: Channel, sources: Sequence[int]) -> None:
        self.placement, self.channel, self.sources, self.me = placement, channel, list(sources), channel.rank

    def patches(self, sent: Sent) -> list[list[Patch]]:
        """For each table rank, in the order its rows come back, where they go."""
        return [
            self._of_owner(self.placement.slots[owner], sent.spans[index], sent.split_positions)
            for owner, index in enumerate(self.sources)
        ]

    def forward(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        patches: list[list[Patch]],
        num_rows: dict[int, int],
        local: Sequence[tuple[Patch, torch.Tensor]],
    ) -> dict[int, torch.Tensor]:
        """Exchange lookups.

        Args:
            send: flat rows for the others in rank order, then for this rank itself, which do not travel.
            send_sizes: elements for each rank.
            num_rows: rows of each dim's result.
            local: rows of data-parallel tables, and where they go.

        Returns:
            dim -> (num_rows[dim], dim).
        """
        others = send.numel() - send_sizes[self.me]
        sizes = _sizes(patches)
        transfer = OthersExchange(self.channel, send[:others], send_sizes, sizes)
        out: dict[int, torch.Tensor] = {}
        self._place_all(out, patches[self.me], send[others:], num_rows)
        for patch, rows in local:
            self._place(out, patch, rows, num_rows)
        for i, came in enumerate(transfer.wait()):
            if i != self.me:
                self._place_all(out, patches[i], came, num_rows)
        for dim, n in num_rows.items():
            if dim not in out:
                out[dim] = send.new_zeros(n, dim)
        return out

    def backward(
        self,
        grads: dict[int, torch.Tensor],
        send_sizes: Sequence[int],
        patches: list[list[Patch]],
        scale: float,
        rider: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange gradients the other way.

        Args:
            grads: dim -> (rows, dim).
            rider: (n,) values to sum over the group in the same exchange, or None.

        Returns:
            Flat gradients of the rows that this rank sent, in that order; the summed rider.
        """
        exchange = GradientExchange(self.channel, rider, _sizes(patches), send_sizes, next(iter(grads.values())))
        for i, part in enumerate(exchange.parts):
            if i != self.me:
                self._pack(part, patches[i], grads, scale)
        exchange.start()
        self._pack(exchange.own, patches[self.me], grads, scale)
        return exchange.finish()

    def _of_owner(self, slots: Sequence[Slot], spans: Sequence[Span], positions: torch.Tensor | None) -> list[Patch]:
        patches: list[Patch] = []
        last: tuple[tuple[int, int, int], Span] | None = None
        for slot, span in zip(slots, spans, strict=True):
            kind = (self.placement.tables[slot.table].dim, slot.column, slot.width)
            if last and last[0] == kind and last[1].is_split == span.is_split and last[1].stop == span.start:
                span = Span(span.is_split, last[1].start, span.stop)
                patches.pop()
            where: slice | torch.Tensor = slice(span.start, span.stop)
            if span.is_split:
                assert positions is not None
                where = positions[span.start : span.stop]
            patches.append(Patch(*kind, span.stop - span.start, where))
            last = (kind, span)
        return patches

    @staticmethod
    def _pack(part: torch.Tensor, patches: list[Patch], grads: dict[int, torch.Tensor], scale: float) -> None:
        at = 0
        for patch in patches:
            target = part[at : at + patch.count * patch.width].view(patch.count, patch.width)
            grad = grads[patch.dim]
            if isinstance(patch.where, torch.Tensor) and patch.width == patch.dim:
                torch.index_select(grad, 0, patch.where, out=target).mul_(scale)
            else:
                torch.mul(grad[patch.where, patch.column : patch.column + patch.width], scale, out=target)
            at += patch.count * patch.width

    def _place_all(
        self, out: dict[int, torch.Tensor], patches: list[Patch], flat: torch.Tensor, num_rows: dict[int, int]
    ) -> None:
        at = 0
        for patch in patches:
            rows = flat[at : at + patch.count * patch.width].view(patch.count, patch.width)
            at += patch.count * patch.width
            self._place(out, patch, rows, num_rows)

    @staticmethod
    def _place(out: dict[int, torch.Tensor], patch: Patch, rows: torch.Tensor, num_rows: dict[int, int]) -> None:
        total = num_rows[patch.dim]
        is_slice = isinstance(patch.where, slice)
        if patch.dim not in out and is_slice and patch.count == total and patch.width == patch.dim:
            out[patch.dim] = rows  # everything came in place: no copy
            return
        if patch.dim not in out:
            out[patch.dim] = rows.new_zeros(total, patch.dim)
        target = out[patch.dim][:, patch.column : patch.column + patch.width]
        if isinstance(patch.where, slice):
            target[patch.where].copy_(rows)
        else:
            target.index_copy_(0, patch.where, rows)


def _sizes(patches: list[list[Patch]]) -> list[int]:
    """Elements that come from each owner."""
    return [sum(p.count * p.width for p in of_owner) for of_owner in patches]
