"""Output dist of unpooled lookups: each id's row goes back to the place its id came from, in one exchange.

Results are one tensor per table dim: rows of all features of that dim, feature-major. Columns of a row
that lie on several ranks are joined on receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sharders.channel import Channel, GroupChannel, Landing
from sharders.embedding.exchange.codec import Codecs
from sharders.embedding.exchange.output_dist import Beside, ResultExchange, landing_for, send_gradients
from sharders.embedding.exchange.placement import Placement
from sharders.embedding.results.row_places import RowPlaces, RowsBack


class UnpooledOutputDist:
    """Compiled output dist of one module's unpooled lookups.

    Args:
        placement: all slots of all ranks.
        channel: between the table ranks.
    """

    def __init__(self, placement: Placement, channel: Channel, codecs: Codecs) -> None:
        self.channel, self.codecs, self.me = channel, codecs, channel.rank
        self._results = channel if any(placement.slots) else GroupChannel(None)

    def memory(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Flat, to look up for the other ranks in, where that is what travels."""
        return None if self.codecs.results is not None or not count else self.channel.empty(count, dtype, device)

    def forward(
        self,
        others: torch.Tensor,
        look_up_own: Callable[[torch.Tensor], None],
        send_sizes: Sequence[int],
        back: RowsBack,
        local: Sequence[tuple[RowPlaces, torch.Tensor]],
        meanwhile: Callable[[], None],
        landing: Landing | None = None,
    ) -> dict[int, torch.Tensor]:
        """Exchange lookups.

        Args:
            others: flat rows for the others, in rank order.
            look_up_own: writes this rank's own, which do not travel, to flat memory; called when the others' do.
            send_sizes: elements for each rank.
            back: where what comes belongs.
            local: rows of data-parallel tables, and where they go.
            meanwhile: called when lookups are under way.
            landing: for their gradients.

        Returns:
            dim -> (rows, dim).
        """
        own = back.sizes[self.me]
        exchange = ResultExchange(self._results, self.codecs.results, others, send_sizes, back.sizes, own, landing)
        if exchange.tail is not None:
            look_up_own(exchange.tail)
        meanwhile()
        computed = back.columns
        flat = exchange.wait()
        out = {dim: back.result(dim, flat) for dim in computed}
        pieces = ((of, at) for of, at in back.pieces() if of.dim not in computed)
        as_they_came = ((of, flat[at : at + of.count * of.width].view(of.count, of.width)) for of, at in pieces)
        for to, rows in (*as_they_came, *local):
            _place(out, to, rows, back.num_rows[to.dim])
        for dim, n in back.num_rows.items():
            if dim not in out:
                out[dim] = others.new_zeros(n, dim)
        return out

    def backward(
        self,
        grads: Sequence[torch.Tensor],
        send_sizes: Sequence[int],
        back: RowsBack,
        scale: float,
        beside: Beside | None,
        landing: Landing | None = None,
    ) -> torch.Tensor:
        """Exchange gradients the other way.

        Args:
            grads: of each feature's rows, (ids, dim).
            beside: a sum over the ranks, in the same exchange.
            landing: for the gradients that come.

        Returns:
            Flat gradients of the rows that this rank sent, in that order.
        """
        codec, pack = self.codecs.gradients, back.pack(grads, scale)
        channel = self._results if beside is None else self.channel
        return send_gradients(channel, codec, back.sizes, send_sizes, grads[0], pack, beside, landing)()

    def landing(self, send_sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Landing | None:
        """Where the gradients are to come of what `forward` sends."""
        return landing_for(self._results, self.codecs, send_sizes, dtype, device)


def _place(out: dict[int, torch.Tensor], to: RowPlaces, rows: torch.Tensor, num_rows: int) -> None:
    """Write rows into their dim's result, which is made with the first of them."""
    assert isinstance(to.where, slice)
    if to.dim not in out and to.count == num_rows and to.width == to.dim:
        out[to.dim] = rows  # everything came in place: no copy
        return
    if to.dim not in out:
        out[to.dim] = rows.new_empty(num_rows, to.dim)  # every row and column is written
    out[to.dim][to.where, to.column : to.column + to.width].copy_(rows)
