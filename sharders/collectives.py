"""Collectives of the data path. One process, with or without a group, runs the same code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Its name until torch 2.13, which warns of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send `send_sizes[i]` elements of the flat `send` to rank i; returns what came, in rank order, flat."""
    if group is None or len(send_sizes) == 1:
        return send
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    return received


def all_gather(send: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Fill `out` with the flat `send` of every rank, of the same number of elements on all; returns it."""
    if out.numel():
        _all_gather(out.view(-1), send, group=group)
    return out


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum over the group's ranks, in place."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


class Transfer:
    """An all-to-all in flight, in which a rank's own part does not travel: it is worked on meanwhile.

    Args:
        send: flat, what goes to the others, in rank order.
        send_sizes, receive_sizes: elements for and from each rank; this rank's own are passed over.
        me: this rank's index.
        out: flat, takes what comes from the others, in rank order; made when absent.
    """

    def __init__(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        me: int,
        group: dist.ProcessGroup | None,
        out: torch.Tensor | None = None,
    ) -> None:
        to = [n if i != me else 0 for i, n in enumerate(send_sizes)]
        self._sizes = [n if i != me else 0 for i, n in enumerate(receive_sizes)]
        self._out = send.new_empty(sum(self._sizes)) if out is None else out
        self._work: dist.Work | None = None
        if group is not None and len(to) > 1:
            self._work = dist.all_to_all_single(self._out, send, self._sizes, to, group=group, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        """What came from each rank, flat; empty at this rank's own place."""
        if self._work is not None:
            self._work.wait()
        return list(self._out.split(self._sizes))


class GradientExchange:
    """Gradients to their owners, and in the same exchange the sum of a tensor over the ranks (the *rider*).

    Args:
        rider: (n,) this rank's addend, or None.
        me: this rank's index.
        send_sizes, receive_sizes: elements of gradients for and from each rank.
        like: tells dtype and device.
    """

    def __init__(
        self,
        rider: torch.Tensor | None,
        me: int,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        extra = 0 if rider is None else rider.numel()
        self._rider, self._me = rider, me
        self._receive = list(receive_sizes)
        self._with_rider = [n + extra for n in send_sizes], [n + extra for n in receive_sizes]
        self._send = like.new_empty(sum(n for i, n in enumerate(self._with_rider[0]) if i != me))
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

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Send the others' parts; `own` may be filled after."""
        others = self._gradients[: self._gradients.numel() - self.own.numel()]
        out = others if self._rider is None else None
        self._transfer = Transfer(self._send, *self._with_rider, self._me, group, out)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Flat gradients: of the others in rank order, then this rank's own; and the sum, the same on every rank."""
        came = self._transfer.wait()
        if self._rider is None:
            return self._gradients, None
        total, at = torch.zeros_like(self._rider), 0
        for i, (part, n) in enumerate(zip(came, self._receive, strict=True)):
            total += self._rider if i == self._me else part[n:]
            if i != self._me:
                self._gradients[at : at + n].copy_(part[:n])
                at += n
        return self._gradients, total
