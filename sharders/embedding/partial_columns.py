"""Columns of results that are sums of partials, and the partials that they are sums of: one compiled pass each way.

Torch's operators put partials in the order of results, add them up, and copy the sums to their columns; and back they
gather columns, pick rows of them, and multiply: each a pass over all that travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import gcd
from typing import Any

import torch

from sharders.embedding.columns import ELEMENTS_OF_AN_ID, cut_columns, first_columns, scalar, streams
from sharders.embedding.lookup import numba_kernel, threads
from sharders.embedding.lookup.numba_layout import int64, longs, words
from sharders.embedding.lookup.numba_training import ELEMENTS, entry_of
from sharders.embedding.partials import Partials, PartialsPlan
from sharders.embedding.ragged import Columns


class PartialColumns:
    """Where a plan's partials belong.

    Args:
        plan: of which partials come.
        target: columns of results.
        kernel: see `Placing`.
    """

    def __init__(self, plan: PartialsPlan, target: Sequence[Columns], kernel: str | None) -> None:
        self._may_compile = kernel in (None, "numba")
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
        self._together = gcd(*(n for to, width, *_ in pieces for n in (to, width)))

    def takes(self, *matrices: torch.Tensor) -> bool:
        """Whether compiled code may read and write them."""
        (dtype, *_), is_cpu = (of.dtype for of in matrices), all(of.device.type == "cpu" for of in matrices)
        can = self._may_compile and is_cpu and dtype in ELEMENTS and all(of.dtype == dtype for of in matrices)
        return can and all(of.stride(-1) == 1 for of in matrices) and not numba_kernel.problem(dtype)

    def add_up(self, partials: Partials, came: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the columns of `out`.

        Args:
            came: of each rank its partials, flat, in the order of sources.
            out: (B, all columns).
        """
        # Counted from the address 0: what lies in different memory is behind it, and never -1.
        at, counts = [part.data_ptr() // part.element_size() for part in came], partials.counts
        places = [0] * len(self._widths)
        for piece in self._plan.pieces:
            for slot in piece.slots:
                places[slot] = at[piece.sender]
                at[piece.sender] += counts[slot] * piece.width
        lengths, add = partials.lengths, entry_of("add_partials", ELEMENTS[out.dtype])
        fixed = 0, *words(lengths), lengths.shape[1]
        pieces = self._pieces.data_ptr(), len(self._pieces), self._entries.data_ptr()
        to, past = (out.data_ptr(), out.stride(0)), int(streams(out, out.stride(0), self._together))
        rows, parts = len(out), threads.num_parts(out.numel() // ELEMENTS_OF_AN_ID)
        slots = [[width, place, 0] for width, place in zip(self._widths, places, strict=True)]
        _kept, of_parts = _by_part(slots, lengths, range(len(slots)), 0, 1, parts)

        def part(i: int) -> None:
            of_part = of_parts[i], len(slots)
            add(*fixed, *of_part, *pieces, *to, rows * i // parts, rows * (i + 1) // parts, past)

        threads.run(part, parts)

    def pick(self, partials: Partials, rank: int, grad: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Write the gradients of the partials that a rank has sent to the flat `out`.

        Args:
            rank: table rank.
            grad: (B, all columns) of the results.
            scale: multiplies them.
        """
        sender, counts, at, slots = partials.place_of(rank), partials.counts, 0, []
        for piece in self._plan.pieces:
            for slot in piece.slots if piece.sender == sender else ():
                slots.append([slot, piece.width, self._columns[slot], at])
                at += counts[slot] * piece.width
        lengths, pick = partials.lengths, entry_of("pick_gradients", ELEMENTS[out.dtype])
        fixed = grad.data_ptr(), grad.stride(0), *words(lengths), lengths.shape[1]
        rows, parts = len(grad), threads.num_parts(out.numel() // ELEMENTS_OF_AN_ID)
        _kept, of_parts = _by_part(slots, lengths, [slot for slot, *_ in slots], 1, 3, parts)
        past = int(streams(out, len(out), gcd(*self._widths)))

        def part(i: int) -> None:
            span = rows * i // parts, rows * (i + 1) // parts
            pick(*fixed, of_parts[i], len(slots), out.data_ptr(), *span, scalar(scale).data_ptr(), past)

        threads.run(part, parts)


def _by_part(
    slots: list[list[int]], lengths: torch.Tensor, rows: Sequence[int], width: int, place: int, parts: int
) -> tuple[Any, list[int]]:
    """What holds the words of each part of the samples, (slots, words), and where: its first partials are told there.

    Args:
        slots: words of each, of the whole.
        rows: of their lengths.
        width, place: which word is what.
    """
    if parts == 1 or not slots:
        kept, at = longs(chain.from_iterable(slots))
        return kept, [at] * parts
    has_ids, num = lengths[list(rows)] > 0, lengths.shape[1]
    before = torch.stack([has_ids[:, : num * i // parts].sum(1) for i in range(parts)])
    whole = int64(slots)
    of_parts = whole.repeat(parts, 1, 1)
    of_parts[:, :, place] += before * whole[:, width]
    return of_parts, [of_part.data_ptr() for of_part in of_parts]
