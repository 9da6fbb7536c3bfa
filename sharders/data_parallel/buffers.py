"""Buffers of a replicated model, which are rank 0's at every forward, as under DDP; sent when a rank has changed some.

[Note: buffers] DDP sends all buffers at every forward; of most models nobody ever writes one (masks, indices,
frequencies), and the broadcast takes a millisecond or more of each step. Where ranks share memory they ask each other
first: each compares its buffers with what was last sent, by their bytes, for writes through `.data` count no version.
Elsewhere an answer takes as long as what it would save.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dmp import ranks
from sharders.channel import Channel, GroupChannel, over_group

_MOST_BYTES = 64 << 20
"""Of buffers that are kept a second time to be compared."""


class Buffers:
    """Those of one model, on the ranks of a group; collective.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = ranks.own_group(group, "buffers")
        """On which they are sent: apart from gradients, for gloo ends the process where the two meet."""
        self._asks_on: Channel = over_group(group, "buffers")
        self._sent: list[torch.Tensor] | None = None

    def have_changed(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether they are to be sent: some rank's are not what was last sent. The same on all ranks."""
        if isinstance(self._asks_on, GroupChannel):
            return True
        mine = self._sent is None or len(self._sent) != len(buffers) or not all(map(_is_same, self._sent, buffers))
        with ranks.entry("the forward pass, for buffers of rank 0's", self._asks_on.group):
            return bool(self._asks_on.all_gather(torch.tensor([mine], dtype=torch.int64)).any())

    def were_sent(self, buffers: Sequence[torch.Tensor]) -> None:
        """Remember what all ranks have now."""
        if not isinstance(self._asks_on, GroupChannel):
            is_small = sum(b.nbytes for b in buffers) <= _MOST_BYTES
            self._sent = [b.detach().clone() for b in buffers] if is_small else None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
