"""Partials placed in results where they belong and added up there, and gradients picked for them, compiled by numba.

Addresses are integers, elements are counted in those of what they point to. A *slot* is a row block of a feature: its
partials lie one after the other, one for each sample that has an id there; or they are rows of a table here, one for
each id. A *piece* is the columns of a result that
all slots have that have one of them.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import by_blocks, helper
from sharders.embedding.lookup.numba_vectors import (
    add,
    fence,
    fetch,
    load,
    multiply,
    read32_at,
    read64,
    read_float64,
    splat,
    store,
    stream,
    write64,
    zeros,
)

_AHEAD = 8  # partials of a slot


def add_partials(
    elements, partials, lengths, length_bytes, samples, slots, num_slots, pieces, num_pieces, entries,
    out, out_stride, first, stop, past
):  # fmt: skip
    """Write results: of each piece the sum of a sample's partials, in the order of its slots.

    Args:
        lengths: (num_slots, samples) of bags.
        slots: (num_slots, 6) int64: width, place of the first partial of these samples, how far the next one is from
            it, memory for a word, and -1; or, of partials that are rows of a table, address and bytes of these samples'
            ids, likewise, place of the first row, and address of the last id.
        pieces: (num_pieces, 4) int64: the first column in a result, width, the first of its entries and the end.
        entries: (entries, 2) int64: a slot that has the piece, and the first column in its partials.
        first, stop: samples.
        past: write past the caches, where blocks lie so that this can be.
    """
    for sample in range(first, stop):
        for slot in range(num_slots):
            width, at, step = read64(slots, 6 * slot), read64(slots, 6 * slot + 1), read64(slots, 6 * slot + 2)
            has, table = _has_ids(lengths, length_bytes, slot * samples + sample), read64(slots, 6 * slot + 4)
            found, later = at, at + _AHEAD * width
            if table >= 0 and has:
                found = table + read32_at(at) * width
                later = table + read32_at(min(at + _AHEAD * step, read64(slots, 6 * slot + 5))) * width
            if table < 0 or has:
                for column in range(0, width, 16):  # most of them are in another core's cache, or in none
                    fetch(elements, zeros(elements, 16), partials, later + column)
            write64(slots, 6 * slot + 1, at + has * step)
            write64(slots, 6 * slot + 3, found if has else -1)
        for piece in range(num_pieces):
            to = sample * out_stride + read64(pieces, 4 * piece)
            of_piece = (entries, read64(pieces, 4 * piece + 2), read64(pieces, 4 * piece + 3))
            _add_up(elements, read64(pieces, 4 * piece + 1), (partials, slots, of_piece, out, to, past))
    if past:
        fence()


@by_blocks
def _add_up(elements, like, column, arguments):
    partials, slots, (entries, first, stop), out, to, past = arguments
    summed = like
    for entry in range(first, stop):
        at = read64(slots, 6 * read64(entries, 2 * entry) + 3)
        if at >= 0:
            summed = add(summed, load(elements, like, partials, at + read64(entries, 2 * entry + 1) + column))
    if past:
        stream(elements, out, to + column, summed)
    else:
        store(elements, out, to + column, summed)


def pick_gradients(
    elements, gradient, stride, lengths, length_bytes, samples, slots, num_slots, out, first, stop, scale, past
):  # fmt: skip
    """Write the gradients of partials, times `scale`.

    Args:
        gradient: of results, whose rows are `stride` apart.
        lengths: (any, samples) of bags.
        slots: (num_slots, 4) int64: the row of its lengths, width, the first column in a result, and the place in `out`
            of what is picked first.
        scale: address of a float64.
        past: write past the caches, where blocks lie so that this can be.
    """
    factor = read_float64(scale, 0)
    for sample in range(first, stop):
        for slot in range(num_slots):
            if _has_ids(lengths, length_bytes, read64(slots, 4 * slot) * samples + sample):
                width, to = read64(slots, 4 * slot + 1), read64(slots, 4 * slot + 3)
                at = sample * stride + read64(slots, 4 * slot + 2)
                _pick(elements, width, (gradient, at, out, to, factor, past))
                write64(slots, 4 * slot + 3, to + width)
    if past:
        fence()


@by_blocks
def _pick(elements, like, column, arguments):
    gradient, at, out, to, factor, past = arguments
    value = multiply(load(elements, like, gradient, at + column), splat(like, factor))
    if past:
        stream(elements, out, to + column, value)
    else:
        store(elements, out, to + column, value)


@helper
def _has_ids(lengths, length_bytes, bag):
    return read32_at(lengths + bag * length_bytes) > 0
