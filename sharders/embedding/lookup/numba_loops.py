"""Sums over bags, and over the gradients of each distinct row, compiled by numba: all that touches rows of tables.

A row is summed in `BLOCKS` of columns, each of which stays in registers over all ids, in the ids' order: so bits do not
depend on blocks. What is needed some ids later is asked for from memory in advance.

Addresses are integers, elements are counted in those of what they point to.
"""

from __future__ import annotations

from collections.abc import Callable

from sharders.embedding.lookup.numba_compile import by_blocks, helper
from sharders.embedding.lookup.numba_sort import first_from32
from sharders.embedding.lookup.numba_updates import Kind, inner_product
from sharders.embedding.lookup.numba_vectors import (
    add,
    computed,
    counted,
    fence,
    fetch,
    fma,
    gradients,
    load,
    multiply,
    read32,
    read32_at,
    read64,
    read_float64,
    splat,
    store,
    stream,
    total,
    write64,
    zeros,
)

_AHEAD = 32  # ids
_ROWS_AHEAD = 16  # distinct rows


def sum_bags(
    elements, table, ids, id_bytes, bounds, bound_bytes, runs, num_runs, part, parts, weights, out, out_stride, streams,
    scale,
):  # fmt: skip
    """Sums over bags, times `scale`.

    Args:
        bounds: of the bags among the ids.
        runs: (num_runs, 5) int64: the first bag's place in `bounds`, the number of bags, place of the first row in the
            bank, width, place of the first bag's sum in `out`, where that of the next is `out_stride` on.
        part, parts: which part of each run is summed.
        weights: of the ids; 0 without.
        streams: write past the caches, where blocks lie so that this can be.
        scale: address of a float64.
    """
    factor = read_float64(scale, 0)
    for run in range(num_runs):
        bags, first, stop, begin, last, start, width, to = _part_of_run(
            bounds, bound_bytes, runs + 40 * run, part, parts
        )
        for bag in range(first, stop):
            end = read32_at(bags + (bag + 1) * bound_bytes)
            at = to + bag * out_stride
            to_read = (table, start, width, ids, id_bytes, begin, end, last, weights)
            _sum_bag(elements, width, (to_read, factor, out, at, streams))
            begin = end
    if streams:
        fence()


@helper
def _part_of_run(bounds, bound_bytes, run, part, parts):
    """Its bounds, the first bag and the end, the first and the last place of their ids, and what else is told of it."""
    bags, num_bags = bounds + read64(run, 0) * bound_bytes, read64(run, 1)
    first, stop = num_bags * part // parts, num_bags * (part + 1) // parts
    begin = read32_at(bags + first * bound_bytes)
    last = read32_at(bags + stop * bound_bytes) - 1
    return bags, first, stop, begin, last, read64(run, 2), read64(run, 3), read64(run, 4)


@by_blocks
def _sum_bag(elements, like, column, arguments):
    (table, start, width, ids, id_bytes, begin, end, last, weights), factor, out, to, streams = arguments
    start += column
    summed = like
    place = begin
    if weights == 0:
        while place < end:
            later = read32_at(ids + min(place + _AHEAD, last) * id_bytes)
            fetch(elements, like, table, start + later * width)
            summed = add(summed, load(elements, like, table, start + read32_at(ids + place * id_bytes) * width))
            place = counted(place + 1)
    else:
        while place < end:
            later = read32_at(ids + min(place + _AHEAD, last) * id_bytes)
            fetch(elements, like, table, start + later * width)
            row = load(elements, like, table, start + read32_at(ids + place * id_bytes) * width)
            weight = total(load(elements, zeros(elements, 1), weights, place))
            summed = fma(splat(like, weight), row, summed)
            place = counted(place + 1)
    summed = multiply(summed, splat(like, factor))
    if streams:
        stream(elements, out, to + column, summed)
    else:
        store(elements, out, to + column, summed)


def update_of(kind: Kind, reads_two: bool) -> Callable[..., None]:
    """What sums the gradients of each distinct row, and does with it what `kind` says.

    Args:
        reads_two: gradients lie in two places.
    """
    finish_block, finish_row, num_pointwise, is_row_wise = kind
    sum_sources = _sum_two_sources if reads_two else _sum_sources

    @by_blocks
    def of_block(elements, like, column, arguments):
        sources, span, row = arguments
        finish_block(elements, sum_sources(elements, like, column, sources, span), column, row)

    @helper
    def fetch_row(elements, arrays, at, state_at, width):
        """Ask for all that an update of a row changes."""
        for column in range(at, at + width, 64):
            if num_pointwise > 0:
                fetch(elements, zeros(elements, 64), arrays[0], column)
            if num_pointwise > 1:
                fetch(computed(elements), zeros(elements, 64), arrays[1], column)
            if num_pointwise > 2:
                fetch(computed(elements), zeros(elements, 64), arrays[2], column)
        if is_row_wise:
            fetch(computed(elements), zeros(elements, 1), arrays[1], state_at)

    def update(
        elements, grad, grad_stride, shift, columns, given, tables, num_tables, ends, begins, counts, rows, starts,
        ordered, places, weights, first, stop, sums, bank, state, more_state, rates, packed, packed_rows,
    ):  # fmt: skip
        """Update, or keep, each distinct row.

        Args:
            grad: rows `grad_stride` apart, one for each bag or id: see *source* in `numba_sort`.
            columns: int64: of each range, in `grad`.
            given: read where gradients lie in two places: int64: from which bag on they lie elsewhere, how far those
                rows are apart, what multiplies them, as the bits of a float64, and how many of `columns` there are
                before theirs, which count from `grad` and as if the first bag lay there.
            tables: (num_tables, 4) int64: place of the first row in the bank, width, first range, first row of state.
            ends, begins, counts, rows, starts, ordered, places: see `sort_tables`.
            weights: of the ids, of what is computed; 0 without.
            first, stop: only rows whose sources begin there are worked on: the parts of several threads.
            sums: memory for a row of what is computed.
            bank, state, more_state: the arrays of a `Kind`.
            rates: (num_tables, 5) float64: those of a `Kind`.
            packed: (num_tables, 2) int64: rows are not written where they lie in the bank but one after the other:
                place of a table's first in `packed_rows`, and of its first element; 0 if not.
            packed_rows: int64, written: which these are, as rows of the region.
        """
        arrays = (bank, state, more_state)
        elsewhere = (0, 0, 0, 0.0)
        if reads_two:
            elsewhere = (read64(given, 0), read64(given, 1) - grad_stride, 8 * read64(given, 3), read_float64(given, 2))
        for table in range(num_tables):
            begin, end = read64(ends, table), read64(ends, table + 1)
            if end <= first or begin >= stop or begin == end:
                continue
            place, width = read64(tables, 4 * table), read64(tables, 4 * table + 1)
            of_range, state_row = read64(tables, 4 * table + 2), read64(tables, 4 * table + 3)
            of_rates = _rates_of(rates, table)
            found = read32(counts, table)
            its_rows, its_starts = rows + 4 * read64(begins, table), starts + 4 * read64(begins, table)
            rank = first_from32(its_starts, found, first)
            of_grad = (grad_stride, shift, columns + 8 * of_range, elsewhere)
            sources = (grad, of_grad, ordered, places, end - 1, weights)
            its_last = found - 1
            source = read32(its_starts, rank)
            while rank < found and source < stop:
                row = read32(its_rows, rank)
                later = read32(its_rows, min(rank + _ROWS_AHEAD, its_last))
                fetch_row(elements, arrays, place + later * width, state_row + later, width)
                span = (source, read32(its_starts, rank + 1))
                at = place + row * width
                if packed != 0:
                    write64(packed_rows, read64(packed, 2 * table) + rank, at // width)
                    at = read64(packed, 2 * table + 1) + rank * width
                of_row = (at, state_row + row, width, sums, arrays, of_rates)
                of_block(elements, width, (sources, span, of_row))
                finish_row(elements, of_row)
                source = span[1]
                rank += 1

    return update


@helper
def _rates_of(rates, table):
    at = 5 * table
    return (
        *(read_float64(rates, at), read_float64(rates, at + 1), read_float64(rates, at + 2)),
        *(read_float64(rates, at + 3), read_float64(rates, at + 4)),
    )


@helper
def _sum_sources(elements, like, column, sources, span):
    """A block of the sum of a row's gradients."""
    grad, (stride, shift, columns, _), ordered, places, last, weights = sources
    mask = (1 << shift) - 1
    summed = like
    p, end = span
    while p < end:
        later = read32(ordered, min(p + _AHEAD, last))
        fetch(gradients(elements), like, grad, (later & mask) * stride + read64(columns, later >> shift) + column)
        source = read32(ordered, p)
        at = (source & mask) * stride + read64(columns, source >> shift) + column
        part = load(gradients(elements), like, grad, at)
        summed = _with(elements, like, part, summed, weights, places, p)
        p = counted(p + 1)
    return summed


@helper
def _sum_two_sources(elements, like, column, sources, span):
    """Likewise, where those of the last bags lie elsewhere: without a branch, as bags are in any order.

    In a function of its own: both in one take a fifth longer where nothing lies elsewhere.
    """
    grad, (stride, shift, columns, elsewhere), ordered, places, last, weights = sources
    first_elsewhere, more, to_columns, factor = elsewhere
    mask = (1 << shift) - 1
    summed = like
    p, end = span
    while p < end:
        later = read32(ordered, min(p + _AHEAD, last))
        bag = later & mask
        there = bag >= first_elsewhere
        at = bag * (stride + there * more) + read64(columns + there * to_columns, later >> shift)
        fetch(gradients(elements), like, grad, at + column)
        source = read32(ordered, p)
        bag = source & mask
        there = bag >= first_elsewhere
        at = bag * (stride + there * more) + read64(columns + there * to_columns, source >> shift)
        part = multiply(load(gradients(elements), like, grad, at + column), splat(like, factor if there else 1.0))
        summed = _with(elements, like, part, summed, weights, places, p)
        p = counted(p + 1)
    return summed


@helper
def _with(elements, like, part, summed, weights, places, p):
    """The sum with one gradient more."""
    if weights == 0:
        return add(summed, part)
    weight = total(load(computed(elements), zeros(elements, 1), weights, read32(places, p)))
    return fma(splat(like, weight), part, summed)


def weight_gradients(
    elements, table, ids, id_bytes, bounds, bound_bytes, runs, num_runs, part, parts, grad, grad_stride, out
):  # fmt: skip
    """Of each id the inner product of its row and its bag's gradient, which lies as the sum would; see `sum_bags`.

    `out` has what is computed.
    """
    for run in range(num_runs):
        bags, first, stop, begin, last, start, width, to = _part_of_run(
            bounds, bound_bytes, runs + 40 * run, part, parts
        )
        for bag in range(first, stop):
            end = read32_at(bags + (bag + 1) * bound_bytes)
            at = to + bag * grad_stride
            for place in range(begin, end):
                later = read32_at(ids + min(place + _AHEAD, last) * id_bytes)
                for ahead in range(0, width, 64):
                    fetch(elements, zeros(elements, 64), table, start + later * width + ahead)
                row = start + read32_at(ids + place * id_bytes) * width
                value = inner_product(elements, table, row, gradients(elements), grad, at, width)
                store(computed(elements), out, place, splat(zeros(elements, 1), value))
            begin = end


def copy_rows(elements, table, ids, id_bytes, runs, num_runs, width, first, stop, out, out_stride, streams):
    """The rows of the ids at the places `first` to `stop`.

    Args:
        runs: (num_runs, 2) int64: number of ids, place of their range's first row in the bank.
        out: rows `out_stride` apart.
        streams: see `sum_bags`.
    """
    begin = 0
    for run in range(num_runs):
        end, start = begin + read64(runs, 2 * run), read64(runs, 2 * run + 1)
        last = end - 1
        for place in range(max(begin, first), min(end, stop)):
            later = read32_at(ids + min(place + _AHEAD, last) * id_bytes)
            from_ = start + read32_at(ids + place * id_bytes) * width
            _copy_row(elements, width, (table, from_, start + later * width, out, place * out_stride, streams))
        begin = end
    if streams:
        fence()


@by_blocks
def _copy_row(elements, like, column, arguments):
    table, from_, later, out, to, streams = arguments
    fetch(elements, like, table, later + column)
    row = load(elements, like, table, from_ + column)
    if streams:
        stream(elements, out, to + column, row)
    else:
        store(elements, out, to + column, row)
