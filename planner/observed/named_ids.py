"""The named ids of a batch: from a `KeyedJaggedTensor` anywhere in it, or from integer tensors that have a name.

A name is a key of a dict, a field of an object or named tuple, or, in a plain tuple, the parameter of the model's
`forward` that takes it. Under a name: a `JaggedTensor` or a nested tensor; ids (samples, n), n each; ids (n,), one
each; or ids (n,) with offsets, as a pair, or beside them under the name with `_offsets` behind it, as `nn.EmbeddingBag`
takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmp import is_torchrecs

_DEEP = 6


class NamedIds(NamedTuple):
    """The ids of one feature in a batch."""

    name: str
    ids: Tensor
    """(n,)"""
    samples: int
    is_flat: bool = False
    """One id each, for nothing says otherwise."""


def named_ids(
    batch: Any, arguments: Sequence[str] = (), deep: int = 0, known: set[int] | None = None
) -> Iterator[NamedIds]:
    """Every feature of a batch, see above; what a batch holds twice is read once.

    Args:
        arguments: names of `forward`'s parameters, for the elements of a plain tuple.
        known: `id`s of what was read.
    """
    known = set() if known is None else known
    if id(batch) in known:
        return
    known.add(id(batch))
    if is_torchrecs(batch, "KeyedJaggedTensor"):
        yield from _of_keyed(batch)
        return
    for name, value in _parts(batch, arguments):
        found = None if name is None else _under_a_name(name, value, batch)
        if found is not None:
            yield found
        elif deep < _DEEP and not isinstance(value, Tensor):
            yield from named_ids(value, (), deep + 1, known)


def _of_keyed(ids: Any) -> Iterator[NamedIds]:
    """Slices of its values, one for each key."""
    if not _is_integer(ids.values()):
        return
    strides = ids.stride_per_key()
    for key, values, samples in zip(ids.keys(), ids.values().split(ids.length_per_key()), strides, strict=True):
        yield NamedIds(key, values, samples)


def _parts(batch: Any, arguments: Sequence[str]) -> Iterator[tuple[str | None, Any]]:
    """What a value holds, with the names it has for it."""
    if isinstance(batch, Mapping):
        yield from ((str(key), value) for key, value in batch.items())
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name, None)) for field in fields(batch))
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        yield from zip(batch._fields, batch, strict=True)
    elif isinstance(batch, (list, tuple)):
        names = [*arguments, *([None] * len(batch))][: len(batch)]
        yield from zip(names, batch, strict=True)
    elif isinstance(batch, Tensor):
        yield arguments[0] if arguments else None, batch
    elif hasattr(batch, "__dict__") and not isinstance(batch, type) and not callable(batch):
        yield from vars(batch).items()


def _under_a_name(name: str, value: Any, beside: Any) -> NamedIds | None:
    """The ids of a feature, where a value has that form."""
    if is_torchrecs(value, "JaggedTensor"):
        return NamedIds(name, value.values(), len(value.lengths())) if _is_integer(value.values()) else None
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_integer, value)):
        ids, offsets = value
        return NamedIds(name, ids, _bags(ids, offsets)) if ids.dim() == offsets.dim() == 1 else None
    if not _is_integer(value) or name.endswith("_offsets"):
        return None
    offsets = dict(_parts(beside, ())).get(f"{name}_offsets") if value.dim() == 1 else None
    if isinstance(offsets, Tensor) and _is_integer(offsets):
        return NamedIds(name, value, _bags(value, offsets))
    if value.is_nested:  # a sample's ids each, of any number
        return NamedIds(name, torch.cat([each.reshape(-1) for each in value.unbind()]), value.size(0))
    return NamedIds(name, value.reshape(-1), len(value), value.dim() == 1) if value.dim() else None


def _bags(ids: Tensor, offsets: Tensor) -> int:
    """How many bags offsets tell: they may end with the number of ids, as under `include_last_offset`."""
    return len(offsets) - bool(len(offsets) > 1 and int(offsets[-1]) == len(ids))


def _is_integer(value: Any) -> bool:
    """Whether it has ids to read: float values, of features that are no ids, are passed over, and so is meta."""
    known = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and not value.is_meta
    return known and value.layout in (torch.strided, torch.jagged)
