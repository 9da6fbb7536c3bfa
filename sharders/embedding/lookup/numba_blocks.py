"""Ids sorted by row block, compiled by numba: which block of its table each lies in, keeping the order inside a block;
and ids counted.

Addresses are integers. Arrays are int32 where nothing else is said.
"""

from __future__ import annotations

from sharders.embedding.lookup.numba_compile import helper
from sharders.embedding.lookup.numba_vectors import counted, read32, read32_at, read64, write32, write64


def split_by_blocks(values, lengths, num_features, num_samples, bounds, num_blocks, out, out_lengths, places, starts):
    """Ids by (feature, sample) to ids by (block, feature, sample).

    Args:
        values: ids, in range.
        lengths: (num_features, num_samples).
        bounds: (num_features, num_blocks + 1) int64: where each block begins, and the end.
        out: written: the ids, counted from where their block begins.
        out_lengths: (num_blocks, num_features, num_samples), written.
        places: int64, written if it is not 0: where each id is now.
        starts: memory for num_blocks * num_features int64.
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
        first = stop


@helper
def _block_of(value, bounds, num_blocks):
    """By comparing with each: there are few."""
    block = 0
    for i in range(1, num_blocks):
        block += value >= read64(bounds, i)
    return block


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
