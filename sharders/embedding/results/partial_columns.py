"""Columns of results that are sums of partials, and the partials that they are sums of: one compiled pass each way.

Torch's operators put partials in the order of results, add them up, and copy the sums to their columns; and back they
gather columns, pick rows of them, and multiply: each a pass over all that travels.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import Any

import torch

from sharders.embedding.lookup import numba_kernel, threads
from sharders.embedding.lookup.numba_layout import int64, longs, scalar, words
from sharders.embedding.lookup.numba_training import ELEMENTS, entry_of
from sharders.embedding.results.columns import ELEMENTS_OF_AN_ID, cut_columns, first_columns, streams
from sharders.embedding.results.partials import Awaited, OwnRows, PartialsPlan, Piece
from sharders.embedding.results.ragged import Columns


class PartialColumns:
    """Where a plan's partials belong.

    Args:
        plan: of which partials come.
        target: columns of results.
        kernel: see `Placing`.
    """

    def __init__(self, plan: PartialsPlan, target: Sequence[Columns], kernel: str | None) -> None:
        self._kernel = kernel
        self._plan, slots = plan, plan.columns
        self._widths = [width for _, _, width in slots]
        self._columns = first_columns(slots, target)
        cut = cut_columns([slots])
        entries: list[list[int]] = []
        pieces: list[list[int]] = []
        for (feature, column, width), to in zip(cut, first_columns(cut, target), strict=True):
            of_piece = [
                [slot, column - first]
                for slot, (of, first, whole) in enumerate(slots)
                if of == feature and first <= column < first + whole
            ]
            pieces.append([to, width, len(entries), len(entries) + len(of_piece)])
            entries += of_piece
        self._pieces, self._entries = int64(pieces), int64(entries)
        # What compiled code is told of slots, but for where their partials lie: of all, and of each sender's own.
        self._of_all = longs(word for width in self._widths for word in (width, 0, width, 0, -1, 0))[0]
        self._of_senders: dict[int, array[int]] = {}
        for piece in plan.pieces:
            of_sender = self._of_senders.setdefault(piece.sender, array("q"))
            for slot in piece.slots:
                of_sender.extend((slot, piece.width, self._columns[slot], 0))
        self._together = gcd(*(n for to, width, *_ in pieces for n in (to, width)))

    def takes(self, *matrices: torch.Tensor) -> bool:
        """Whether compiled code may read and write them."""
        like = matrices[0]
        are_alike = all(of.dtype == like.dtype and of.is_cpu and of.stride(-1) == 1 for of in matrices)
        return are_alike and numba_kernel.may_run(self._kernel, like.device, like.dtype)

    def add_up(
        self,
        partials: Awaited,
        came: Sequence[torch.Tensor],
        out: torch.Tensor,
        own: Sequence[OwnRows] | None = None,
    ) -> None:
        """Write the columns of `out`.

        Args:
            came: of each rank its partials, flat, in the order of sources.
            out: (B, all columns).
            own: of this rank's own slots, the last, where they are read from tables.
        """
        # Counted from the address 0: what lies in different memory is behind it, and never -1.
        at, places = [part.data_ptr() // part.element_size() for part in came], []
        for piece in self._plan.pieces:  # in the order of slots
            *of_piece, at[piece.sender] = _places(piece, partials.counts, at[piece.sender])
            places += of_piece
        slots = self._of_all[:]
        slots[1::6] = array("q", places)
        if own:
            last = slots[-6 * len(own) :]
            last[1::6], last[2::6], last[4::6], last[5::6] = (array("q", of) for of in zip(*own, strict=True))
            slots[-6 * len(own) :] = last
        lengths, add = partials.lengths, entry_of("add_partials", ELEMENTS[out.dtype])
        fixed = 0, *words(lengths), lengths.shape[1]
        pieces = self._pieces.data_ptr(), len(self._pieces), self._entries.data_ptr()
        to, past = (out.data_ptr(), out.stride(0)), int(streams(out, out.stride(0), self._together))
        rows, parts = out.shape[0], threads.num_parts(out.numel() // ELEMENTS_OF_AN_ID)
        _kept, of_parts = _by_part(slots, 6, lengths, None, 2, 1, parts)

        def part(i: int) -> None:
            of_part = of_parts[i], len(places)
            add(*fixed, *of_part, *pieces, *to, rows * i // parts, rows * (i + 1) // parts, past)

        threads.run(part, parts)

    def pick(self, partials: Awaited, rank: int, grad: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Write the gradients of the partials that a rank has sent to the flat `out`.

        Args:
            rank: table rank.
            grad: (B, all columns) of the results.
            scale: multiplies them.
        """
        sender, at, places = partials.place_of(rank), 0, list[int]()
        for piece in self._plan.pieces:
            if piece.sender == sender:
                *of_piece, at = _places(piece, partials.counts, at)
                places += of_piece
        slots = self._of_senders.get(sender, array("q"))[:]
        slots[3::4] = array("q", places)
        lengths, pick = partials.lengths, entry_of("pick_gradients", ELEMENTS[out.dtype])
        fixed = grad.data_ptr(), grad.stride(0), *words(lengths), lengths.shape[1]
        rows, parts = grad.shape[0], threads.num_parts(out.numel() // ELEMENTS_OF_AN_ID)
        num_slots = len(slots) // 4
        _kept, of_parts = _by_part(slots, 4, lengths, 0, 1, 3, parts)
        past = int(streams(out, len(out), gcd(*self._widths)))

        def part(i: int) -> None:
            span = rows * i // parts, rows * (i + 1) // parts
            pick(*fixed, of_parts[i], num_slots, out.data_ptr(), *span, scalar(scale).data_ptr(), past)

        threads.run(part, parts)


def _places(piece: Piece, counts: Sequence[int], first: int) -> list[int]:
    """Of the first element of each slot's partials, and the end.

    Args:
        counts: of all slots.
        first: of the piece.
    """
    slots, width = piece.slots, piece.width
    return [*accumulate([width * n for n in counts[slots.start : slots.stop]], initial=first)]


def _by_part(
    slots: array[int], words_each: int, lengths: torch.Tensor, row: int | None, width: int, place: int, parts: int
) -> tuple[Any, list[int]]:
    """What holds the words of each part of the samples, (slots, words), and where: its first partials are told there.

    Args:
        slots: words of each, of the whole.
        row, width, place: which word is what: the row of its lengths, None where this is its number; how far its
            partials are apart; where the first is.
    """
    if parts == 1 or not slots:
        return slots, [slots.buffer_info()[0]] * parts
    whole = int64(slots).view(-1, words_each)
    has_ids, num = (lengths if row is None else lengths[whole[:, row]]) > 0, lengths.shape[1]
    before = torch.stack([has_ids[:, : num * i // parts].sum(1) for i in range(parts)])
    of_parts = whole.repeat(parts, 1, 1)
    of_parts[:, :, place] += before * whole[:, width]
    return of_parts, [of_part.data_ptr() for of_part in of_parts]
