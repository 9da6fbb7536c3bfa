"""A `ChunkedTensor` read as torch's `ShardedTensor`: what code that knows that class asks of one.

[Note: by class] Such code asks `isinstance(value, ShardedTensor)`. A `ChunkedTensor` says yes by its `__class__`, once
somebody has imported that class, and stays what it is: torch's own code asks for what it has of a `ChunkedTensor`'s
first (`__create_write_items__`), or reads local shards, which are there.

The dataclasses are torch's own; they are imported when asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dmp.errors import ShardError

_THEIRS = "torch.distributed._shard.sharded_tensor.api"


class Located(Protocol):
    """A rectangle of the whole, and the table rank that has it; a `dmp.Shard` is one. Further dims do not count."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...


class Read(NamedTuple):
    """A `Located` that was read from a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


class Holders(Protocol):
    """The ranks that hold a tensor's chunks, as the model knows them whose state it is; one object on all of them."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Theirs, of one copy of the tables."""
        ...

    def gather(self, tensor: torch.Tensor, dst: int, out: torch.Tensor | None) -> None:
        """Have the whole in `out` on one rank. Collective, over all copies."""
        ...

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole, on every rank. Collective, over all copies."""
        ...

    def meet(self) -> None:
        """Return when all that hold chunks of one copy write theirs."""
        ...

    def say_when(self) -> None:
        """Say what who writes the chunks now should know of the time."""
        ...


if TYPE_CHECKING:
    _Tensor = torch.Tensor
else:
    _Tensor = object


class ShardedForm(_Tensor):
    """What `ChunkedTensor` has of torch's `ShardedTensor`."""

    chunks: list[torch.Tensor]
    """Of this rank, views where they were given."""

    offsets: list[tuple[int, ...]]
    """First index of each chunk along each dim."""

    places: Sequence[Located] | None
    """Of all shards, of every rank; None where nobody said."""

    holders: Holders | None
    """Who has the other chunks; None of what is no model's state, such as what was read from a file."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """See [Note: by class]."""
        theirs = getattr(sys.modules.get(_THEIRS), "ShardedTensor", None)
        return type(self) if theirs is None else _both(type(self), theirs)

    def local_shards(self) -> list[Any]:
        """This rank's chunks as torch's `Shard(tensor, metadata)`; the tensors are live, and may be written.

        A placement's rank counts as in plans: in the flattened shard and tensor axes, which on one axis is the rank.
        """
        from torch.distributed._shard.sharded_tensor.shard import Shard

        dims = self.dim()
        ranks = {(p.offsets[:dims], p.sizes[:dims]): p.rank for p in self.places or ()}
        own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        shards = []
        for chunk, offset in zip(self.chunks, self.offsets, strict=True):
            rank = ranks.get((tuple(offset), tuple(chunk.shape)), own)
            shards.append(Shard(chunk, _metadata(offset, chunk.shape, rank, chunk.device)))
        return shards

    def metadata(self) -> Any:
        """torch's `ShardedTensorMetadata`: `shards_metadata` of every rank's shards, `size`, `tensor_properties`.

        Raises:
            ShardError: what the other ranks have is not known here, as of state of a sharder that does not say.
        """
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

        if self.places is None:
            raise ShardError(
                "this tensor knows its rank's chunks alone, local_shards(); model.plan[name].layout.shards(shape, "
                "model.env) gives every rank's"
            )
        dims = self.dim()
        return ShardedTensorMetadata(
            [_metadata(p.offsets[:dims], p.sizes[:dims], p.rank, self.device) for p in self.places],
            self.size(),
            TensorProperties(dtype=self.dtype),
        )

    def sharding_spec(self) -> Any:
        """torch's `EnumerableShardingSpec` of all shards, which any layout has.

        Raises:
            ShardError: as `metadata`.
        """
        from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

        return EnumerableShardingSpec(self.metadata().shards_metadata)

    def as_sharded_tensor(self) -> Any:
        """A `ShardedTensor` of these very chunks, without a process group, for code that asks by type.

        Raises:
            ShardError: as `metadata`.
        """
        from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase

        return ShardedTensorBase._init_from_local_shards_and_global_metadata(self.local_shards(), self.metadata())

    @property
    def _process_group(self) -> dist.ProcessGroup | None:
        return None if self.holders is None else self.holders.group

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Put the whole into `out` on rank `dst`. Collective over the mesh of the model whose state this is.

        Args:
            dst: counted in the mesh.
            out: of the whole's size; None on the other ranks. Values are cast to its dtype.
            enforce_dtype, dtype: torch's, of what travels; nothing.

        Raises:
            ShardError: on every rank: `out` is not what it should be on some; or, this is no model's state.
        """
        if self.holders is None:
            raise ShardError(
                "these chunks are no state of a model's, and nothing says who has the others: "
                "full_state_dict(model, rank0_only=True) gives rank 0 whole tensors, full_state_dict(model) every rank"
            )
        self.holders.gather(self, dst, out)

    def local_tensor(self) -> torch.Tensor:
        """The one chunk of this rank.

        Raises:
            ShardError: it has none, or several: `local_shards()` takes any number.
        """
        if len(self.chunks) != 1:
            raise ShardError(f"local_tensor() needs one chunk on this rank; it has {len(self.chunks)}: local_shards()")
        return self.chunks[0]


@cache
def _both(ours: type, theirs: type) -> type:
    """A class that is both, of which there are no instances."""
    return type(ours)(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def _metadata(offsets: Sequence[int], sizes: Sequence[int], rank: int, device: torch.device) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata

    where = f"rank:{rank}/{device}"
    return ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(sizes), placement=where)
