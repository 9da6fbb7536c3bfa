"""What both output dists share: values to the ranks they are for, and gradients back; a rank's own do not travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharders.channel import Channel


class OthersExchange:
    """An all-to-all in flight, in which a rank's own part does not travel: it is worked on meanwhile.

    Args:
        send: flat, what goes to the others, in rank order.
        send_sizes, receive_sizes: elements for and from each rank; this rank's own are passed over.
        out: flat, takes what comes from the others, in rank order; made when absent.
    """

    def __init__(
        self,
        channel: Channel,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> None:
        to = [n if i != channel.rank else 0 for i, n in enumerate(send_sizes)]
        self._sizes = [n if i != channel.rank else 0 for i, n in enumerate(receive_sizes)]
        self._transfer = channel.all_to_all(send, to, self._sizes, out)

    def wait(self) -> list[torch.Tensor]:
        """What came from each rank, flat; empty at this rank's own place."""
        return list(self._transfer.wait().split(self._sizes))


class GradientExchange:
    """Gradients to their owners, and in the same exchange the sum of a tensor over the ranks (the *rider*).

    Args:
        rider: (n,) this rank's addend, or None.
        send_sizes, receive_sizes: elements of gradients for and from each rank.
        like: tells dtype and device.
    """

    def __init__(
        self,
        channel: Channel,
        rider: torch.Tensor | None,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        extra = 0 if rider is None else rider.numel()
        me = channel.rank
        self._channel, self._rider = channel, rider
        self._receive = list(receive_sizes)
        self._with_rider = [n + extra for n in send_sizes], [n + extra for n in receive_sizes]
        self._send = channel.empty(
            sum(n for i, n in enumerate(self._with_rider[0]) if i != me), like.dtype, like.device
        )
        self._gradients = like.new_empty(sum(receive_sizes))
        others = sum(receive_sizes) - receive_sizes[me]
        self.own = self._gradients[others:]
        """This rank's part, to be filled while the others' travel: what it would have sent to itself."""
        self.parts: list[torch.Tensor] = []
        """Parts to fill for each rank before `start`; this rank's is `own`."""
        at = 0
        for i, n in enumerate(send_sizes):
            if i == me:
                self.parts.append(self.own)
                continue
            self.parts.append(self._send[at : at + n])
            if rider is not None:
                self._send[at + n : at + n + extra].copy_(rider)
            at += n + extra

    def start(self) -> None:
        """Send the others' parts; `own` may be filled after."""
        others = self._gradients[: self._gradients.numel() - self.own.numel()]
        out = others if self._rider is None else None
        self._transfer = OthersExchange(self._channel, self._send, *self._with_rider, out)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Flat gradients: of the others in rank order, then this rank's own; and the sum, the same on every rank."""
        came = self._transfer.wait()
        if self._rider is None:
            return self._gradients, None
        total, at = torch.zeros_like(self._rider), 0
        for i, (part, n) in enumerate(zip(came, self._receive, strict=True)):
            total += self._rider if i == self._channel.rank else part[n:]
            if i != self._channel.rank:
                self._gradients[at : at + n].copy_(part[:n])
                at += n
        return self._gradients, total
