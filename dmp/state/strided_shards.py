"""torch's distributed checkpoint of strided shards: told where they are, see [Note: strided shards].

So `dcp.save` of a model's or an optimizer's state dict, in which such weights are DTensors, writes what is there, and
`dcp.load` puts it where it belongs, whatever mesh it was saved on. Other DTensors are left to torch.
"""

from __future__ import annotations

import functools
from typing import Any

from dmp.chunked import ChunkedTensor, as_chunks
from dmp.dtensor_pieces import strided


def _rectangles(tensor: Any) -> ChunkedTensor | None:
    """What this rank holds of a DTensor, where that is more than one rectangle."""
    if not any(map(strided, tensor.placements)) or any(p.is_partial() for p in tensor.placements):
        return None
    chunks = as_chunks(tensor)
    return chunks if len(chunks.chunks) > 1 else None


def know_strided_shards(package: Any) -> None:
    """Have DTensors answer torch's checkpoint with all their rectangles.

    Args:
        package: `torch.distributed.tensor`.
    """
    dtensor = package.DTensor
    write, read, shard = dtensor.__create_write_items__, dtensor.__create_chunk_list__, dtensor.__get_tensor_shard__

    @functools.wraps(write)
    def create_write_items(self: Any, fqn: str, object: Any) -> list[Any]:
        chunks = _rectangles(self)
        own: list[Any] = write(self, fqn, object) if chunks is None else chunks.__create_write_items__(fqn, object)
        return own

    @functools.wraps(read)
    def create_chunk_list(self: Any) -> list[Any]:
        chunks = _rectangles(self)
        own: list[Any] = read(self) if chunks is None else chunks.__create_chunk_list__()
        return own

    @functools.wraps(shard)
    def get_tensor_shard(self: Any, index: Any) -> Any:
        chunks = _rectangles(self)
        if chunks is None:
            return shard(self, index)
        return dict(chunks.pieces())[tuple(index.offset)]  # views, for they are written to

    dtensor.__create_write_items__ = create_write_items
    dtensor.__create_chunk_list__ = create_chunk_list
    dtensor.__get_tensor_shard__ = get_tensor_shard
