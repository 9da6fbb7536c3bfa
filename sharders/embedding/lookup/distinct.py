"""The distinct rows that ids name, and which ids each stands for; on the CPU, by functions that numba compiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sharders.embedding.lookup.numba_layout import address, longs, scratch_for
from sharders.embedding.lookup.numba_training import entry_of

FEWEST_IDS = 1024
"""Of a call: fewer are sent as they are, for nothing can be saved on them."""
FEW_IDS = 16
"""Of a segment: likewise."""
_MAX = 2**31


class DistinctRows(NamedTuple):
    """Rows of ids that lie in segments.

    Args:
        values: (R,) segment by segment.
        counts: of each segment.
        places: (N,) int32, row by row the places of its ids, in their own order.
        times: (R,) int32, how many ids each has.
        bounds: (R + 1,) int32, of the rows among the places.
    """

    values: Tensor
    counts: list[int]
    places: Tensor
    times: Tensor
    bounds: Tensor


def distinct_rows(
    values: Tensor, counts: Sequence[int], num_rows: Sequence[int], places: Tensor | None = None
) -> DistinctRows | None:
    """The distinct rows of ids, segment by segment, ascending where a segment has enough that come again.

    A segment of others stays as it is. Whether there are enough is told by its first ids, and by its rows.

    Args:
        values: (N,) ids, int32 or int64.
        counts: of each segment, which have all ids.
        num_rows: for each segment more than its largest id; 0 for one that is left as it is.
        places: (N,) int32 of the ids; 0, 1, 2, ... where there are none.

    Returns:
        None where no segment has enough.
    """
    num, num_segments = values.numel(), len(counts)
    if num < FEWEST_IDS or num >= _MAX or max(num_rows, default=0) >= _MAX:
        return None
    keys = values.to(torch.int32)
    (_ends, ends), (_rows, rows_of) = longs(accumulate(counts, initial=0)), longs(num_rows)
    found = torch.empty(num_segments, dtype=torch.int32, device="cpu")
    scratch = scratch_for(max(counts))
    of_segments, numbers = (keys.data_ptr(), ends, rows_of), found.data_ptr()
    if not entry_of("choose")(*of_segments, num_segments, FEW_IDS, numbers, scratch.data_ptr()):
        return None
    sources = address(places)
    _begins, begins = longs(bytes(8 * num_segments))
    room = entry_of("lay_out")(*of_segments[1:], num_segments, begins)
    of_rows = torch.empty(2 * room, dtype=torch.int32, device="cpu")
    memory = torch.empty(4 * num + 1, dtype=torch.int32, device="cpu")
    rows, starts = (of_rows.data_ptr() + 4 * i * room for i in range(2))
    ordered, new_values, times, bounds = (memory.data_ptr() + 4 * i * num for i in range(4))
    entry_of("sort_tables")(
        *(keys.data_ptr(), sources, 0, rows_of, 0, num_segments),
        *(ends, begins, numbers, rows, starts, ordered, 0, scratch.data_ptr(), 0),
    )
    of_ids = keys.data_ptr(), sources, ends, begins, num_segments
    count = entry_of("compact")(*of_ids, numbers, rows, starts, ordered, new_values, times, bounds)
    of_values, of_times, of_bounds = (memory[i * num : i * num + count + i // 3] for i in (1, 2, 3))
    return DistinctRows(of_values.to(values.dtype), found.tolist(), memory[:num], of_times, of_bounds)


class Numbered(NamedTuple):
    """Rows with the numbers first, first + 1, ...

    Args:
        num: of the rows.
        places: address of those of their ids, int32, row by row; 0: they are 0, 1, 2, ...
        times: address of how many ids each row has, int32; 0: one each.
        shift: added to the places.
    """

    first: int
    num: int
    places: int
    times: int
    shift: int


def spread(runs: Sequence[Numbered], to: Tensor) -> None:
    """Write the numbers of rows to the places of their ids in the int32 `to`."""
    _kept, told = longs(word for run in runs for word in run)
    entry_of("spread")(told, len(runs), to.data_ptr())
