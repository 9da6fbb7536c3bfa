"""Ids sorted by row block, compiled by numba: which block of its table each lies in, keeping the order inside a block;
and ids counted and checked.

Addresses are integers. Arrays are int32 where nothing else is said.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import helper
from sharders.embedding.lookup.numba_vectors import counted, read32, read32_at, read64, write32, write64

_ANYTHING = (1 << 63) - 1


def split_by_blocks(
    values, lengths, num_features, num_samples, bounds, num_blocks, out, out_lengths, places, starts, shifts, rows
):  # fmt: skip
    """Ids by (feature, sample) to ids by (block, feature, sample).

    Args:
        values: ids, in range.
        lengths: (num_features, num_samples).
        bounds: (num_features, num_blocks + 1) int64: where each block begins, and the end.
        out: written: the ids, counted from where their block begins.
        out_lengths: (num_blocks, num_features, num_samples), written.
        places: int64, written if it is not 0: where each id is now.
        starts: memory for num_blocks * num_features int64.
        shifts: of each feature, int64.
        rows: written if it is not 0: of each id where it was, and its feature's shift, in the ids' new order.
    """
    first, of_block = 0, num_features * num_samples
    for feature in range(num_features):
        its_bounds = bounds + 8 * feature * (num_blocks + 1)
        for sample in range(feature * num_samples, (feature + 1) * num_samples):
            for block in range(num_blocks):
                write32(out_lengths, block * of_block + sample, 0)
            stop = first + read32(lengths, sample)
            while first < stop:
                at = _block_of(read32(values, first), its_bounds, num_blocks) * of_block + sample
                write32(out_lengths, at, read32(out_lengths, at) + 1)
                first = counted(first + 1)
    to = 0
    for segment in range(num_blocks * num_features):
        write64(starts, segment, to)
        for sample in range(segment * num_samples, (segment + 1) * num_samples):
            to += read32(out_lengths, sample)
    first = 0
    for feature in range(num_features):
        its_bounds = bounds + 8 * feature * (num_blocks + 1)
        stop = first
        for sample in range(feature * num_samples, (feature + 1) * num_samples):
            stop += read32(lengths, sample)
        for place in range(first, stop):
            value = read32(values, place)
            block = _block_of(value, its_bounds, num_blocks)
            segment = block * num_features + feature
            to = read64(starts, segment)
            write64(starts, segment, to + 1)
            write32(out, to, value - read64(its_bounds, block))
            if places != 0:
                write64(places, place, to)
            if rows != 0:
                write32(rows, to, place + read64(shifts, feature))
        first = stop


@helper
def read_integer(integers, place, num_bytes):
    """Of int32 or int64."""
    return read32(integers, place) if num_bytes == 4 else read64(integers, place)


@helper
def _block_of(value, bounds, num_blocks):
    """By comparing with each: there are few."""
    block = 0
    for i in range(1, num_blocks):
        block += value >= read64(bounds, i)
    return block


def by_slot(sources, num_sources, num_slots, chosen, ids, bounds, weights):
    """What several sources have sent, source by source and there slot by slot, to slot by slot and source by source.

    Args:
        sources: (num_sources, 5) int64: address of lengths (num_slots, samples), samples, address of the ids, of their
            weights, memory for a word.
        chosen: (num_slots,) int64: slots that are 0 are left out.
        ids: written.
        bounds: written: of the bags among these, from 0 to the end.
        weights: written if it is not 0.
    """
    to = bag = 0
    write32(bounds, 0, 0)
    for source in range(num_sources):
        write64(sources, 5 * source + 4, 0)
    for slot in range(num_slots):
        is_chosen = read64(chosen, slot) != 0
        for source in range(num_sources):
            lengths, samples = read64(sources, 5 * source), read64(sources, 5 * source + 1)
            first = last = read64(sources, 5 * source + 4)
            shift = to - first
            for sample in range(slot * samples, (slot + 1) * samples):
                last += read32(lengths, sample)
                if is_chosen:
                    bag += 1
                    write32(bounds, bag, shift + last)
            write64(sources, 5 * source + 4, last)
            if is_chosen:
                from_ids, from_weights = read64(sources, 5 * source + 2), read64(sources, 5 * source + 3)
                for place in range(first, last):
                    write32(ids, shift + place, read32(from_ids, place))
                for place in range(first, last if weights != 0 else first):
                    write32(weights, shift + place, read32(from_weights, place))
                to = shift + last


def count_bags(lengths, length_bytes, num_rows, num_samples, counts):
    """Write int64: the ids of each row of lengths, then of each the bags that have some.

    Args:
        lengths: (num_rows, num_samples).
    """
    for row in range(num_rows):
        ids = filled = 0
        for bag in range(row * num_samples, (row + 1) * num_samples):
            length = read32_at(lengths + bag * length_bytes)
            ids += length
            filled += length > 0
        write64(counts, row, ids)
        write64(counts, num_rows + row, filled)


def check_ids(values, value_bytes, num_values, lengths, length_bytes, num_keys, num_samples, limits, words):
    """Whether an id lies outside its key's limit; 0 too where lengths do not fit, which `words` show.

    Args:
        values: (num_values,) int32 or int64, key by key.
        lengths: (num_keys, num_samples), likewise.
        limits: (num_keys,) int64: ids are less, and none is negative; the largest of all where they may be anything.
        words: (num_keys + 2,) int64, written: the ids of each key, the smallest length and the largest.
    """
    shortest = longest = read_integer(lengths, 0, length_bytes)
    total = 0
    for key in range(num_keys):
        count = 0
        for bag in range(key * num_samples, (key + 1) * num_samples):
            length = read_integer(lengths, bag, length_bytes)
            count += length
            shortest, longest = min(shortest, length), max(longest, length)
        write64(words, key, count)
        total += count
    write64(words, num_keys, shortest)
    write64(words, num_keys + 1, longest)
    if shortest < 0 or longest > num_values or total != num_values:
        return 0
    first = 0
    for key in range(num_keys):
        stop, limit = first + read64(words, key), read64(limits, key)
        if limit != _ANYTHING and first < stop:
            least = most = read_integer(values, first, value_bytes)
            if value_bytes == 4:
                for place in range(first, stop):
                    least, most = min(least, read32(values, place)), max(most, read32(values, place))
            else:
                for place in range(first, stop):
                    least, most = min(least, read64(values, place)), max(most, read64(values, place))
            if least < 0 or most >= limit:
                return 1
        first = stop
    return 0
