"""A batch size for each feature: lengths padded to one, and results given to the samples.

[Note: variable batch]
In such a batch each key has *rows* of its own: what several samples share stands there once. *Inverse indices* (F, B)
say for each feature and sample which row is the sample's. Lengths are padded to the most rows of any key that is read,
so that all is computed as with one batch size; padding of results and gradients does not travel, see ragged.py. The
results' rows are then given to the samples; autograd sums the gradients of samples that share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sharders.embedding.batches.batch import Batch


def padded(
    lengths: torch.Tensor, rows: Sequence[int], key_of: Sequence[int]
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Lengths with one number of rows for all keys.

    Args:
        lengths: (sum of rows,), key-major.
        rows: of each key.
        key_of: the keys that are read; the lengths of another become one.

    Returns:
        (K, most rows of a key that is read), and the rows of each key, or None where those read have equal ones.
    """
    num_keys, read = len(rows), {*key_of}
    if len({*rows}) == 1:
        return lengths.view(num_keys, -1), None
    width = max(1, *(rows[key] for key in read))  # 1 for the keys that are not read, where the others have no rows
    firsts = [*accumulate(rows, initial=0)]
    is_read = [int(key in read) for key in range(num_keys)]
    shifts = [key * width - firsts[key] * is_read[key] for key in range(num_keys)]
    told = torch.tensor([rows, is_read, shifts]).to(lengths.device)
    of_rows = told[1:].repeat_interleave(told[0], dim=1, output_size=lengths.numel())
    place = torch.arange(lengths.numel(), device=lengths.device).mul_(of_rows[0]).add_(of_rows[1])
    result = lengths.new_zeros(num_keys * width).index_add_(0, place, lengths).view(num_keys, width)
    return result, None if all(rows[key] == width for key in read) else tuple(rows)


def lengths_of(batch: Batch, key: int) -> torch.Tensor:
    """Those of a key's own rows."""
    lengths = batch.lengths[key]
    return lengths if batch.samples is None else lengths[: batch.samples[key]]


def to_samples(values: torch.Tensor, batch: Batch, dims: Sequence[int]) -> torch.Tensor:
    """(B, sum of dims): to each sample its rows.

    Args:
        values: (rows, sum of dims).
        dims: of the features.
    """
    if batch.inverse is not None:
        of_features = zip(values.split(list(dims), 1), batch.inverse.to(values.device).unbind(), strict=True)
        return torch.cat([of_feature.index_select(0, rows) for of_feature, rows in of_features], 1)
    return values if batch.samples is None else values[: batch.samples[batch.key_of[0]]]
