"""Checks of a batch before any exchange: cheap on the good path, a search for the culprit only when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NoReturn

import torch

from sharders.embedding.batches.batch import Batch, Ids
from sharders.embedding.batches.input_faults import Fault, Kind, dtype_index
from sharders.embedding.lookup.numba_layout import longs
from sharders.embedding.lookup.numba_training import entry_of

INTEGERS = (torch.int32, torch.int64)
_FEW_IDS = 1 << 14  # that are looked at all together: each key by itself takes some microseconds


def check_batch(ids: Ids, rows: Sequence[int], is_strict: bool, compiles: bool = False) -> Batch:
    """Count the ids of each key and check them: lengths, weights, and by a pass over them the ids.

    No kernel looks at ids again: whatever comes out of here addresses rows of its own table.

    Args:
        rows: for each feature the rows of its table.
        is_strict: an id outside is a fault; else it becomes the nearest row of the smallest table that reads its key.
        compiles: on the CPU, by what numba compiles, in one call: torch's operators take 90 microseconds longer.

    Raises:
        Fault: the first thing that is wrong; not strict, of ids only one for a table without rows.
    """
    if ids.values.dtype not in INTEGERS:
        raise Fault(Kind.ID_DTYPE, value=dtype_index(ids.values.dtype))
    dims = [of.dim() for of in (ids.values, ids.weights) if of is not None]
    if dims != [1] * len(dims):
        raise Fault(Kind.ID_DIMS, value=max(dims))
    num_keys, count = ids.lengths.shape[0], ids.values.numel()
    compiles = compiles and ids.lengths.numel() > 0 and all(map(_is_read_by_address, (ids.values, ids.lengths)))
    if compiles:
        words, is_outside = _looked_through(ids, rows)
    else:
        words, is_outside = _counted(ids, rows if is_strict and _is_waited_for(ids.values.device) else None)
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
    shortest, longest = words[num_keys:] or (0, 0)
    batch = Batch(**vars(ids), counts=counts, shortest=shortest, longest=longest)
    # Not strict, elsewhere than on the CPU, ids are moved without a look, for which the device would be waited for.
    looks = is_outside and (is_strict or not _is_waited_for(batch.values.device))
    outside = _outside(batch, rows) if looks else 0 if is_outside else None
    if outside is None:
        return batch
    return _raise_id(batch, rows, outside) if is_strict else _moved_inside(batch, rows)


def _is_waited_for(device: torch.device) -> bool:
    return device.type != "cpu"


def _counted(ids: Ids, rows: Sequence[int] | None) -> tuple[list[int], bool]:
    """Of each key its ids, then the smallest length and the largest; and, given `rows`, whether an id may be outside
    its table: one read, for each waits for the device."""
    counts = ids.lengths.sum(1)
    extremes = ids.lengths.aminmax() if ids.lengths.numel() else ()
    looks = rows is not None and ids.values.numel() > 0 and ids.lengths.numel() > 0
    looked = [_may_be_outside(ids, rows or (), counts).to(counts.dtype)] if looks else []
    words: list[int] = torch.hstack([counts, *extremes, *looked]).tolist()
    return (words[:-1], bool(words[-1])) if looked else (words, rows is None)


def _may_be_outside(ids: Ids, rows: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
    """Whether there is an id outside, of keys that are read; of lengths that nobody has looked at yet, and where these
    are wrong anything."""
    values, given = ids.values, (len(counts), ids.key_of, tuple(rows), ids.values.dtype, ids.values.device)
    places = torch.arange(values.numel(), device=values.device)
    key = torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(counts) - 1)
    limits, least = _smallest_rows(*given), _least_ids(*given)
    return ((values < least[key]) | (values >= limits[key])).any()


def _looked_through(ids: Ids, rows: Sequence[int]) -> tuple[list[int], bool]:
    """The same by compiled code, and whether an id is outside its table."""
    num_keys, samples = ids.lengths.shape
    limits = _smallest_rows(num_keys, ids.key_of, tuple(rows), torch.int64, ids.values.device)
    made, at = longs(bytes(8 * num_keys + 16))
    of_lengths = ids.lengths.data_ptr(), ids.lengths.itemsize, num_keys, samples
    of_ids = ids.values.data_ptr(), ids.values.itemsize, ids.values.numel()
    is_outside = entry_of("check_ids")(*of_ids, *of_lengths, limits.data_ptr(), at)
    return made.tolist(), bool(is_outside)


def _is_read_by_address(integers: torch.Tensor) -> bool:
    return integers.device.type == "cpu" and integers.dtype in INTEGERS and integers.is_contiguous()


def _raise_length(ids: Ids) -> NoReturn:
    count = ids.values.numel()
    wrong = (ids.lengths < 0) | (ids.lengths > count)
    key = int(wrong.any(1).nonzero()[0])
    feature = next((f for f, k in enumerate(ids.key_of) if k == key), -1)
    value = int(ids.lengths[key][wrong[key]][0])
    raise Fault(Kind.LENGTH_NEGATIVE if value < 0 else Kind.LENGTH_LARGE, feature, value, count)


def _outside(batch: Batch, rows: Sequence[int]) -> int | None:
    """The first feature with an id outside its table; one pass and one read. Those of unread keys may be anything."""
    values, counts = batch.values, batch.counts
    keys = [key for key in dict.fromkeys(batch.key_of) if counts[key]]
    if not keys:
        return None
    if len(set(counts)) == 1:
        of_key = dict(enumerate(torch.stack(values.view(len(counts), -1).aminmax(dim=1), 1).tolist()))
    elif values.numel() <= _FEW_IDS and len(keys) == len(counts) and not _is_any_outside(batch, rows):
        return None
    else:
        parts = values.split(counts)
        ranges = torch.stack([extreme for key in keys for extreme in parts[key].aminmax()]).view(-1, 2).tolist()
        of_key = dict(zip(keys, ranges, strict=True))
    for f, key in enumerate(batch.key_of):
        low, high = of_key.get(key, (0, -1))
        if low < 0 or high >= rows[f]:
            return f
    return None


def _is_any_outside(batch: Batch, rows: Sequence[int]) -> bool:
    """Whether there is any, of a batch whose keys are all read."""
    values = batch.values
    limits = _smallest_rows(len(batch.counts), batch.key_of, tuple(rows), values.dtype, values.device)
    limit_of_id = limits.repeat_interleave(batch.lengths.sum(1), output_size=values.numel())
    return bool(((values < 0) | (values >= limit_of_id)).any())


@lru_cache(maxsize=64)
def _smallest_rows(
    num_keys: int, key_of: tuple[int, ...], rows: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(K,) rows of the smallest table that reads each key, as many as there can be where none does."""
    smallest = [torch.iinfo(dtype).max] * num_keys
    for key, of_feature in zip(key_of, rows, strict=True):
        smallest[key] = min(smallest[key], of_feature)
    return torch.tensor(smallest, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _least_ids(
    num_keys: int, key_of: tuple[int, ...], rows: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(K,) zero for keys that are read, the least number that there is for others."""
    least = [0 if key in key_of else torch.iinfo(dtype).min for key in range(num_keys)]
    return torch.tensor(least, dtype=dtype, device=device)


def _raise_id(batch: Batch, rows: Sequence[int], feature: int) -> NoReturn:
    ids = batch.values.split(batch.counts)[batch.key_of[feature]]
    raise Fault(Kind.ID_RANGE, feature, int(ids[(ids < 0) | (ids >= rows[feature])][0]), rows[feature])


def _moved_inside(batch: Batch, rows: Sequence[int]) -> Batch:
    ids = list(batch.values.split(batch.counts))
    for f, key in enumerate(batch.key_of):
        if batch.counts[key] and not rows[f]:
            _raise_id(batch, rows, f)
        ids[key] = ids[key].clamp(0, max(rows[f] - 1, 0))
    return replace(batch, values=torch.cat(ids))
