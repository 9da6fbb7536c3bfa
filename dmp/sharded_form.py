"""A `ChunkedTensor` read as torch's `ShardedTensor`: its local shards, and what is known of all of them.

The dataclasses are torch's own, which code that reads a ShardedTensor knows; they are imported when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Located(Protocol):
    """A rectangle of the whole, and the table rank that has it; a `dmp.Shard` is one. Further dims do not count."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...


def local_shards(
    chunks: Sequence[torch.Tensor], offsets: Sequence[Sequence[int]], places: Sequence[Located] | None
) -> list[Any]:
    """torch's `Shard(tensor, metadata)` of each chunk; the tensors are the chunks.

    Args:
        places: of all shards, where they are known; else the rank is this process's.
    """
    from torch.distributed._shard.sharded_tensor.shard import Shard

    dims = len(offsets[0]) if offsets else 0
    ranks = {(p.offsets[:dims], p.sizes[:dims]): p.rank for p in places or ()}
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    shards = []
    for chunk, offset in zip(chunks, offsets, strict=True):
        rank = ranks.get((tuple(offset), tuple(chunk.shape)), own)
        shards.append(Shard(chunk, _metadata(offset, chunk.shape, rank, chunk.device)))
    return shards


def metadata(size: Sequence[int], dtype: torch.dtype, device: torch.device, places: Sequence[Located]) -> Any:
    """torch's `ShardedTensorMetadata` of the whole."""
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    dims = len(size)
    return ShardedTensorMetadata(
        shards_metadata=[_metadata(p.offsets[:dims], p.sizes[:dims], p.rank, device) for p in places],
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=dtype),
    )


def _metadata(offsets: Sequence[int], sizes: Sequence[int], rank: int, device: torch.device) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata

    where = f"rank:{rank}/{device}"
    return ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(sizes), placement=where)
