"""Checks of a batch before any exchange: cheap on the good path, a search for the culprit only when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from sharders.embedding.batch import Batch, Ids
from sharders.embedding.input_faults import Fault, Kind, dtype_index

INTEGERS = (torch.int32, torch.int64)


def check_batch(ids: Ids, rows: Sequence[int] | None) -> Batch:
    """Count the ids of each key and check them: lengths, weights, and by a pass over them the ids.

    Args:
        rows: for each feature the rows of its table; None to leave out the pass over the ids.

    Raises:
        Fault: the first thing that is wrong.
    """
    if ids.values.dtype not in INTEGERS:
        raise Fault(Kind.ID_DTYPE, value=dtype_index(ids.values.dtype))
    # One read for all: each waits for the device.
    num_keys, count = ids.lengths.shape[0], ids.values.numel()
    extremes = ids.lengths.aminmax() if ids.lengths.numel() else ()
    words: list[int] = torch.hstack([ids.lengths.sum(1), *extremes]).tolist()
    counts = tuple(words[:num_keys])
    if any(not 0 <= length <= count for length in words[num_keys:]):  # so no sum of them has wrapped around
        _raise_length(ids)
    if sum(counts) != count:
        raise Fault(Kind.LENGTH_SUM, value=sum(counts), expected=count)
    if ids.weights is not None:
        if ids.weights.numel() != count:
            raise Fault(Kind.WEIGHTS_LENGTH, value=ids.weights.numel(), expected=count)
        if not ids.weights.is_floating_point():
            raise Fault(Kind.WEIGHTS_DTYPE, value=dtype_index(ids.weights.dtype))
    batch = Batch(**vars(ids), counts=counts)
    if rows is not None:
        _check_ids(batch, rows)
    return batch


def _raise_length(ids: Ids) -> NoReturn:
    count = ids.values.numel()
    wrong = (ids.lengths < 0) | (ids.lengths > count)
    key = int(wrong.any(1).nonzero()[0])
    feature = next((f for f, k in enumerate(ids.key_of) if k == key), -1)
    value = int(ids.lengths[key][wrong[key]][0])
    raise Fault(Kind.LENGTH_NEGATIVE if value < 0 else Kind.LENGTH_LARGE, feature, value, count)


def _check_ids(batch: Batch, rows: Sequence[int]) -> None:
    """One pass and one read; those of keys that no feature reads may be anything."""
    keys = [key for key in dict.fromkeys(batch.key_of) if batch.counts[key]]
    if not keys:
        return
    parts = batch.values.split(batch.counts)
    ranges = torch.stack([extreme for key in keys for extreme in parts[key].aminmax()]).view(-1, 2).tolist()
    of_key = dict(zip(keys, ranges, strict=True))
    for f, key in enumerate(batch.key_of):
        low, high = of_key.get(key, (0, -1))
        if low < 0 or high >= rows[f]:
            wrong = parts[key][(parts[key] < 0) | (parts[key] >= rows[f])]
            raise Fault(Kind.ID_RANGE, f, int(wrong[0]), rows[f])
