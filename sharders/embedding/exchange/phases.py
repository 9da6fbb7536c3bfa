"""Phases of a step under the names that the planner's report uses: for torch's profiler, and counted for each call.

A phase is a range in a profile, forward and backward. What a call has `Spent` is its seconds by
this rank's clock, which on a device is when work is given to it, and the bytes that this rank sends to others. A phase
inside another takes its part out of that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sharders.channel import Channel, Landing, Purpose, Sizes, Transfer, Transport

INPUT, FORWARD, OUTPUT, GRADIENT = "input a2a", "lookup fwd", "output a2a", "grad a2a"
BACKWARD, SYNC = "lookup bwd", "replica sync"
TENSOR = "tensor gather"
"""Not in the report: the same for every plan."""

# Private: the public one takes 4 microseconds with no profiler near, this one 0.2.
_Range: Any = torch._C._profiler._RecordFunctionFast


class Spent:
    """What one call has taken so far: seconds, and bytes sent, by phase."""

    __slots__ = ("seconds", "sent")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.sent: dict[str, int] = {}


class _Now(threading.local):
    phase: phase | None = None


_now = _Now()
"""What this thread is in."""


class phase:
    """While the block runs, this thread is in a phase of a call."""

    __slots__ = ("_before", "_name", "_range", "_since", "_spent")

    def __init__(self, spent: Spent, name: str) -> None:
        self._spent, self._name, self._range = spent, name, _Range(name)

    def __enter__(self) -> None:
        self._before = _now.phase
        _now.phase = self
        self._range.__enter__()
        self._since = perf_counter()
        if self._before is not None:
            self._before.take(self._since)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = perf_counter()
        self.take(now)
        self._range.__exit__(None, None, None)
        _now.phase = self._before
        if self._before is not None:
            self._before._since = now

    def take(self, until: float) -> None:
        """Add the seconds since the last time."""
        seconds = self._spent.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + until - self._since

    def send(self, count: int) -> None:
        """Add bytes."""
        sent = self._spent.sent
        sent[self._name] = sent.get(self._name, 0) + count


def counted(transport: Transport) -> Transport:
    """A transport whose channels count in the phase that their thread is in."""

    def opened(group: dist.ProcessGroup | None, purpose: Purpose) -> Channel:
        channel = transport(group, purpose)
        return channel if channel.size == 1 else Counted(channel)

    return opened


class Counted:
    """A channel that counts what this rank sends to others."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.size, self.group = channel.rank, channel.size, channel.group
        self.empty, self.landing, self.tells_sizes = channel.empty, channel.landing, channel.tells_sizes

    def all_to_all(self, send: torch.Tensor, send_sizes: Sizes, *rest: Any, **options: Any) -> Transfer:
        """See `Channel`."""
        _count((sum(send_sizes) - send_sizes[self.rank]) * send.itemsize)
        return self._channel.all_to_all(send, send_sizes, *rest, **options)

    def answer(self, landing: Landing, sizes: Sizes) -> list[torch.Tensor]:
        """See `Channel`."""
        _count((sum(sizes) - sizes[self.rank]) * landing.flat.itemsize)
        return self._channel.answer(landing, sizes)

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """See `Channel`: what the others get of this rank's."""
        _count((self.size - 1) * send.nbytes)
        return self._channel.all_gather(send)

    def sum(self, tensor: torch.Tensor) -> None:
        """See `Channel`: as in a ring, where each rank sends its part of the sums twice."""
        _count(2 * (self.size - 1) * tensor.nbytes // self.size)
        self._channel.sum(tensor)


def _count(num_bytes: int) -> None:
    if _now.phase is not None:
        _now.phase.send(num_bytes)


class LastStep:
    """What the calls of a module in its last step have taken."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._calls: list[Spent] = []

    def add(self, spent: Spent, number: int | None) -> None:
        """A call that is finished now.

        Args:
            number: of the model's forward in which it is; None outside, where each call is a step.
        """
        if number is None or number != self._number:
            self._calls = []
        self._number = number
        self._calls.append(spent)

    def total(self) -> Mapping[str, tuple[float, int]]:
        """Phase -> seconds and bytes; of a step whose backward pass has not run, what has been so far."""
        names = dict.fromkeys(name for spent in self._calls for name in spent.seconds)
        return {
            name: (
                sum(spent.seconds.get(name, 0.0) for spent in self._calls),
                sum(spent.sent.get(name, 0) for spent in self._calls),
            )
            for name in names
        }
