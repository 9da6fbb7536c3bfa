"""Exchanges through shared memory: see `Channel` in sharders/channel.py, and [Note: exchanges] of segment.py."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dmp import RanksError
from sharders.shared_memory.landing import LANDED, MemoryLanding
from sharders.shared_memory.segment import SLOTS, Block, Pool, Segment, tensor_in
from sharders.shared_memory.transfer import ALL_TO_ALL, MemoryTransfer, copy
from sharders.shared_memory.waiting import Looking, Process, poll_memory, wake

_ALL_GATHER, _SUM = 2, 3
_NAMES = {ALL_TO_ALL: "an all-to-all", _ALL_GATHER: "an all-gather", _SUM: "a sum"}
_SUMMED_WHOLE_BYTES = 32 << 10
"""Up to here every rank adds everything; beyond, each its part."""


class Peer(NamedTuple):
    """Another rank: its number in the default group, its memory, its process."""

    rank: int
    segment: Segment
    process: Process


class MemoryChannel:
    """A channel between processes of one host.

    What is sent from memory of `empty` is not copied; what comes is copied out once, unless it is read where it lies,
    or is an answer: see [Note: landings] of landing.py. Sums are made in the order of the ranks: with two of them as
    gloo's to the bit, with more the same on all, where gloo's order depends on sizes.

    Args:
        group: of the ranks.
        mine: this rank's segment.
        peers: by rank; None for this one.
        otherwise: a channel over connections, for what does not lie in this host's memory.
    """

    tells_sizes = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        mine: Segment,
        peers: Sequence[Peer | None],
        otherwise: Callable[[], Any],
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group: dist.ProcessGroup | None = group
        self._group = group
        self._mine, self._peers, self._otherwise = mine, list(peers), otherwise
        # In an order of its own on each rank, so that not all read the same memory at once.
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._segments = [mine if peer is None else peer.segment for peer in peers]
        self._looking = Looking(self.size)
        self._pool = Pool(mine, self._is_done)
        self._nowhere, self._unknown = [0] * self.size, [-1] * self.size
        self._lock, self._number, self._pid = threading.Lock(), 0, os.getpid()
        self._open: list[weakref.ref[MemoryTransfer] | None] = [None] * SLOTS
        self._is_closed = False

    def close(self) -> None:
        """Give the memory back, but for what tensors lie in: the group is gone. Whoever still refers to the channel, as
        a model that nobody has collected yet, holds nothing by it."""
        self._is_closed = True
        self._open = [None] * SLOTS
        self._segments, self._peers = [], []
        del self._mine, self._pool

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryChannel:
        """A copy of a model exchanges on the channels of the original."""
        return self

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Channel`."""
        if torch.device(device).type != "cpu":
            return torch.empty(count, dtype=dtype, device=device)
        self._check_process()
        with self._lock:
            _, lease = self._pool.take(count * dtype.itemsize)
        return tensor_in(lease, count, dtype)

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int] | None,
        out: torch.Tensor | None = None,
        landing: MemoryLanding | None = None,
    ) -> Any:
        """See `Channel`."""
        if send.device.type != "cpu":
            return self._otherwise().all_to_all(send, send_sizes, receive_sizes, out)
        item, me = send.element_size(), self.rank
        sizes = [n * item for n in send_sizes]
        send = send.contiguous()
        assert send.numel() * item == sum(sizes)
        assert receive_sizes is None or send_sizes[me] == receive_sizes[me]
        assert out is None or (receive_sizes is not None and out.numel() == sum(receive_sizes) and out.is_contiguous())
        block, starts, _lease = self._placed(send, sizes)
        own = send[sum(send_sizes[:me]) : sum(send_sizes[: me + 1])]
        number = self._publish(ALL_TO_ALL, starts, sizes, block, landing.starts if landing else None)
        expected = receive_sizes if receive_sizes is not None else self._unknown
        return self._begun(MemoryTransfer(self, number, expected, own, out, landing=landing))

    def landing(
        self, sizes: Sequence[int], tail: int, dtype: torch.dtype, device: torch.device
    ) -> MemoryLanding | None:
        """See `Channel`; none either where the segment is full."""
        count = sum(sizes)
        if torch.device(device).type != "cpu" or not count:
            return None
        try:
            flat = self.empty(count + tail, dtype, device)
        except MemoryError:
            return None
        start = flat.data_ptr() - self._mine.address
        return MemoryLanding(flat, start, [n * dtype.itemsize for n in sizes], self._begin_answer)

    def answer(self, landing: Any, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `Channel`."""
        of_flat = landing.flat.dtype, landing.flat.device
        views = [each.view for each in self._segments]
        placed: list[torch.Tensor] = landing.place(views, sizes, lambda count: self.empty(count, *of_flat))
        return placed

    def _begin_answer(
        self, landing: MemoryLanding, own: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]
    ) -> MemoryTransfer:
        with self._lock:
            block = self._pool.block_at(own.data_ptr()) if own.numel() else None
        first = own.data_ptr() - self._mine.address if block else 0
        starts = [at if at & LANDED else first + at for at in starts]
        number = self._publish(ALL_TO_ALL, starts, sizes, block)
        expected = [n // own.element_size() for n in landing.sizes]
        out = landing.flat[: sum(expected)]
        return self._begun(MemoryTransfer(self, number, expected, own[:0], out, lands_at=landing.starts))

    def _begun(self, transfer: MemoryTransfer) -> MemoryTransfer:
        self._open[transfer.number % SLOTS] = weakref.ref(transfer)
        return transfer

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        """See `Channel`."""
        if send.device.type != "cpu":
            gathered: torch.Tensor = self._otherwise().all_gather(send)
            return gathered
        out = send.new_empty(self.size, send.numel())
        if not out.numel():
            return out
        nbytes = send.numel() * send.element_size()
        number = self._share(_ALL_GATHER, send.contiguous(), nbytes)
        copy(out.data_ptr() + self.rank * nbytes, send.contiguous().data_ptr(), nbytes)
        for peer in self._others:
            start, *_ = self.arrival(peer, number, _ALL_GATHER, nbytes)
            copy(out.data_ptr() + peer * nbytes, self._segments[peer].address + start, nbytes)
        self.let_go(number)
        return out

    def sum(self, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        if tensor.device.type != "cpu":
            self._otherwise().sum(tensor)
            return
        flat = tensor.contiguous().view(-1)
        nbytes = flat.numel() * flat.element_size()
        if not nbytes:
            return
        number = self._share(_SUM, flat, nbytes)
        cuts = [0, flat.numel()] if nbytes <= _SUMMED_WHOLE_BYTES else self._cuts(flat.numel())
        first, stop = (0, flat.numel()) if len(cuts) == 2 else cuts[self.rank : self.rank + 2]
        part = self._sum_of(number, flat, first, stop)
        self.let_go(number)
        if len(cuts) == 2:
            flat.copy_(part)
        else:
            sizes = [(b - a) * flat.element_size() for a, b in pairwise(cuts)]
            number = self._share(_SUM, part, sizes[self.rank])
            flat[first:stop].copy_(part)
            for peer in self._others:
                start, *_ = self.arrival(peer, number, _SUM, sizes[peer])
                at = flat.data_ptr() + cuts[peer] * flat.element_size()
                copy(at, self._segments[peer].address + start, sizes[peer])
            self.let_go(number)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def others(self) -> list[int]:
        """Ranks in the order in which this one reads what they have."""
        return self._others

    def address(self, rank: int) -> int:
        """Of a rank's segment."""
        return self._segments[rank].address

    def view(self, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies in a rank's segment."""
        return self._segments[rank].view(start, count, dtype)

    def let_go(self, number: int) -> None:
        """Tell the others that this rank reads no more of an exchange; nothing in a process that was forked since."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._mine.done[number % SLOTS] = number
        if any(segment.is_crowded.value for segment in self._segments):
            self._mine.let_go.value += 1
            wake(self._mine.let_go_address)

    def _sum_of(self, number: int, flat: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Elements first..stop of the sum, added in the order of the ranks."""
        nbytes = flat.numel() * flat.element_size()
        total: torch.Tensor | None = None
        for rank in range(self.size):
            addend = flat
            if rank != self.rank:
                start, *_ = self.arrival(rank, number, _SUM, nbytes)
                addend = self._segments[rank].view(start, flat.numel(), flat.dtype)
            total = addend[first:stop].clone() if total is None else total.add_(addend[first:stop])
        assert total is not None
        return total

    def _cuts(self, count: int) -> list[int]:
        return [count * i // self.size for i in range(self.size + 1)]

    def _share(self, kind: int, flat: torch.Tensor, nbytes: int) -> int:
        """Show all others the same; returns the exchange's number."""
        with self._lock:
            block, _lease = self._pool.take(nbytes)
        copy(self._mine.address + block.start, flat.data_ptr(), nbytes)
        return self._publish(kind, [block.start] * self.size, [nbytes] * self.size, block)

    def _placed(self, send: torch.Tensor, sizes: Sequence[int]) -> tuple[Block | None, list[int], Any]:
        """Where each rank's part lies in this segment: as it is, or copied there, without this rank's own, to a block
        that is leased until then."""
        address, total = send.data_ptr(), sum(sizes)
        with self._lock:
            block = self._pool.block_at(address) if total else None
            starts, at = [], 0 if block is None else address - self._mine.address
            if block is not None or total == sizes[self.rank]:
                for n in sizes:
                    starts.append(at)
                    at += n
                return block, starts, None
            block, lease = self._pool.take(total - sizes[self.rank])
        before = sum(sizes[: self.rank])
        after = before + sizes[self.rank]
        to = self._mine.address + block.start
        copy(to, address, before)
        copy(to + before, address + after, total - after)
        at = block.start
        for rank, n in enumerate(sizes):
            starts.append(at)
            at += 0 if rank == self.rank else n
        return block, starts, lease

    def _publish(
        self,
        kind: int,
        starts: Sequence[int],
        sizes: Sequence[int],
        block: Block | None,
        landings: Sequence[int] | None = None,
    ) -> int:
        """Tell the others of the next exchange; returns its number.

        Raises:
            RanksError: in another process than the one that the others wait for, or without a group.
        """
        self._check_process()
        self._make_room(self._number + 1)
        with self._lock:
            self._number = number = self._number + 1
            if block is not None:
                block.last = number
            self._mine.describe(number, kind, starts, sizes, landings or self._nowhere)
            self._mine.published.value = number & 0xFFFFFFFF
        wake(self._mine.published_address)
        return number

    def _check_process(self) -> None:
        if self._is_closed:
            raise RanksError(
                "the process group that these tables exchange in was destroyed: wrap the module again in the one that "
                "there is now, and load its checkpoint"
            )
        if os.getpid() != self._pid:
            raise RanksError(
                f"process {os.getpid()} was forked from rank {self.rank} of the group, process {self._pid}, which "
                "alone exchanges for that rank; run sharded models in the process that has joined the group, and give "
                "others their results or a copy without shards (dmp.to_unsharded)"
            )

    def _make_room(self, number: int) -> None:
        """End what began `SLOTS` exchanges ago: here what nobody has waited for, and on the other ranks."""
        oldest = self._open[number % SLOTS]
        transfer = None if oldest is None else oldest()
        if transfer is not None:
            transfer.keep()
        before = number - SLOTS
        if before <= 0:
            return
        for i in self._others:
            peer = self._peers[i]
            assert peer is not None
            done = peer.segment.done
            if done[before % SLOTS] < before:
                self._mine.is_crowded.value = 1
                try:
                    self._await(
                        peer,
                        lambda done=done: done[before % SLOTS] >= before,  # type: ignore[misc]
                        peer.segment.let_go,
                        peer.segment.let_go_address,
                    )
                finally:
                    self._mine.is_crowded.value = 0

    def _is_done(self, number: int) -> bool:
        at = number % SLOTS
        return all(self._segments[i].done[at] >= number for i in self._others)

    def _await(self, peer: Peer, is_there: Callable[[], bool], word: ctypes.c_uint32, address: int) -> None:
        poll_memory(is_there, word, address, peer.process, peer.rank, self._group, self._looking)

    def arrival(self, rank: int, number: int, kind: int, nbytes: int) -> tuple[int, int, int]:
        """Where in a rank's segment that is which it has for this one, once it is there, where it wants the answer, and
        how many bytes it has sent.

        Args:
            nbytes: that are expected; less than 0: any number.

        Raises:
            RanksError: it sends something else.
        """
        peer = self._peers[rank]
        assert peer is not None
        segment = peer.segment
        if not segment.has_published(number):
            there = segment.published, segment.published_address
            self._await(peer, lambda: segment.has_published(number), *there)
        row = segment.row(number)
        sent = row[2 + self.size + self.rank]
        if row[1] != kind or sent != nbytes >= 0:
            expected = f"{_NAMES[kind]} with {nbytes if nbytes >= 0 else 'any number of'} bytes from there"
            raise RanksError(
                f"the ranks are not in the same exchange: rank {peer.rank} sends {sent} bytes in {_NAMES[row[1]]}, "
                f"where {expected} is under way here; all ranks of a group must make the same calls in the same order"
            )
        return row[2 + self.rank], row[2 + 2 * self.size + self.rank], sent
