"""Output dist of unpooled lookups: each id's row goes back to the place its id came from, in one exchange.

Results are one tensor per table dim: rows of all features of that dim, feature-major. Columns of a row
that lie on several ranks are joined on receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sharders.channel import Channel, GroupChannel
from sharders.embedding.call import Sent, Span
from sharders.embedding.codec import Codecs
from sharders.embedding.output_dist import ResultExchange, Sum, send_gradients
from sharders.embedding.placement import Placement, Slot


@dataclass
class RowPlaces:
    """Of neighbouring slots with one dim, column and width: `count` rows, which go to `where` of the dim's result."""

    dim: int
    column: int
    width: int
    count: int
    where: slice | torch.Tensor


class UnpooledOutputDist:
    """Compiled output dist of one module's unpooled lookups.

    Args:
        placement: all slots of all ranks.
        channel: between the table ranks.
        sources: for each of them its index among the destinations of `Sent`.
    """

    def __init__(self, placement: Placement, channel: Channel, codecs: Codecs, sources: Sequence[int]) -> None:
        self.placement, self.channel, self.codecs = placement, channel, codecs
        self._results = channel if any(placement.slots) else GroupChannel(None)
        self.sources, self.me = list(sources), channel.rank

    def places(self, sent: Sent) -> list[list[RowPlaces]]:
        """For each table rank, in the order its rows come back, where they go."""
        return [
            self._of_owner(self.placement.slots[owner], sent.spans[index], sent.split_positions)
            for owner, index in enumerate(self.sources)
        ]

    def forward(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        places: list[list[RowPlaces]],
        num_rows: dict[int, int],
        local: Sequence[tuple[RowPlaces, torch.Tensor]],
        meanwhile: Callable[[], None],
    ) -> dict[int, torch.Tensor]:
        """Exchange lookups.

        Args:
            send: flat rows for the others in rank order, then for this rank itself, which do not travel.
            send_sizes: elements for each rank.
            num_rows: rows of each dim's result.
            local: rows of data-parallel tables, and where they go.
            meanwhile: called when lookups are under way.

        Returns:
            dim -> (num_rows[dim], dim).
        """
        others, own = send.tensor_split([send.numel() - send_sizes[self.me]])
        exchange = ResultExchange(self._results, self.codecs.results, others, send_sizes, _sizes(places))
        meanwhile()
        out: dict[int, torch.Tensor] = {}
        for to, rows in [*_cut(own, places[self.me]), *local]:
            _place(out, to, rows, num_rows[to.dim])
        for i, came in enumerate(exchange.by_rank()):
            for to, rows in _cut(came, places[i]) if i != self.me else ():
                _place(out, to, rows, num_rows[to.dim])
        for dim, n in num_rows.items():
            if dim not in out:
                out[dim] = send.new_zeros(n, dim)
        return out

    def backward(
        self,
        grads: dict[int, torch.Tensor],
        send_sizes: Sequence[int],
        places: list[list[RowPlaces]],
        scale: float,
        beside: Sum | None,
    ) -> torch.Tensor:
        """Exchange gradients the other way.

        Args:
            grads: dim -> (rows, dim).
            beside: a sum over the ranks, in the same exchange.

        Returns:
            Flat gradients of the rows that this rank sent, in that order.
        """

        def pack(rank: int, out: torch.Tensor) -> None:
            for of, target in _cut(out, places[rank]):
                grad = grads[of.dim]
                if isinstance(of.where, torch.Tensor) and of.width == of.dim:
                    torch.index_select(grad, 0, of.where, out=target).mul_(scale)
                else:
                    torch.mul(grad[of.where, of.column : of.column + of.width], scale, out=target)

        like = next(iter(grads.values()))
        return send_gradients(self.channel, self.codecs.gradients, _sizes(places), send_sizes, like, pack, beside)

    def _of_owner(
        self, slots: Sequence[Slot], spans: Sequence[Span], positions: torch.Tensor | None
    ) -> list[RowPlaces]:
        places: list[RowPlaces] = []
        last: tuple[tuple[int, int, int], Span] | None = None
        for slot, span in zip(slots, spans, strict=True):
            kind = (self.placement.tables[slot.table].dim, slot.column, slot.width)
            if last and last[0] == kind and last[1].is_split == span.is_split and last[1].stop == span.start:
                span = Span(span.is_split, last[1].start, span.stop)
                places.pop()
            where: slice | torch.Tensor = slice(span.start, span.stop)
            if span.is_split:
                assert positions is not None
                where = positions[span.start : span.stop]
            places.append(RowPlaces(*kind, span.stop - span.start, where))
            last = (kind, span)
        return places


def _sizes(places: list[list[RowPlaces]]) -> list[int]:
    """Elements that come from each owner."""
    return [sum(p.count * p.width for p in of_owner) for of_owner in places]


def _cut(flat: torch.Tensor, places: list[RowPlaces]) -> Iterator[tuple[RowPlaces, torch.Tensor]]:
    """The rows of each of the places, (count, width), from all of one rank's."""
    at = 0
    for of in places:
        yield of, flat[at : at + of.count * of.width].view(of.count, of.width)
        at += of.count * of.width


def _place(out: dict[int, torch.Tensor], to: RowPlaces, rows: torch.Tensor, num_rows: int) -> None:
    """Write rows into their dim's result, which is made with the first of them."""
    is_slice = isinstance(to.where, slice)
    if to.dim not in out and is_slice and to.count == num_rows and to.width == to.dim:
        out[to.dim] = rows  # everything came in place: no copy
        return
    if to.dim not in out:
        out[to.dim] = rows.new_zeros(num_rows, to.dim)
    target = out[to.dim][:, to.column : to.column + to.width]
    if isinstance(to.where, slice):
        target[to.where].copy_(rows)
    else:
        target.index_copy_(0, to.where, rows)
