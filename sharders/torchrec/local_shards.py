"""What this rank holds of TorchRec's sharded state, in any of its forms, as rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmp import ChunkedTensor, Shard, ShardError, is_dtensor


def chunks_of(
    name: str, value: Any, size: Sequence[int], shards: Sequence[Shard], rank: int, like: torch.Tensor
) -> ChunkedTensor:
    """This rank's chunks of a parameter that is cut, as views.

    Args:
        name: of the parameter, for messages.
        value: under that name in their state dict: a `ShardedTensor`, a DTensor around their `LocalShardsWrapper`, or a
            tensor; None where a rank without a shard has none.
        size: of the unsharded parameter.
        shards: the plan's.
        rank: this one among the table ranks.
        like: a tensor of the parameter's dtype and device.

    Raises:
        ShardError: other rectangles than the plan's.
    """
    mine = [s for s in shards if s.rank == rank]
    found = _shards_in(value, tuple(size), mine)
    expected = sorted((s.offsets, s.sizes) for s in mine)
    came = sorted((at, tuple(shard.shape)) for at, shard in found)
    if came != expected:
        raise ShardError(f"{name!r}: the plan gives this rank {expected}; TorchRec's module holds {came}")
    return ChunkedTensor(size, [s for _, s in found], [at for at, _ in found], like.dtype, like.device, shards)


def _shards_in(value: Any, size: tuple[int, ...], mine: Sequence[Shard]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets, values) of each."""
    if value is None:
        return []
    if hasattr(value, "local_shards"):  # a ShardedTensor
        return [(tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()]
    if isinstance(value, torch.Tensor) and is_dtensor(value):
        local: Any = value.to_local()
        if hasattr(local, "local_shards"):
            return list(zip(map(tuple, local.local_offsets()), local.local_shards(), strict=True))
        return [(tuple(box.offsets), local) for box in value.__create_chunk_list__() if local.numel()]
    if not value.numel():
        return []
    # A plain tensor of the shape of what the plan gives this rank.
    return [(mine[0].offsets, value.detach())] if len(mine) == 1 else [((-1,) * len(size), value)]
