"""Modules whose class does not begin with `nn.Module`, as `class Policy(ABC, nn.Module)`.

torch gives what it splits a class of its own and the module's. Python lets a module change to it only if both come by
their attributes at the same base: at `object` where `nn.Module` is first. Where `ABC` or `Generic` is, torch ends in
"object layout differs". Such a module has a class made here, in torch's own list, that begins as the module's does.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def begin_alike(module: nn.Module, is_split: bool) -> None:
    """Have torch find a class that the module can change to.

    Args:
        is_split: torch will be asked for `fully_shard`, else for `replicate`.
    """
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, cls_to_replicate_cls
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy, cls_to_fsdp_cls

    theirs, made = (FSDPModule, cls_to_fsdp_cls) if is_split else (ReplicateModule, cls_to_replicate_cls)
    kind, first = type(module), _first(type(module))
    if first is object or kind in made:
        return
    own: dict[str, Any] = {"__module__": theirs.__module__}
    beside = {**own, "_orig_cls_mro_index": 2, "__orig_bases__": ()}  # Generic asks what it was made generic by
    begun = type(theirs.__name__, (first, theirs), beside)
    name = f"{theirs.__name__.removesuffix('Module')}{kind.__name__}"
    made[kind] = type(name, (begun, kind), {**own, "__deepcopy__": _unimplemented_deepcopy})


def _first(kind: type) -> type:
    """The base at which there are no attributes yet."""
    while kind.__dictoffset__:
        kind = kind.__base__  # type: ignore[assignment]
    return kind
