"""Columns of several matrices placed in one, and summed where they meet: one pass over the rows, compiled by numba.

Addresses are integers, elements are counted in those of the matrices.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import by_blocks, helper
from sharders.embedding.lookup.numba_vectors import (
    add,
    fence,
    load,
    multiply,
    read64,
    read_float64,
    splat,
    store,
    stream,
    zeros,
)


def place_columns(elements, runs, num_runs, sources, matrices, first, stop, scale, streams):
    """Write each run's columns: the sums of its sources', in their order, times `scale`.

    Args:
        runs: (num_runs, 6) int64: the first column in the target, columns from one of the run to the next, how many
            there are, their width, the first of its sources and the end.
        sources: (sources, 3) int64: number of the matrix, first column there, columns from one to the next.
        matrices: (matrices, 2) int64: address, elements from one row to the next; the first is the target.
        first, stop: rows.
        scale: address of a float64.
        streams: write past the caches, where blocks lie so that this can be.
    """
    factor = read_float64(scale, 0)
    out = read64(matrices, 0)
    for row in range(first, stop):
        to_row = row * read64(matrices, 1)
        for run in range(num_runs):
            to, step = to_row + read64(runs, 6 * run), read64(runs, 6 * run + 1)
            num, width = read64(runs, 6 * run + 2), read64(runs, 6 * run + 3)
            begin, end = read64(runs, 6 * run + 4), read64(runs, 6 * run + 5)
            matrix, from_, from_step = _source(sources, matrices, begin, row)
            if end == begin + 1:
                of_run = (matrix, from_, from_step, out, to, step, num, factor, streams)
                if width == 4:
                    _move_narrow(elements, zeros(elements, 4), of_run)
                elif width == 16:
                    _move_narrow(elements, zeros(elements, 16), of_run)
                elif width == 32:
                    _move_narrow(elements, zeros(elements, 32), of_run)
                elif width == 64:
                    _move_narrow(elements, zeros(elements, 64), of_run)
                else:
                    for i in range(num):
                        of_one = (matrix, from_ + i * from_step, out, to + i * step, factor, streams)
                        _move(elements, width, of_one)
            else:
                for i in range(num):
                    of_first = (matrix, from_ + i * from_step)
                    more = (sources, matrices, begin + 1, end, row, i)
                    _sum(elements, width, (of_first, more, out, to + i * step, factor, streams))
    if streams:
        fence()


@helper
def _source(sources, matrices, number, row):
    """Of a source its matrix's address, the place of its first column in a row, and how far the next is."""
    matrix = 2 * read64(sources, 3 * number)
    at = row * read64(matrices, matrix + 1) + read64(sources, 3 * number + 1)
    return read64(matrices, matrix), at, read64(sources, 3 * number + 2)


@helper
def _move_narrow(elements, like, of_run):
    """Runs of one block each: to find that out for each of them takes longer than to move it."""
    matrix, from_, from_step, out, to, step, num, factor, streams = of_run
    for i in range(num):
        value = multiply(load(elements, like, matrix, from_ + i * from_step), splat(like, factor))
        if streams:
            stream(elements, out, to + i * step, value)
        else:
            store(elements, out, to + i * step, value)


@by_blocks
def _move(elements, like, column, arguments):
    matrix, from_, out, to, factor, streams = arguments
    value = multiply(load(elements, like, matrix, from_ + column), splat(like, factor))
    if streams:
        stream(elements, out, to + column, value)
    else:
        store(elements, out, to + column, value)


@by_blocks
def _sum(elements, like, column, arguments):
    (matrix, from_), (sources, matrices, number, end, row, i), out, to, factor, streams = arguments
    summed = load(elements, like, matrix, from_ + column)
    while number < end:
        matrix, from_, step = _source(sources, matrices, number, row)
        summed = add(summed, load(elements, like, matrix, from_ + i * step + column))
        number += 1
    summed = multiply(summed, splat(like, factor))
    if streams:
        stream(elements, out, to + column, summed)
    else:
        store(elements, out, to + column, summed)
