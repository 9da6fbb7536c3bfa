"""What torch reads and writes of strided shards, told where they are, see [Note: strided shards].

So `dcp.save` of a model's or an optimizer's state dict, in which such weights are DTensors, writes what is there, and
`dcp.load` puts it where it belongs, whatever mesh it was saved on; and `set_model_state_dict` takes of a whole tensor
what is here. Other DTensors are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmp.chunked import ChunkedTensor, as_chunks
from dmp.dtensor_pieces import strided
from dmp.places import is_dtensor


def _rectangles(tensor: Any) -> ChunkedTensor | None:
    """What this rank holds of a DTensor, where that is more than one rectangle."""
    if not any(map(strided, tensor.placements)) or any(p.is_partial() for p in tensor.placements):
        return None
    chunks = as_chunks(tensor)
    return chunks if len(chunks.chunks) > 1 else None


def create_write_items(own: Callable[..., Any], tensor: Any, fqn: str, object: Any) -> Any:
    """What a DTensor answers torch's checkpoint: with all its rectangles. So do the next two."""
    chunks = _rectangles(tensor)
    return own(tensor, fqn, object) if chunks is None else chunks.__create_write_items__(fqn, object)


def create_chunk_list(own: Callable[..., Any], tensor: Any) -> Any:
    """Where they are."""
    chunks = _rectangles(tensor)
    return own(tensor) if chunks is None else chunks.__create_chunk_list__()


def get_tensor_shard(own: Callable[..., Any], tensor: Any, index: Any) -> Any:
    """One of them."""
    chunks = _rectangles(tensor)
    if chunks is None:
        return own(tensor, index)
    return dict(chunks.pieces())[tuple(index.offset)]  # views, for they are written to


def cut_strided_shards(
    own: Callable[..., None], local_state_dict: dict[str, Any], keys: list[str], *args: Any, **options: Any
) -> None:
    """Whole tensors that are loaded, cut so, too."""
    rest = []
    for key in keys:
        given = local_state_dict.get(key)
        if isinstance(given, tuple) and is_dtensor(given[0]) and any(map(strided, given[0].placements)):
            to: Any = given[0]
            to = torch.empty_like(to, device=given[1].device) if to.is_meta else to
            as_chunks(to).fill_from(given[1])
            local_state_dict[key] = to
        else:
            rest.append(key)
    own(local_state_dict, rest, *args, **options)
