"""`Mover`: takes parts of tensors from rank to rank, in buffers of a few MB that are used again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dmp.moving.buffers import ALIGN_BYTES, Batch, batches, cut_out, num_bytes, places, room_in
from dmp.moving.routes import Rectangle, find_routes
from dmp.ranks import gather_words

BUFFER_BYTES = 16 << 20
"""Of what is sent and of what comes, together, at one time."""

_LEAST_BYTES = 4096


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
        share = max(BUFFER_BYTES // 2 // most // ALIGN_BYTES * ALIGN_BYTES, _LEAST_BYTES)
        rounds = self._most(max(sum(1 for _ in batches(views, share)) for views in (*sends, *receives)))
        going, coming = ([batches(views, share) for views in each] for each in (sends, receives))
        for _ in range(rounds):
            self._round([next(each, []) for each in going], [next(each, []) for each in coming])

    def _round(self, going: list[Batch], coming: list[Batch]) -> None:
        sizes, from_each = ([num_bytes(batch) for batch in each] for each in (going, coming))
        self._out, out = room_in(self._out, sum(sizes))
        self._in, came = room_in(self._in, sum(from_each))
        for piece, place in places(going, sizes, out):
            place.copy_(piece)
            self.sent_bytes += piece.nbytes
        dist.all_to_all_single(came, out, from_each, sizes, group=self._group)
        for piece, place in places(coming, from_each, came):
            piece.copy_(place)

    def _most(self, mine: int) -> int:
        """The largest of all ranks' numbers."""
        return max(row[0] for row in gather_words(self._what, [mine, 0], self._group))
