"""Collectives of the data path. One process, with or without a group, runs the same code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_to_all(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send `send_sizes[i]` elements of the flat `send` to rank i; returns what came, in rank order, flat."""
    if group is None or len(send_sizes) == 1:
        return send
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    return received


class RiderExchange:
    """An all-to-all of flat parts that also sums a tensor over the ranks: each part carries a copy of it.

    Args:
        rider: (n,) this rank's addend, or None for a plain all-to-all.
        me: this rank's index.
        send_sizes, receive_sizes: elements for and from each rank, the rider apart.
    """

    def __init__(
        self, rider: torch.Tensor | None, me: int, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> None:
        self.rider, self.me = rider, me
        self.send_sizes, self.receive_sizes = list(send_sizes), list(receive_sizes)

    def parts(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Parts to fill, one for each rank: views of the send buffer, of dtype and device of `like`."""
        self._sizes = self._with_rider(self.send_sizes)
        self._send = like.new_empty(sum(self._sizes))
        whole = self._send.split(self._sizes)
        for i, (part, n) in enumerate(zip(whole, self.send_sizes, strict=True)):
            if self.rider is not None and i != self.me:
                part[n:].copy_(self.rider)
        return [part[:n] for part, n in zip(whole, self.send_sizes, strict=True)]

    def run(self, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange: what came, in rank order, flat; and the sum, added in rank order on every rank."""
        sizes = self._with_rider(self.receive_sizes)
        received = all_to_all(self._send, self._sizes, sizes, group)
        if self.rider is None or len(sizes) == 1:
            return received, self.rider
        total, pieces = torch.zeros_like(self.rider), []
        for i, (part, n) in enumerate(zip(received.split(sizes), self.receive_sizes, strict=True)):
            pieces.append(part[:n])
            total += self.rider if i == self.me else part[n:]
        return torch.cat(pieces), total

    def _with_rider(self, sizes: list[int]) -> list[int]:
        extra = 0 if self.rider is None else self.rider.numel()
        return [n + (extra if i != self.me else 0) for i, n in enumerate(sizes)]


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum over the group's ranks, in place."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
