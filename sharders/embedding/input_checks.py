"""Checks of a batch before any exchange: cheap on the good path, a search for the culprit only when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sharders.embedding.input_dist import Batch
from sharders.embedding.input_faults import Fault, Kind, dtype_index


def check_batch(batch: Batch, rows: Sequence[int]) -> None:
    """Check ids, lengths and weights.

    Args:
        rows: for each feature the rows of its table.

    Raises:
        Fault: the first thing that is wrong.
    """
    if batch.values.dtype not in (torch.int32, torch.int64):
        raise Fault(Kind.ID_DTYPE, value=dtype_index(batch.values.dtype))
    check_lengths(batch)
    total = sum(batch.counts)
    if total != batch.values.numel():
        raise Fault(Kind.LENGTH_SUM, value=total, expected=batch.values.numel())
    if batch.weights is not None:
        if batch.weights.numel() != batch.values.numel():
            raise Fault(Kind.WEIGHTS_LENGTH, value=batch.weights.numel(), expected=batch.values.numel())
        if not batch.weights.is_floating_point():
            raise Fault(Kind.WEIGHTS_DTYPE, value=dtype_index(batch.weights.dtype))
    _check_ids(batch, rows)


def check_lengths(batch: Batch) -> None:
    """Each is between 0 and the number of ids, so that no sum of them wraps around.

    Raises:
        Fault: one is not.
    """
    if not batch.lengths.numel():
        return
    low, high = batch.lengths.aminmax()
    count = batch.values.numel()
    if int(low) >= 0 and int(high) <= count:
        return
    wrong = (batch.lengths < 0) | (batch.lengths > count)
    key = int(wrong.any(1).nonzero()[0])
    feature = next((f for f, k in enumerate(batch.key_of) if k == key), -1)
    value = int(batch.lengths[key][wrong[key]][0])
    raise Fault(Kind.LENGTH_NEGATIVE if value < 0 else Kind.LENGTH_LARGE, feature, value, count)


def _check_ids(batch: Batch, rows: Sequence[int]) -> None:
    """One pass over all ids; those of keys that no feature reads may be anything."""
    if not batch.values.numel():
        return
    limits: list[int | None] = [None] * len(batch.counts)
    for f, key in enumerate(batch.key_of):
        known = limits[key]
        limits[key] = rows[f] if known is None else min(known, rows[f])
    low, high = batch.values.aminmax()
    if int(low) >= 0 and int(high) < min((n for n in limits if n is not None), default=0):
        return
    is_good = all(
        int(part.min()) >= 0 and int(part.max()) < limit
        for part, limit in zip(batch.values.split(batch.counts), limits, strict=True)
        if limit is not None and part.numel()
    )
    if is_good:
        return
    starts = [0, *accumulate(batch.counts)]
    for f, key in enumerate(batch.key_of):
        ids = batch.values[starts[key] : starts[key + 1]]
        wrong = ids[(ids < 0) | (ids >= rows[f])]
        if wrong.numel():
            raise Fault(Kind.ID_RANGE, f, int(wrong[0]), rows[f])
