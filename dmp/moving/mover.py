"""`Mover`: takes parts of tensors from rank to rank, in buffers of a few MB that are used again and again.

Both sides cut views of one shape and dtype, each its own, and so know where each piece lies without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dmp.chunked import ChunkedTensor, Rectangle, cut_out
from dmp.moving.routes import find_routes
from dmp.ranks import gather_words

BUFFER_BYTES = 8 << 20
"""Of what is sent and of what comes, together, at one time."""

_LEAST_BYTES, _ALIGN_BYTES = 4096, 16
_Batch = list[tuple[int, torch.Tensor]]  # (first byte, piece) of what goes to one rank, or comes from it, at one time


class Moving(NamedTuple):
    """A tensor on its way.

    Attributes:
        old, new: for each rank the rectangles that it holds, and those that it will hold.
        have: this rank's chunks of `old`.
        room: this rank's chunks of `new`, which are filled.
        size: of the whole tensor.
    """

    old: Sequence[Sequence[Rectangle]]
    new: Sequence[Sequence[Rectangle]]
    have: Sequence[torch.Tensor]
    room: Sequence[torch.Tensor]
    size: tuple[int, ...]


class Mover:
    """Moves tensors between the ranks of one group, all of which move the same ones in the same order.

    Args:
        group: None where this process has them all.
        device: of what travels.
        what: the call, for messages.

    Attributes:
        sent_bytes: that this rank has sent to others.
        kept_bytes: that it had itself.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, what: str) -> None:
        self._group, self._device, self._what = group, device, what
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._out, self._in = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
        self.sent_bytes = self.kept_bytes = 0

    def move(self, tensors: Iterable[Moving]) -> None:
        """Fill `room` of each tensor; collective.

        Raises:
            ShardError: see `find_routes`.
        """
        sends: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        with torch.no_grad():
            for t in tensors:
                have, room = [o for o, _ in t.old[self._rank]], [o for o, _ in t.new[self._rank]]
                kept, sent, received = find_routes(t.size, t.old, t.new, self._rank)
                for part in kept:
                    value = cut_out(t.have[part.source], have[part.source], part.shared)
                    cut_out(t.room[part.target], room[part.target], part.shared).copy_(value)
                    self.kept_bytes += value.nbytes
                for rank, parts in sent.items():
                    sends[rank] += [cut_out(t.have[p.source], have[p.source], p.shared) for p in parts]
                for rank, parts in received.items():
                    receives[rank] += [cut_out(t.room[p.target], room[p.target], p.shared) for p in parts]
            if self._group is not None:
                self._exchange(sends, receives)

    def _exchange(self, sends: list[list[torch.Tensor]], receives: list[list[torch.Tensor]]) -> None:
        """Send views and fill views, in as many rounds as the rank with the most of them needs."""
        most = self._most(max(sum(map(bool, sends)), sum(map(bool, receives))))
        if not most:
            return
        share = max(BUFFER_BYTES // 2 // most // _ALIGN_BYTES * _ALIGN_BYTES, _LEAST_BYTES)
        rounds = self._most(max(sum(1 for _ in _batches(views, share)) for views in (*sends, *receives)))
        going, coming = ([_batches(views, share) for views in each] for each in (sends, receives))
        for _ in range(rounds):
            self._round([next(each, []) for each in going], [next(each, []) for each in coming])

    def _round(self, going: list[_Batch], coming: list[_Batch]) -> None:
        sizes, from_each = ([_num_bytes(batch) for batch in each] for each in (going, coming))
        self._out, self._in = _large_enough(self._out, sum(sizes)), _large_enough(self._in, sum(from_each))
        for piece, place in _places(going, sizes, self._out):
            place.copy_(piece)
            self.sent_bytes += piece.nbytes
        came, out = self._in[: sum(from_each)], self._out[: sum(sizes)]
        dist.all_to_all_single(came, out, from_each, sizes, group=self._group)
        for piece, place in _places(coming, from_each, came):
            piece.copy_(place)

    def _most(self, mine: int) -> int:
        """The largest of all ranks' numbers."""
        return max(row[0] for row in gather_words(self._what, [mine, 0], self._group))


def _batches(views: Iterable[torch.Tensor], most_bytes: int) -> Iterator[_Batch]:
    """The views in pieces, by as many as fit into so many bytes."""
    batch: _Batch = []
    end = 0
    for view in views:
        for _, piece in ChunkedTensor(view.shape, [view], [(0,) * view.dim()]).pieces(most_bytes):
            if batch and end + piece.nbytes > most_bytes:
                yield batch
                batch, end = [], 0
            batch.append((end, piece))
            end += _aligned(piece.nbytes)
    if batch:
        yield batch


def _num_bytes(batch: _Batch) -> int:
    """Of a buffer for it."""
    return _aligned(batch[-1][0] + batch[-1][1].nbytes) if batch else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _large_enough(buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return buffer if buffer.numel() >= num_bytes else buffer.new_empty(num_bytes)


def _places(
    going: Iterable[_Batch], sizes: Sequence[int], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece and where it lies in the buffer, batch after batch, as a tensor of its shape."""
    start = 0
    for batch, size in zip(going, sizes, strict=True):
        for at, piece in batch:
            yield piece, buffer[start + at : start + at + piece.nbytes].view(piece.dtype).view(piece.shape)
        start += size
