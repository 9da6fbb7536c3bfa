"""Ids of segments brought down to distinct rows, compiled by numba: what `distinct` does on the CPU.

Terms as in `numba_sort`, whose tables are the segments here.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import helper
from sharders.embedding.lookup.numba_vectors import read32, read64, write32

AS_THEY_ARE = -1
"""In place of a count: the ids of this segment are sent as they are."""
_CROWDED = 2  # rows per id: with fewer many ids must be equal
_LEAST, _MOST, _PART = 64, 512, 3  # of a segment's ids so many are looked at: their number shifted by the last
_WORTH = 4  # one of so many ids must name a row again
SCRATCH = 4 * _MOST


def choose(keys, ends, num_rows, num_tables, few, counts, scratch):
    """Which segments have ids that come again often enough; returns how many do.

    Args:
        ends, num_rows: (num_tables + 1,) and (num_tables,) int64; a segment of 0 rows is left alone.
        few: a segment of fewer ids is, too.
        counts: written: `AS_THEY_ARE`, or 0.
        scratch: `SCRATCH` words.
    """
    chosen = 0
    for table in range(num_tables):
        begin, num = read64(ends, table), read64(ends, table + 1) - read64(ends, table)
        total = read64(num_rows, table)
        asked = num >= few and total > 0
        pays = asked and total <= _CROWDED * num
        if asked and not pays:
            looked_at = min(num, min(max(num >> _PART, _LEAST), _MOST))
            again = _again(keys + 4 * begin, looked_at, scratch)
            pays = _WORTH * again * num >= looked_at * looked_at  # more come again, the more there are
        write32(counts, table, 0 if pays else AS_THEY_ARE)
        if pays:
            chosen += 1
    return chosen


@helper
def _again(keys, num, slots):
    """How many of the first ids were there before."""
    size = 2
    while size < 4 * num:
        size *= 2
    for i in range(size):
        write32(slots, i, -1)
    found = 0
    for p in range(num):
        key = read32(keys, p)
        at = ((key * 2654435761) >> 12) & (size - 1)
        while read32(slots, at) != -1 and read32(slots, at) != key:
            at = (at + 1) & (size - 1)
        if read32(slots, at) == key:
            found += 1
        else:
            write32(slots, at, key)
    return found


def compact(keys, sources, ends, begins, num_tables, counts, rows, starts, ordered, values, times, bounds):
    """Rows of the segments, one after the other; returns how many.

    Args:
        keys, sources: of all ids; sources are their places if it is 0.
        counts: of each segment its rows; those that are `AS_THEY_ARE` are written.
        begins, rows, starts: of the segments that are sorted, see `sort_tables`.
        ordered: likewise; written for the others.
        values, times: written: the rows, and how many ids each has.
        bounds: written: of the rows among the ids, from 0 to the end.
    """
    at = 0
    write32(bounds, 0, 0)
    for table in range(num_tables):
        begin, end, count = read64(ends, table), read64(ends, table + 1), read32(counts, table)
        of_rows = read64(begins, table)
        if count == AS_THEY_ARE:
            write32(counts, table, end - begin)
            for p in range(begin, end):
                write32(values, at, read32(keys, p))
                write32(times, at, 1)
                write32(ordered, p, p if sources == 0 else read32(sources, p))
                at += 1
                write32(bounds, at, p + 1)
        else:
            for i in range(count):
                write32(values, at, read32(rows, of_rows + i))
                stop = read32(starts, of_rows + i + 1)
                write32(times, at, stop - read32(starts, of_rows + i))
                at += 1
                write32(bounds, at, stop)
    return at


def spread(runs, num_runs, to):
    """Write the numbers of rows, which go up by one, to the places of their ids in `to`.

    Args:
        runs: (num_runs, 5) int64: the first number, how many rows; the addresses of the places, row by row, and of how
            many each has; what is added to a place. 0 for places 0, 1, 2, ..., and for one each.
    """
    for run in range(num_runs):
        first, num_rows, places = read64(runs, 5 * run), read64(runs, 5 * run + 1), read64(runs, 5 * run + 2)
        times, shift = read64(runs, 5 * run + 3), read64(runs, 5 * run + 4)
        p = 0
        for row in range(num_rows):
            for _ in range(1 if times == 0 else read32(times, row)):
                write32(to, shift + (p if places == 0 else read32(places, p)), first + row)
                p += 1
