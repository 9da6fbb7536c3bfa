"""A *channel*: the exchange of buffers between the ranks of one group, and all that the data path knows of a transport.

Another transport is another class with these methods, and a `Transport` that opens it. One process, with or without a
group, runs the same code: what it sends is what comes.

[Note: parted ranks] gloo ends the process where two all-to-alls of different sizes meet. A rank may be at its next
forward, or in a collective of the program's, while another is in its backward: so what tables exchange has connections
of its own, and headers, which come first in every forward, have others. Ranks that part there wait, until the watchdog
tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from dmp import ranks
from sharders.shared_memory.memory_channel import MemoryChannel
from sharders.shared_memory.opening import memory_channel

# Its name until torch 2.13, which warns of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Sizes = Sequence[int]
"""Elements for or from each rank."""


class Transfer(Protocol):
    """An exchange in flight."""

    def wait(self) -> torch.Tensor:
        """What came from each rank, flat, in rank order."""

    def starts(self) -> list[int]:
        """Of each rank the first element in what `wait` has given."""

    def part(self, rank: int) -> torch.Tensor:
        """What came from one rank, flat, where it lies: to be read, not changed, and not kept beyond `end`."""

    def end(self) -> None:
        """Nothing of it is read any more; returns when all has come. To be called after `part`."""


class Landing(Protocol):
    """Memory for the answer to an exchange, known to the others, who write it there.

    Attributes:
        flat: what comes from the others, in rank order, and the tail; used again when no tensor lies in it.
    """

    flat: torch.Tensor

    def send(self) -> Transfer:
        """Begin the exchange: what `Channel.answer` gave is filled. When it has ended, `flat` is."""


class Channel(Protocol):
    """Exchanges between the ranks of one group, which all call them in one order.

    `rank` is this process's place among the `size` ranks. `group` says to `dmp.ranks` which ranks they are, so that
    its messages can name them (None: this process alone); nothing travels on it.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    tells_sizes: bool
    """Whether from memory of the CPU it brings as much as was sent, without being told how much that is: what has no
    fixed size may then travel with what tells of it."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Flat memory to fill once and send from, for one exchange: others may read it after the transfer has ended
        here, so what was sent is not changed any more. It is used again when no tensor lies in it. What comes from
        elsewhere (a kernel's result) may be sent too: a transport that needs memory of its own copies that."""

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: Sizes,
        receive_sizes: Sizes | None,
        out: torch.Tensor | None = None,
        landing: Any = None,
    ) -> Transfer:
        """Begin to send `send_sizes[i]` elements of the flat `send` to rank i.

        Args:
            send: not to be changed before the transfer has ended.
            receive_sizes: elements from each rank; None where the channel `tells_sizes`, on all ranks alike.
            out: flat, takes what comes; made when absent.
            landing: where the answer is wanted; only one that this channel gave.
        """

    def landing(self, sizes: Sizes, tail: int, dtype: torch.dtype, device: torch.device) -> Landing | None:
        """Where the answer to the next exchange will come, in which each rank gets as much from every other as it has
        sent there; None where a transport has nothing like it: an answer is another exchange there.

        Args:
            sizes: elements from each rank; 0 from this one.
            tail: elements that are wanted right behind.
        """

    def answer(self, landing: Landing, sizes: Sizes) -> list[torch.Tensor]:
        """Flat memory for each rank to be filled with the answer for it; once for each landing.

        Args:
            sizes: elements for each rank; 0 for this one.
        """

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """(size, N): the flat `send` (N,) of every rank, of one N on all."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place; the same to the bit on all."""


Purpose = Literal["tables", "headers", "buffers"]
Transport = Callable[[dist.ProcessGroup | None, Purpose], Channel]
"""Opens a channel between the ranks of a group (None: this process alone) for one purpose. Collective."""


def over_group(group: dist.ProcessGroup | None, purpose: Purpose) -> Channel:
    """The `Transport` of the data path: through memory where all ranks share a host, and can, else over connections.

    One channel for each group and purpose. Those of groups that were destroyed give their memory back.
    """
    if group is None or dist.get_world_size(group) == 1:
        return over_connections(group, purpose)
    for key in [key for key in _opened if not ranks.is_alive(key[0])]:
        gone = _opened.pop(key)
        if isinstance(gone, MemoryChannel):
            gone.close()
    if (group, purpose) not in _opened:
        found = memory_channel(group, purpose, partial(over_connections, group, purpose))
        _opened[group, purpose] = found or over_connections(group, purpose)
    return _opened[group, purpose]


_opened: dict[tuple[dist.ProcessGroup, Purpose], Channel] = {}


def over_connections(group: dist.ProcessGroup | None, purpose: Purpose) -> Channel:
    """The `Transport` over torch's process groups, with connections of its own: see [Note: parted ranks]."""
    if group is None or dist.get_world_size(group) == 1:
        return GroupChannel(None)
    own = ranks.own_group(group, "buffers" if purpose == "buffers" else "tables")
    return GroupChannel(ranks.control_group(group) if purpose == "headers" and own is not group else own)


class GroupChannel:
    """A channel over a process group's collectives, or of this process alone. Any memory can be sent from."""

    tells_sizes = False

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Channel`."""
        return torch.empty(count, dtype=dtype, device=device)

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: Sizes,
        receive_sizes: Sizes | None,
        out: torch.Tensor | None = None,
        landing: Any = None,
    ) -> Transfer:
        """See `Channel`."""
        assert receive_sizes is not None, "collectives are told all sizes"
        if self.size == 1:
            return InFlight(send if out is None else out.copy_(send), receive_sizes)
        if out is None:
            out = send.new_empty(sum(receive_sizes))
        sizes = list(receive_sizes), list(send_sizes)
        work = dist.all_to_all_single(out, send, *sizes, group=self.group, async_op=True)
        return InFlight(out, receive_sizes, work)

    def landing(self, sizes: Sizes, tail: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Channel`."""

    def answer(self, landing: Landing, sizes: Sizes) -> list[torch.Tensor]:
        """See `Channel`."""
        raise AssertionError("this channel gives no landings")

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """See `Channel`."""
        if self.size == 1:
            return send.view(1, -1)
        out = send.new_empty(self.size, send.numel())
        if out.numel():
            _all_gather(out.view(-1), send, group=self.group)
        return out

    def sum(self, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)


class InFlight:
    """What comes to `out`, when `work` has ended; `sizes` from each rank."""

    def __init__(self, out: torch.Tensor, sizes: Sizes, work: dist.Work | None = None) -> None:
        self._out, self._sizes, self._work = out, sizes, work

    def wait(self) -> torch.Tensor:
        """See `Transfer`."""
        if self._work is not None:
            self._work.wait()
        return self._out

    def starts(self) -> list[int]:
        """See `Transfer`."""
        return [*accumulate(self._sizes, initial=0)][:-1]

    def part(self, rank: int) -> torch.Tensor:
        """See `Transfer`."""
        start = sum(self._sizes[:rank])
        return self.wait()[start : start + self._sizes[rank]]

    def end(self) -> None:
        """See `Transfer`."""
        self.wait()
