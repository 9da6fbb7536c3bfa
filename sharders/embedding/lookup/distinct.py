"""The distinct rows that ids name, and which ids each stands for; on the CPU, by functions that numba compiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from sharders.embedding.lookup import numba_kernel
from sharders.embedding.lookup.numba_layout import address, int64, scratch_for
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
    """

    values: Tensor
    counts: list[int]
    places: Tensor
    times: Tensor


def can_be_found(device: torch.device, kernel: str | None) -> bool:
    """Whether ids can be brought down to distinct rows here.

    Args:
        kernel: name of the lookup kernel that the user asked for: another than numba's uses nothing of numba.
    """
    return device.type == "cpu" and kernel in (None, "numba") and not numba_kernel.problem()


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
    ends, rows_of = int64([*accumulate(counts, initial=0)]), int64(num_rows)
    found = torch.empty(num_segments, dtype=torch.int32, device="cpu")
    scratch = scratch_for(max(counts))
    of_segments = keys.data_ptr(), ends.data_ptr(), rows_of.data_ptr()
    if not entry_of("choose")(*of_segments, num_segments, FEW_IDS, found.data_ptr(), scratch.data_ptr()):
        return None
    sources = torch.arange(num, dtype=torch.int32, device="cpu") if places is None else places
    begins = torch.empty(num_segments, dtype=torch.int64, device="cpu")
    room = entry_of("lay_out")(*of_segments[1:], num_segments, begins.data_ptr())
    rows, starts = torch.empty(2, room, dtype=torch.int32, device="cpu")
    ordered, new_values, times = torch.empty(3, num, dtype=torch.int32, device="cpu")
    at = 0
    for as_they_are, run in groupby(found.tolist()):
        stop = at + len(list(run))
        if not as_they_are:
            entry_of("sort_tables")(
                *(keys.data_ptr(), sources.data_ptr(), 0, rows_of.data_ptr(), at, stop),
                *(*map(address, (ends, begins, found, rows, starts, ordered)), 0, scratch.data_ptr(), 0),
            )
        at = stop
    of_ids = *map(address, (keys, sources, ends, begins)), num_segments
    count = entry_of("compact")(*of_ids, *map(address, (found, rows, starts, ordered, new_values, times)))
    return DistinctRows(new_values[:count].to(values.dtype), found.tolist(), ordered[:num], times[:count])


def spread(places: Tensor, times: Tensor | None, first: int, to: Tensor) -> None:
    """Write the numbers first, first + 1, ... of rows to the places of their ids in the int32 `to`.

    Args:
        places: (N,) row by row.
        times: (R,) ids of each row; one each where it is None.
    """
    if times is None:
        numbers = torch.arange(first, first + places.numel(), dtype=to.dtype, device=to.device)
        to.scatter_(0, places.to(torch.int64), numbers)
        return
    entry_of("spread")(*map(address, (places, times)), times.numel(), first, to.data_ptr())
