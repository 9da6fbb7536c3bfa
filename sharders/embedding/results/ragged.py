"""Rows of a lookup whose features have batch sizes of their own: without their padding on the wire.

See [Note: variable batch] of variable_batch.py. Where it is computed a rank's *block* of a lookup has as many rows for
each feature as its largest; what travels is each feature's own rows, feature by feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Columns = tuple[int, int, int]  # feature, first column, width
Block = tuple[int, ...]  # rows of each feature; the largest are the block's


def ragged_size(columns: Sequence[Columns], blocks: Sequence[Block]) -> int:
    """Elements that travel of these columns."""
    return sum(block[feature] * width for block in blocks for feature, _, width in columns)


def ragged(lookup: torch.Tensor, columns: Sequence[Columns], blocks: Sequence[Block]) -> torch.Tensor:
    """(elements,) what travels of a lookup (rows of all blocks, width of all columns)."""
    parts = [part.reshape(-1) for part, _ in _parts(lookup, columns, blocks)]
    return torch.cat(parts) if parts else lookup.new_empty(0)


def padded_rows(flat: torch.Tensor, columns: Sequence[Columns], blocks: Sequence[Block]) -> torch.Tensor:
    """Inverse of `ragged`; zero where a feature has no rows."""
    lookup = flat.new_empty(sum(map(max, blocks)), sum(width for _, _, width in columns))
    at = 0
    for part, padding in _parts(lookup, columns, blocks):
        part.copy_(flat[at : at + part.numel()].view(part.shape))
        padding.zero_()
        at += part.numel()
    return lookup


def _parts(
    lookup: torch.Tensor, columns: Sequence[Columns], blocks: Sequence[Block]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of each block's rows of each feature, and of the padding under them; neighbours with as many together."""
    first_row = 0
    for block in blocks:
        start = stop = 0
        for i, (feature, _, width) in enumerate(columns):
            stop += width
            if i + 1 == len(columns) or block[columns[i + 1][0]] != block[feature]:
                of_block = lookup[first_row : first_row + max(block), start:stop]
                yield of_block[: block[feature]], of_block[block[feature] :]
                start = stop
        first_row += max(block)
