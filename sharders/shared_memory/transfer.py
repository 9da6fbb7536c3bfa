"""An exchange through memory that is under way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from dmp import RanksError
from sharders.shared_memory.landing import LANDED, MemoryLanding

ALL_TO_ALL = 1
"""What a `MemoryChannel` calls such exchanges."""


class MemoryTransfer:
    """An all-to-all in flight: what the others send is read when it is waited for.

    Args:
        channel: the `MemoryChannel`.
        sizes: elements from each rank; less than 0: as many as it sends.
        own: this rank's part.
        out: takes what comes; made when it is waited for where there is none.
        landing: takes where the others want the answer.
        lands_at: where they write, of an answer; `out` begins there.
    """

    __slots__ = (
        *("__weakref__", "_channel", "_has_all", "_is_open", "_landing", "_lands_at", "_out", "_own", "_sizes"),
        *("_starts", "number"),
    )

    def __init__(
        self,
        channel: Any,
        number: int,
        sizes: Sequence[int],
        own: torch.Tensor,
        out: torch.Tensor | None,
        landing: MemoryLanding | None = None,
        lands_at: Sequence[int] = (),
    ) -> None:
        self._channel, self.number, self._sizes, self._own, self._out = channel, number, list(sizes), own, out
        self._sizes[channel.rank] = own.numel()
        self._landing, self._lands_at = landing, lands_at
        self._starts: dict[int, int] = {}
        self._is_open, self._has_all = True, False

    def wait(self) -> torch.Tensor:
        """See `Transfer`."""
        if not self._has_all:
            assert self._is_open, "what came was given up"
            if min(self._sizes) < 0:
                for rank in self._channel.others():
                    self._start(rank)
            out = self._out = self._own.new_empty(sum(self._sizes)) if self._out is None else self._out
            item, address = out.element_size(), out.data_ptr()
            first = [0, *accumulate(n * item for n in self._sizes)]
            me = self._channel.rank
            copy(address + first[me], self._own.data_ptr(), self._own.nbytes)
            for rank in self._channel.others():
                start = self._start(rank)
                if not start & LANDED:
                    copy(address + first[rank], self._channel.address(rank) + start, first[rank + 1] - first[rank])
                elif start ^ LANDED != (self._lands_at or first)[rank]:
                    raise RanksError(
                        f"rank {rank} of the group has written the answer to another exchange than that which is under "
                        "way here; all ranks of a group must make the same calls in the same order"
                    )
            self._has_all, self._own = True, out[:0]  # what was sent is no longer held
            self.end()
        assert self._out is not None
        return self._out

    def starts(self) -> list[int]:
        """See `Transfer`."""
        return [*accumulate(self._sizes, initial=0)][:-1]

    def part(self, rank: int) -> torch.Tensor:
        """See `Transfer`."""
        if self._has_all or self._lands_at:
            start = sum(self._sizes[:rank])
            return self.wait()[start : start + self._sizes[rank]]
        if rank == self._channel.rank:
            return self._own
        start = self._start(rank)
        came: torch.Tensor = self._channel.view(rank, start, self._sizes[rank], self._own.dtype)
        return came

    def end(self) -> None:
        """See `Transfer`."""
        if self._is_open:
            for rank in self._channel.others():
                self._start(rank)
            self._is_open = False
            self._channel.let_go(self.number)

    def _start(self, rank: int) -> int:
        """Where a rank's part is, once it is there."""
        if rank not in self._starts:
            item = self._own.element_size()
            expected = self._sizes[rank] * item
            self._starts[rank], landing, nbytes = self._channel.arrival(rank, self.number, ALL_TO_ALL, expected)
            self._sizes[rank] = nbytes // item
            if self._landing is not None:
                self._landing.wanted[rank] = landing, nbytes
        return self._starts[rank]

    def keep(self) -> None:
        """Copy out what has come, unless that was read where it lies."""
        if self._is_open:
            self.wait()

    def __del__(self) -> None:
        """One that nobody waits for holds up nobody."""
        if self._is_open:
            self._channel.let_go(self.number)


def copy(to: int, source: int, nbytes: int) -> None:
    """Lets other threads run meanwhile."""
    if nbytes:
        ctypes.memmove(to, source, nbytes)
