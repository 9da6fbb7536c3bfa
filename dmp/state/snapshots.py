"""torchsnapshot's reader, over chunks of tables.

It asks for torch's `ShardedTensor` by the very type, where its writer, and others, ask by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmp.chunked import is_chunked


def read_into_chunks(own: Callable[..., Any], entry: Any, obj_out: Any = None) -> Any:
    """A snapshot is read into this rank's chunks, whatever plan it was taken of."""
    if not is_chunked(obj_out):
        return own(entry, obj_out)
    requests, future = own(entry, obj_out.as_sharded_tensor())
    future.obj = obj_out  # whose chunks are those that are filled
    return requests, future
