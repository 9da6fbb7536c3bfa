"""What both output dists share: results to the ranks of the samples, and gradients back to the owners of the rows.

A rank's own do not travel: they are worked on while the others' do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sharders.channel import Channel, Landing, Sizes
from sharders.embedding.exchange.codec import Codec, Codecs, decoded, encoded


class ResultExchange:
    """Lookups on their way to the ranks of the samples.

    Args:
        send: flat lookups for the others, in rank order.
        send_sizes, receive_sizes: elements for and from each rank; this one's do not travel.
        tail: elements of memory wanted right behind what comes.
        landing: see `Channel.all_to_all`.
    """

    def __init__(
        self,
        channel: Channel,
        codec: Codec | None,
        send: torch.Tensor,
        send_sizes: Sizes,
        receive_sizes: Sizes,
        tail: int = 0,
        landing: Landing | None = None,
    ) -> None:
        self._codec, self._sizes = codec, of_others(receive_sizes, channel.rank)
        count = sum(self._sizes)
        self._flat = send.new_empty(count + tail) if tail else None
        self.tail = None if self._flat is None else self._flat[count:]
        """What was asked for."""
        self._dtype, self._came = send.dtype, None if self._flat is None else self._flat[:count]
        wire = encoded(codec, send, channel)
        out = self._came if codec is None else None
        self._transfer = channel.all_to_all(wire, of_others(send_sizes, channel.rank), self._sizes, out, landing)
        self._has_come = False

    def wait(self) -> torch.Tensor:
        """What has come, rank by rank, and the tail."""
        if not self._has_come:
            came = self._transfer.wait()
            if self._codec is not None:
                came = decoded(self._codec, came, self._dtype, self._came)
            self._flat = came if self._flat is None else self._flat
            self._has_come = True
        assert self._flat is not None
        return self._flat

    def part(self, rank: int) -> torch.Tensor:
        """What has come from a rank, where it lies; see `Transfer.part`. Not beside `wait`."""
        came = self._transfer.part(rank)
        return came if self._codec is None else decoded(self._codec, came, self._dtype)

    def end(self) -> None:
        """See `Transfer.end`."""
        self._transfer.end()


def landing_for(
    channel: Channel, codecs: Codecs, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Landing | None:
    """Where gradients are to come of results that are sent on a channel, as many as these; None where they are sent.

    Args:
        sizes: elements of the results for each rank, this one too.
    """
    if codecs.gradients is not None:
        return None
    return channel.landing(of_others(sizes, channel.rank), sizes[channel.rank], dtype, device)


class Beside(Protocol):
    """What travels from every rank to every other beside the gradients, in their exchange, or by itself."""

    device: torch.device

    @property
    def nbytes(self) -> int:
        """Of what comes from all ranks, this one too."""

    def buffers(self, me: int) -> list[Buffers]:
        """What is exchanged, for the rank `me`."""

    def fill(self, wire: Sequence[torch.Tensor]) -> None:
        """Write what goes to one rank, by buffer; it is the same for all."""

    def take(self, came: Sequence[Sequence[torch.Tensor]], me: int) -> None:
        """What has come, by buffer and rank; at `me` stands nothing."""

    let_go: Callable[[], None]
    """Ends the exchange: called when nothing that has come is read any more."""


def exchange_alone(channel: Channel, beside: Beside) -> Callable[[], None]:
    """Begin it by itself; returns what ends it. What comes is read where it lies, until it is let go."""
    exchange = TypedExchange(channel, beside.device, beside.buffers(channel.rank))
    for i, wire in enumerate(zip(*exchange.send, strict=True)):
        if i != channel.rank:
            beside.fill(wire)
    exchange.start()

    def end() -> None:
        beside.let_go = exchange.end
        beside.take(exchange.parts(), channel.rank)

    return end


def nothing() -> None:
    """Of an exchange that has ended."""


def send_gradients(
    channel: Channel,
    codec: Codec | None,
    send_sizes: Sizes,
    receive_sizes: Sizes,
    like: torch.Tensor,
    pack: Callable[[int, torch.Tensor], None],
    beside: Beside | None = None,
    landing: Landing | None = None,
) -> Callable[[], torch.Tensor]:
    """Gradients on their way to the owners, and in the same exchange what goes to all ranks.

    Args:
        send_sizes, receive_sizes: elements of gradients for and from each rank, this one too.
        like: tells dtype and device of the gradients.
        pack: called with each rank and the flat memory to be filled with the gradients for it.
        beside: takes what comes.
        landing: for them, where they are the answer to an exchange.

    Returns:
        What waits for them and gives them, flat: of the others in rank order, then this rank's own.
    """
    me = channel.rank
    if landing is not None:
        for i, there in enumerate(channel.answer(landing, of_others(send_sizes, me))):
            if i != me:
                pack(i, there)
        transfer, landed = landing.send(), landing.flat
        pack(me, landed[sum(receive_sizes) - receive_sizes[me] :])

        def answered() -> torch.Tensor:
            transfer.wait()
            return landed

        return answered
    gradients = like.new_empty(sum(receive_sizes))
    others = gradients[: gradients.numel() - receive_sizes[me]]
    wire_dtype = codec.wire_dtype(like.dtype) if codec else like.dtype
    buffers = [Buffers(wire_dtype, of_others(send_sizes, me), of_others(receive_sizes, me))]
    if beside is not None:
        buffers += beside.buffers(me)
    exchange = TypedExchange(channel, like.device, buffers)
    for i, (wire, *of_beside) in enumerate(zip(*exchange.send, strict=True)):
        if i == me:
            continue
        values = wire if codec is None else like.new_empty(wire.numel())
        pack(i, values)
        if codec is not None:
            codec.encode(values, wire)
        if beside is not None:
            beside.fill(of_beside)
    is_in_place = codec is None and beside is None
    exchange.start(others if is_in_place else None)
    pack(me, gradients[others.numel() :])

    def come() -> torch.Tensor:
        came = exchange.wait()
        if beside is not None:
            beside.take(came[1:], me)
        if not is_in_place:
            torch.cat([decoded(codec, part, like.dtype) for part in came[0]], out=others)
        return gradients

    return come


@dataclass(frozen=True)
class Buffers:
    """Elements of one dtype: how many go to each rank, and how many come from it."""

    dtype: torch.dtype
    send_sizes: Sizes
    receive_sizes: Sizes


class TypedExchange:
    """Buffers of several dtypes in one all-to-all, none of which knows of another.

    What goes to a rank is its elements of the first, then of the second, each filled up to whole words of the widest
    dtype. One kind alone comes as it was sent, rank after rank.

    Attributes:
        send: for each of the buffers and each rank the memory to fill before `start`.
    """

    def __init__(self, channel: Channel, device: torch.device, buffers: Sequence[Buffers]) -> None:
        self._channel, self._dtypes = channel, [b.dtype for b in buffers]
        self._word = max(dtype.itemsize for dtype in self._dtypes)
        self._send_sizes = [*zip(*(b.send_sizes for b in buffers), strict=True)]
        self._receive_sizes = [*zip(*(b.receive_sizes for b in buffers), strict=True)]
        self._flat = channel.empty(sum(map(self._bytes, self._send_sizes)), torch.uint8, device)
        self.send = self._cut(self._flat, self._send_sizes)

    def start(self, out: torch.Tensor | None = None) -> None:
        """Send; `out` takes what comes where there is one kind."""
        send_bytes, receive_bytes = ([*map(self._bytes, of)] for of in (self._send_sizes, self._receive_sizes))
        as_bytes = None if out is None else out.view(torch.uint8)
        self._transfer = self._channel.all_to_all(self._flat, send_bytes, receive_bytes, as_bytes)

    def wait(self) -> list[list[torch.Tensor]]:
        """For each of the buffers what came from each rank."""
        return self._cut(self._transfer.wait(), self._receive_sizes)

    def parts(self) -> list[list[torch.Tensor]]:
        """The same where it lies, until `end`."""
        views = [self._cut(self._transfer.part(i), [of_rank]) for i, of_rank in enumerate(self._receive_sizes)]
        return [[of_rank[kind][0] for of_rank in views] for kind in range(len(self._dtypes))]

    def end(self) -> None:
        """See `Transfer.end`."""
        self._transfer.end()

    def _cut(self, flat: torch.Tensor, sizes: Sequence[Sizes]) -> list[list[torch.Tensor]]:
        """Views of bytes, for each of the buffers and each rank."""
        views: list[list[torch.Tensor]] = [[] for _ in self._dtypes]
        for of_rank, of_all in zip(flat.split([self._bytes(n) for n in sizes]), sizes, strict=True):
            at = 0
            for count, dtype, of_kind in zip(of_all, self._dtypes, views, strict=True):
                of_kind.append(of_rank[at : at + count * dtype.itemsize].view(dtype))
                at += self._filled(count, dtype)
        return views

    def _bytes(self, counts: Sizes) -> int:
        return sum(map(self._filled, counts, self._dtypes))

    def _filled(self, count: int, dtype: torch.dtype) -> int:
        return -(-count * dtype.itemsize // self._word) * self._word


def of_others(sizes: Sizes, me: int) -> list[int]:
    """What goes to others: nothing from `me` to itself."""
    return [0 if i == me else n for i, n in enumerate(sizes)]
