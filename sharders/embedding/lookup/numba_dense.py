"""Gradients summed where their rows have places side by side, compiled by numba: of tables with few rows for their ids.

No order of ids is needed: bags are gone through as they lie, a bag's gradient is read once for all its ids, and sums
stay in the cache. Rows get their gradients in the ids' own order, so bits are those of sums along an order. What comes
is such an order, of distinct rows with one source each: the place of their sum.

Terms as in `numba_sort`; elements are those of gradients. Addresses are integers, elements are counted in those of what
they point to.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import by_blocks, helper
from sharders.embedding.lookup.numba_vectors import (
    add,
    computed,
    counted,
    fetch,
    fma,
    load,
    multiply,
    read32,
    read32_at,
    read64,
    read_float64,
    splat,
    store,
    total,
    write32,
    write64,
    zeros,
)

_BAGS_AHEAD = 24


def sum_tables(
    elements, ids, id_bytes, bounds, bound_bytes, runs, first_runs, tables, num_rows, first, stop, row_ends, firsts,
    weights, grad, grad_stride, shift, columns, given, sums, marks, begins, counts, rows, starts, ordered,
):  # fmt: skip
    """Sum the gradients of those of the tables `first` to `stop` that have few rows.

    Args:
        ids, id_bytes, bounds, bound_bytes, runs, first_runs: see `expand_bags`.
        tables, weights, grad, grad_stride, shift, columns, given: see `update` in `numba_loops`; `given` is 0 where
            nothing is.
        num_rows: of each table, int64.
        row_ends, firsts: of these, see `expand_bags`.
        sums: written: what is computed.
        marks: int32 of each row, written.
        begins, counts, rows, starts: written, see `sort_tables`.
        ordered: written: places of sums.
    """
    first_elsewhere, more, to_columns, factor = 1 << 32, 0, 0, 1.0
    if given != 0:
        first_elsewhere, more = read64(given, 0), read64(given, 1) - grad_stride
        to_columns, factor = 8 * read64(given, 3), read_float64(given, 2)
    mask = (1 << shift) - 1
    for table in range(first, stop):
        row_at, at = read64(row_ends, table), read64(firsts, table)
        write64(begins, table, row_at + table)
        if read64(row_ends, table + 1) == row_at:
            write32(counts, table, 0)
            continue
        num, width = read64(num_rows, table), read64(tables, 4 * table + 1)
        its_columns, its_marks = columns + 8 * read64(tables, 4 * table + 2), marks + 4 * row_at
        for row in range(num):
            write32(its_marks, row, 0)
            _clear(elements, width, (sums, at + row * width))
        for run in range(read64(first_runs, table), read64(first_runs, table + 1)):
            of_run, base = bounds + read64(runs, 3 * run) * bound_bytes, read64(runs, 3 * run + 2)
            begin, bag, of_column = read32_at(of_run), base & mask, its_columns + 8 * (base >> shift)
            here, elsewhere = read64(of_column, 0), 0
            if given != 0:
                elsewhere = read64(of_column + to_columns, 0)
            for number in range(1, read64(runs, 3 * run + 1) + 1):
                end = read32_at(of_run + number * bound_bytes)
                there = bag >= first_elsewhere
                from_ = bag * (grad_stride + there * more) + (elsewhere if there else here)
                scale = factor if there else 1.0
                of_ids = (ids, id_bytes, begin, end, weights)
                _add_bag(elements, width, (grad, from_, grad_stride, scale, of_ids, width, sums, at, its_marks))
                begin = end
                bag += 1
        of_rows = 4 * (row_at + table)
        write32(counts, table, _list(row_at, at, num, width, its_marks, rows + of_rows, starts + of_rows, ordered))


@by_blocks
def _clear(elements, like, column, arguments):
    sums, at = arguments
    store(computed(elements), sums, at + column, like)


@by_blocks
def _add_bag(elements, like, column, arguments):
    grad, from_, stride, scale, (ids, id_bytes, place, end, weights), width, sums, at, marks = arguments
    at += column
    fetch(elements, like, grad, from_ + _BAGS_AHEAD * stride + column)
    value = multiply(load(elements, like, grad, from_ + column), splat(like, scale))
    if weights == 0:
        while place < end:
            row = read32_at(ids + place * id_bytes)
            write32(marks, row, 1)
            to = at + row * width
            store(computed(elements), sums, to, add(load(computed(elements), like, sums, to), value))
            place = counted(place + 1)
    else:
        while place < end:
            row = read32_at(ids + place * id_bytes)
            write32(marks, row, 1)
            to = at + row * width
            weight = total(load(computed(elements), zeros(elements, 1), weights, place))
            store(
                computed(elements), sums, to, fma(splat(like, weight), value, load(computed(elements), like, sums, to))
            )
            place = counted(place + 1)


@helper
def _list(first, at, num, width, marks, rows, starts, ordered):
    """The rows that are marked; returns how many. Without a branch, which half of the rows would take."""
    found = 0
    for row in range(num):
        write32(rows, found, row)
        write32(starts, found, first + found)
        write32(ordered, first + found, at + row * width)
        found += read32(marks, row)
    write32(starts, found, first + found)
    return found
