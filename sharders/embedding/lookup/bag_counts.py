"""How many ids bags have, and how many have some: row by row of their lengths, read back at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharders.embedding.lookup.numba_layout import longs, words
from sharders.embedding.lookup.numba_training import entry_of


def bag_counts(of_all: Sequence[Tensor], compiles: bool) -> list[tuple[list[int], list[int]]]:
    """Of each matrix of lengths, contiguous and on the CPU where `compiles`, the ids of its rows, and their bags with
    some.

    Args:
        of_all: of the same number of rows each.
        compiles: by what numba compiles; torch's operators take three times as long for few bags.
    """
    if not compiles:
        found = [torch.stack([lengths.sum(1), (lengths > 0).sum(1)]) for lengths in of_all]
        return [(ids, bags) for ids, bags in torch.stack(found).tolist()]
    result = []
    for lengths in of_all:
        rows, samples = lengths.shape
        counts, at = longs(bytes(16 * rows))
        entry_of("count_bags")(*words(lengths), rows, samples, at)
        flat = counts.tolist()
        result.append((flat[:rows], flat[rows:]))
    return result
