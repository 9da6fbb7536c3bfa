"""Modules whose class does not begin with `nn.Module`, as `class Policy(ABC, nn.Module)`, or hears of its subclasses.

torch gives what it splits a class of its own and the module's. Python lets a module change to it only if both come by
their attributes at the same base: at `object` where `nn.Module` is first. Where `ABC` or `Generic` is, torch ends in
"object layout differs". Such a module has a class made here, in torch's own list, that begins as the module's does. So
has one whose class has an `__init_subclass__`, of which that does not hear.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sharders.unheard import first_base, hears, unheard


def begin_alike(module: nn.Module, is_split: bool) -> None:
    """Have torch find a class that the module can change to.

    Args:
        is_split: torch will be asked for `fully_shard`, else for `replicate`.
    """
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, cls_to_replicate_cls
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy, cls_to_fsdp_cls

    theirs, made = (FSDPModule, cls_to_fsdp_cls) if is_split else (ReplicateModule, cls_to_replicate_cls)
    kind, first = type(module), first_base(type(module))
    if kind in made or (first is object and not hears(kind)):
        return
    begun = unheard(theirs) if first is object else unheard(first, theirs)
    own: dict[str, Any] = {"__module__": theirs.__module__, "__deepcopy__": _unimplemented_deepcopy}
    new = type(f"{theirs.__name__.removesuffix('Module')}{kind.__name__}", (begun, kind), own)
    begun._orig_cls_mro_index = new.__mro__.index(kind)
    made[kind] = new
