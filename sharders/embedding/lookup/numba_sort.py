"""Ids brought into the order of their rows, compiled by numba: what an update needs of the ids.

Terms:
    table: here a row range, with all features or segments that name it.
    key: an id, as a row of its table.
    source: where the gradient of an id is: `bag + (feature << shift)` of pooled lookups, where `feature` counts in its
        table; the number of its bag, or its own place, of unpooled ones.
    order: for each table its distinct rows, ascending, and for each of these the sources in the ids' own order. So the
        order, and the bits of sums along it, do not depend on how it is found.

Addresses are integers. Arrays are int32 where nothing else is said.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import helper
from sharders.embedding.lookup.numba_layout import FILLED
from sharders.embedding.lookup.numba_vectors import (
    counted,
    fill32,
    lowest,
    ones,
    read32,
    read32_at,
    read64,
    write32,
    write64,
)

_FEW_IDS = 24
_COUNTED_ROWS = 2
"""Per id: so few are counted one by one. Of 3.1 per id, 32,768 ids of 100,000 rows, that took 1.04 of the time of
marks, and by Zipf's law 1.55; of 12 it took three times as long."""
_MARKED_ROWS = 64  # per id: so few are marked in a bitmap
_MANY_IDS = 4096  # which a digit of 11 bits pays for
_IDS_OF_A_ROW = _IDS_OF_A_BAG = 4
"""At least, of a table whose gradients are summed without an order. With bags of 0..32 ids it took 0.8 of the time of
8 columns and 0.95 of 64; with one id in each 1.1."""
_NARROW, _TIMES_AS_MANY = 4, 4
"""Columns of rows of which several lie in a line of the cache: a table of these may have as many elements more, and as
many rows as ids. Ids and updates of 26 tables of 4 columns, none above 100,000 rows, took 0.72 of the time with 130,000
ids each and 0.92 with 33,000; by Zipf's law 0.94. Of 8 columns with 65,000 ids they took 1.2."""


def expand_bags(
    ids, id_bytes, bounds, bound_bytes, runs, first_runs, num_tables, keys, sources, origins, ends,
    tables, num_rows, most, row_ends, firsts,
):  # fmt: skip
    """Keys and sources of bags' ids; returns the most ids of a table. Those of tables of few rows are not written.

    Args:
        bounds: of the bags among the ids.
        runs: (number of runs, 3) int64, table by table: the first bag's place in `bounds`, the number of bags, what is
            added to a bag's number in the run to give its source.
        first_runs: (num_tables + 1,) int64: of each table.
        keys: written if it is not 0: int32 ids of one table after the other are keys as they lie.
        sources: written, and up to `FILLED` words more than there are ids.
        origins: where the ids were, written if it is not 0.
        ends: (num_tables + 1,) int64, written: where each table's keys begin.
        tables, num_rows: see `update` in `numba_loops`, and `sort_tables`.
        most: elements of a table of few rows, but for narrow ones.
        row_ends: (num_tables + 1,) int64, written: where the rows of each table of few would begin if they lay one
            behind the other, and the end; no others have a place.
        firsts: likewise, of their elements.
    """
    to = most_ids = first_row = first_element = 0
    for table in range(num_tables):
        write64(ends, table, to)
        write64(row_ends, table, first_row)
        write64(firsts, table, first_element)
        before, bags, total, width = to, 0, read64(num_rows, table), read64(tables, 4 * table + 1)
        for run in range(read64(first_runs, table), read64(first_runs, table + 1)):
            of_run, num_bags = bounds + read64(runs, 3 * run) * bound_bytes, read64(runs, 3 * run + 1)
            to += read32_at(of_run + num_bags * bound_bytes) - read32_at(of_run)
            bags += num_bags
        most_ids = max(most_ids, to - before)
        is_small = total * width <= most and _IDS_OF_A_ROW * total <= to - before
        is_narrow = width <= _NARROW and total * width <= _TIMES_AS_MANY * most and total <= to - before
        if (is_small or is_narrow) and _IDS_OF_A_BAG * bags <= to - before:
            first_row, first_element = first_row + total, first_element + total * width
            continue
        to = before
        for run in range(read64(first_runs, table), read64(first_runs, table + 1)):
            of_run, base = bounds + read64(runs, 3 * run) * bound_bytes, read64(runs, 3 * run + 2)
            first = read32_at(of_run)
            for bag in range(read64(runs, 3 * run + 1)):
                stop = read32_at(of_run + (bag + 1) * bound_bytes)
                fill32(sources, to, base + bag)  # without a branch, which half of bags of one id or none would take
                for at in range(to + FILLED, to + stop - first, FILLED):
                    fill32(sources, at, base + bag)
                shift, place = to - first, first
                while keys != 0 and place < stop:
                    write32(keys, shift + place, read32_at(ids + place * id_bytes))
                    place = counted(place + 1)
                while origins != 0 and first < stop:
                    write32(origins, shift + first, first)
                    first = counted(first + 1)
                first, to = stop, shift + stop
    write64(ends, num_tables, to)
    write64(row_ends, num_tables, first_row)
    write64(firsts, num_tables, first_element)
    return most_ids


def expand_runs(
    ids, id_bytes, counts, num_runs, by_table, run_ends, num_tables, firsts, keys, sources, ends,
    num_last, lengths, num_samples, bases,
):  # fmt: skip
    """Keys and sources of ids that are looked up one by one; returns the most ids of a table.

    Args:
        counts: (num_runs,) int64: ids of each run, in the order in which they lie.
        by_table: (num_runs,) int64: the runs table by table.
        run_ends: (num_tables + 1,) int64: where each table's begin there, and the end.
        firsts: memory for num_runs int64.
        keys, sources: written if these are not 0.
        ends: (num_tables + 1,) int64, written: where each table's keys begin.
        num_last: of the last runs, whose sources are told by samples.
        lengths: (num_last, num_samples): their bags, of one id or none.
        bases: (num_last,) int64: what is added to a sample's number to give its source.
    """
    first = 0
    for run in range(num_runs):
        write64(firsts, run, first)
        first += read64(counts, run)
    to = most = 0
    for table in range(num_tables):
        write64(ends, table, to)
        before = to
        for at in range(read64(run_ends, table), read64(run_ends, table + 1)):
            run = read64(by_table, at)
            first, num = read64(firsts, run), read64(counts, run)
            for place in range(first, first + (num if keys != 0 else 0)):
                write32(keys, to + place - first, read32_at(ids + place * id_bytes))
                write32(sources, to + place - first, place)
            last = run - (num_runs - num_last)
            if last >= 0 and keys != 0:
                next_to, base = to, read64(bases, last)
                for sample in range(num_samples):  # without a branch: one word behind the last may be overwritten
                    write32(sources, next_to, base + sample)
                    next_to += read32(lengths, last * num_samples + sample)
            to += num
        most = max(most, to - before)
    write64(ends, num_tables, to)
    return most


def expand_parts(parts, num_parts, first_rows, num_rows, num_tables, keys, sources, ends):
    """Keys and sources of rows that are known, each with one gradient; returns the most of a table.

    Args:
        parts: (num_parts, 3) int64: address of a part's rows, int64 and ascending, their number, the first's source.
        first_rows, num_rows: of each table, int64: ascending, disjoint.
        ends: (num_tables + 1,) int64, written: where each table's keys begin.
    """
    to = most = 0
    for table in range(num_tables):
        write64(ends, table, to)
        before, first = to, read64(first_rows, table)
        stop = first + read64(num_rows, table)
        for part in range(num_parts):
            its_rows, num, source = read64(parts, 3 * part), read64(parts, 3 * part + 1), read64(parts, 3 * part + 2)
            place = first_from64(its_rows, num, first)
            while place < num and read64(its_rows, place) < stop:
                write32(keys, to, read64(its_rows, place) - first)
                write32(sources, to, source + place)
                place += 1
                to += 1
        most = max(most, to - before)
    write64(ends, num_tables, to)
    return most


def _first_from(read):
    @helper
    def first_from(values, num, least):
        """The place of the first of ascending values that is no less."""
        low, high = 0, num
        while low < high:
            middle = (low + high) // 2
            if read(values, middle) < least:
                low = middle + 1
            else:
                high = middle
        return low

    return first_from


first_from32, first_from64 = _first_from(read32), _first_from(read64)


def lay_out(ends, num_rows, num_tables, begins):
    """Where the distinct rows of each table may lie: as many as it can have, and one word more; returns the end.

    Args:
        ends, num_rows: see `sort_tables`.
        begins: (num_tables,) int64, written.
    """
    at = 0
    for table in range(num_tables):
        write64(begins, table, at)
        at += min(read64(ends, table + 1) - read64(ends, table), read64(num_rows, table)) + 1
    return at


def sort_tables(
    keys, sources, origins, num_rows, first, stop, ends, begins, counts, rows, starts, ordered, places, scratch,
    row_ends,
):  # fmt: skip
    """The order of the tables `first` to `stop`.

    Args:
        keys, sources, origins: of all ids; those of table t are `ends[t]` to `ends[t + 1]`, `ends` int64. Sources are
            places among all keys if `sources` is 0.
        num_rows: of each table, int64.
        begins: see `lay_out`.
        counts: of each table, written: distinct rows; of one that is left as it is less than 0, as it was.
        rows: written at `begins[t]`: its distinct rows, and one word more.
        starts: written at `begins[t]`: where each begins in `ordered`, and the end.
        ordered: written: the sources.
        places: written: where the ids were, by `origins`, or among all keys if that is 0; 0 where nobody asks.
        scratch: `scratch_for` the ids of the largest of these tables.
        row_ends: see `expand_bags`; 0 where all are sorted.
    """
    for table in range(first, stop):
        if row_ends != 0 and read64(row_ends, table) != read64(row_ends, table + 1):
            write32(counts, table, 0)
            continue
        if read32(counts, table) < 0:
            continue
        begin = read64(ends, table)
        num = read64(ends, table + 1) - begin
        total = read64(num_rows, table)
        its_sources = sources + 4 * begin if sources != 0 else 0
        its_origins = origins + 4 * begin if origins != 0 else 0
        of = (keys + 4 * begin, its_sources, its_origins, num, begin)
        of_rows = 4 * read64(begins, table)
        to = (rows + of_rows, starts + of_rows, ordered, places)
        if num <= _FEW_IDS:
            found = _insert(of, to, scratch)
        elif total <= _COUNTED_ROWS * num:
            found = _count(of, total, to, scratch)
        elif total <= _MARKED_ROWS * num:
            found = _mark(of, total, to, scratch)
        else:
            found = _by_digits(of, total, to, scratch)
        write32(counts, table, found)


@helper
def _put(of, to, p, at):
    """The id at place `p` of a table goes to place `at` of all."""
    _, sources, origins, _, begin = of
    _, _, ordered, places = to
    write32(ordered, at, begin + p if sources == 0 else read32(sources, p))
    if places != 0:
        write32(places, at, begin + p if origins == 0 else read32(origins, p))


@helper
def _put_all(of, to, numbers, places):
    """Each id goes to the place that is kept under its number, the next of that number behind it."""
    for p in range(of[3]):
        number = read32(numbers, p)
        at = read32(places, number)
        write32(places, number, at + 1)
        _put(of, to, p, at)


@helper
def _count(of, total, to, counts):
    """By counting every row of the table."""
    keys, _, _, num, begin = of
    rows, starts, _, _ = to
    for row in range(total):
        write32(counts, row, 0)
    for p in range(num):
        row = read32(keys, p)
        write32(counts, row, read32(counts, row) + 1)
    found, at = 0, begin
    for row in range(total):  # without a branch, which half of the rows would take
        count = read32(counts, row)
        write32(rows, found, row)
        write32(starts, found, at)
        write32(counts, row, at)
        at += count
        found += count > 0
    write32(starts, found, at)
    _put_all(of, to, keys, counts)
    return found


@helper
def _mark(of, total, to, scratch):
    """By marking rows in a bitmap: a row's rank is the number of marks before it; ranks are counted."""
    keys, _, _, num, begin = of
    rows, starts, _, _ = to
    num_words = (total + 63) >> 6
    words, before = scratch, scratch + 8 * num_words
    ranks = before + 4 * num_words
    counts = ranks + 4 * num
    for word in range(num_words):
        write64(words, word, 0)
    for p in range(num):
        row = read32(keys, p)
        write64(words, row >> 6, read64(words, row >> 6) | (1 << (row & 63)))
    found = 0
    for word in range(num_words):
        write32(before, word, found)
        marks = read64(words, word)
        while marks != 0:
            write32(rows, found, (word << 6) + lowest(marks))
            write32(counts, found, 0)
            found += 1
            marks &= marks - 1
    for p in range(num):
        row = read32(keys, p)
        rank = read32(before, row >> 6) + ones(read64(words, row >> 6) & ((1 << (row & 63)) - 1))
        write32(ranks, p, rank)
        write32(counts, rank, read32(counts, rank) + 1)
    at = begin
    for rank in range(found):
        write32(starts, rank, at)
        count = read32(counts, rank)
        write32(counts, rank, at)
        at += count
    write32(starts, found, at)
    _put_all(of, to, ranks, counts)
    return found


@helper
def _by_digits(of, total, to, scratch):
    """By their digits, the lowest first: needs no memory for each row of the table."""
    keys, _, _, num, _ = of
    length = 1
    while (total - 1) >> length:
        length += 1
    wanted = 8 if num < _MANY_IDS else 11
    passes = (length + wanted - 1) // wanted
    bits = (length + passes - 1) // passes
    buckets = 1 << bits
    counts = scratch
    from_, into = scratch + 4 * buckets, scratch + 4 * (buckets + 2 * num)
    for p in range(num):
        write32(from_, 2 * p, read32(keys, p))
        write32(from_, 2 * p + 1, p)
    for digit in range(passes):
        low = digit * bits
        for bucket in range(buckets):
            write32(counts, bucket, 0)
        for p in range(num):
            bucket = (read32(from_, 2 * p) >> low) & (buckets - 1)
            write32(counts, bucket, read32(counts, bucket) + 1)
        at = 0
        for bucket in range(buckets):
            count = read32(counts, bucket)
            write32(counts, bucket, at)
            at += count
        for p in range(num):
            bucket = (read32(from_, 2 * p) >> low) & (buckets - 1)
            at = read32(counts, bucket)
            write32(counts, bucket, at + 1)
            write64(into, at, read64(from_, p))
        from_, into = into, from_
    return _write_sorted(of, to, from_)


@helper
def _insert(of, to, pairs):
    """Few ids, one by one."""
    keys, _, _, num, _ = of
    for p in range(num):
        key, at = read32(keys, p), p
        while at > 0 and read32(pairs, 2 * at - 2) > key:
            write64(pairs, at, read64(pairs, at - 1))
            at -= 1
        write32(pairs, 2 * at, key)
        write32(pairs, 2 * at + 1, p)
    return _write_sorted(of, to, pairs)


@helper
def _write_sorted(of, to, pairs):
    """The order, of sorted pairs (key, place)."""
    _, _, _, num, begin = of
    rows, starts, _, _ = to
    found, last = 0, -1
    for p in range(num):
        key = read32(pairs, 2 * p)
        if key != last:
            write32(rows, found, key)
            write32(starts, found, begin + p)
            found += 1
            last = key
        _put(of, to, read32(pairs, 2 * p + 1), begin + p)
    write32(starts, found, begin + num)
    return found
