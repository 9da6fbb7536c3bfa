"""Which rectangles of a DTensor a rank holds.

[Note: strided shards] torch's `_StridedShard(dim, split_factor=n)` gives a rank its share of each of n equal parts of a
dim: several rectangles, which lie one behind the other in its local tensor. torch's distributed checkpoint takes every
local tensor for one rectangle, beginning where its first row does, and would write and read rows in others' places.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_Run = tuple[int, int]  # first index in the whole, and length


def strided(placement: Any) -> tuple[int, int] | None:
    """The dim, and its parts, of torch's `_StridedShard`, see [Note: strided shards]; None of a DTensor's others."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def rectangles_of(tensor: DTensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offset, values) of what this rank holds, views of its local tensor; none where it has nothing.

    Args:
        tensor: no sum of it is open.
    """
    local, mesh = tensor.to_local(), tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or not local.numel():
        return
    runs: list[list[_Run]] = [[(0, n)] for n in tensor.shape]
    for placement, size, at in zip(tensor.placements, mesh.shape, place, strict=True):
        if placement.is_replicate():
            continue
        dim, parts = strided(placement) or (placement.dim, 1)  # type: ignore[attr-defined]
        runs[dim] = _share(runs[dim], parts, size, at)
    starts = [_starts(each) for each in runs]
    for each in product(*(range(len(of_dim)) for of_dim in runs)):
        values = local
        for dim, i in enumerate(each):
            values = values.narrow(dim, starts[dim][i], runs[dim][i][1])
        yield tuple(runs[dim][i][0] for dim, i in enumerate(each)), values


ONE_RANKS = (
    "is another rank's part: torch.save on one rank writes that rank's parts alone. Each rank reads a file of its own, "
    "or all read what torch.save writes of full_state_dict(model); save_checkpoint is for any mesh and plan"
)


def is_of_another_rank(given: DTensor, own: DTensor) -> bool:
    """Whether a value was pickled on a rank that has other parts of it: it keeps that rank's place in the mesh, which
    torch compares nowhere."""
    there, here = given.device_mesh.get_coordinate() or (), own.device_mesh.get_coordinate() or ()
    split = [not placement.is_replicate() for placement in own.placements]
    return any(a != b and is_split for a, b, is_split in zip(there, here, split, strict=False))


def _starts(runs: list[_Run]) -> list[int]:
    """Where each begins in what they are put together to."""
    found, end = [], 0
    for _, length in runs:
        found.append(end)
        end += length
    return found


def _share(runs: list[_Run], parts: int, size: int, at: int) -> list[_Run]:
    """A rank's share of what was in `runs`: of each of the parts its block, as `torch.chunk` cuts."""
    total = sum(length for _, length in runs)
    found: list[_Run] = []
    for start, length in _blocks(total, parts):
        blocks = _blocks(length, size)
        if at < len(blocks):
            found += _within(runs, start + blocks[at][0], blocks[at][1])
    return found


def _blocks(total: int, count: int) -> list[_Run]:
    each = -(-total // count)
    return [(start, min(each, total - start)) for start in range(0, total, each)] if total else []


def _within(runs: list[_Run], start: int, length: int) -> Iterator[_Run]:
    """What of the runs lies in this interval of what they are put together to."""
    for (first, n), at in zip(runs, _starts(runs), strict=True):
        begin, end = max(start, at), min(start + length, at + n)
        if begin < end:
            yield first + begin - at, end - begin
