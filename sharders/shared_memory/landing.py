"""A *landing*: memory of a rank's own segment in which the others write the answer to an exchange.

[Note: landings] With its exchange a rank says to each of the others where in its segment it wants the answer, and gets
from each where that one wants its own. The answer is written there, and then published as any exchange is, with a mark
in place of where it starts; nobody copies it. A place is used once. Where a rank has said none, or other sizes are
sent, the answer is sent as usual, and the receiver copies it to where it wanted it: neither needs to know beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

LANDED = 1 << 63
"""Added to where an answer lies in the segment of the rank that it is for."""


class MemoryLanding:
    """See `Landing` in sharders/channel.py.

    Args:
        flat: leased memory of this rank's segment.
        start: of it in the segment.
        sizes: bytes from each rank.
        begin: starts the exchange of the answer: (this, what lies in this rank's segment, where each rank's part
            starts, bytes for each) -> the transfer.
    """

    def __init__(self, flat: torch.Tensor, start: int, sizes: Sequence[int], begin: Callable[..., Any]) -> None:
        self.flat, self.sizes, self._begin = flat, list(sizes), begin
        first = accumulate(sizes, initial=start)
        self.starts = [at if n else 0 for at, n in zip(first, sizes, strict=False)]
        """Where each rank is to write; 0: nowhere, it sends nothing."""
        self.wanted: list[tuple[int, int]] = [(0, 0)] * len(self.starts)
        """Where each of the others wants the answer of this rank, 0 for nowhere, and its bytes."""
        self._sent: tuple[torch.Tensor | None, list[int], list[int]] | None = None

    def place(self, views: Sequence[Callable[..., torch.Tensor]], sizes: Sequence[int], empty: Any) -> list[Any]:
        """Memory to be filled for each rank, in its segment or, one behind the other, in this rank's own.

        Args:
            views: see `Segment.view`, of each rank.
            sizes: elements for each.
            empty: flat memory of this rank's segment, of so many elements.
        """
        assert self._sent is None, "an answer is sent once"
        item = self.flat.element_size()
        there = [bool(at) and n * item == size for (at, size), n in zip(self.wanted, sizes, strict=True)]
        num_own = sum(n for n, is_there in zip(sizes, there, strict=True) if not is_there)
        own = empty(num_own) if num_own else self.flat[:0]
        made, starts, at = [], [], 0
        for (wanted, _), view, n, is_there in zip(self.wanted, views, sizes, there, strict=True):
            made.append(view(wanted, n, self.flat.dtype) if is_there else own[at : at + n])
            starts.append(wanted | LANDED if is_there else at * item)
            at += 0 if is_there else n
        self._sent = own, starts, [n * item for n in sizes]
        return made

    def send(self) -> Any:
        """See `Landing`."""
        assert self._sent is not None, "nothing was filled"
        return self._begin(self, *self._sent)
