"""Weights that FSDP2 has left gathered: whoever looks at the model sees this rank's chunks, and changes nothing.

[Note: gathered] FSDP2 keeps the root's weights whole after a forward, for the backward pass to begin with, and those of
units where the user asks for it. An optimizer must not meet them: it would train copies. Nor may one rank free them
because it looks: at the next forward it would gather alone, and wait for ever. So a look has the modules hold the
chunks, and then the gathered weights again, which lay where they were. What is written into chunks meanwhile is for the
next forward to see: it frees what is older than that, on all ranks (`FSDPWrapper` sees to it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from dmp.inference_mode import outside_inference_mode


@contextmanager
def chunks_shown(module: nn.Module, *, as_state: bool = False) -> Iterator[None]:
    """`module` with chunks in place of what is gathered, see [Note: gathered].

    A forward, or a backward pass, may come before it ends: what that has done stays.

    Args:
        as_state: for `state_dict`, at which a hook of torch's would free what is gathered. No forward may come then.
    """
    fsdp = [each._get_fsdp_state() for each in module.modules() if hasattr(each, "_get_fsdp_state")]  # type: ignore[operator]
    units = [unit for state in fsdp for unit in state._fsdp_param_groups if not unit.is_sharded]
    was = [unit._sharded_state for unit in units]
    for unit in units:
        for held in unit.fsdp_params:
            _tell_frozen(held)
            held._setattr_on_modules(held.sharded_param)
        if as_state:
            unit._sharded_state = type(unit._sharded_state).SHARDED
    try:
        with outside_inference_mode() if as_state else nullcontext():
            yield
    finally:
        for unit, state in zip(units, was, strict=True):
            if as_state:
                unit._sharded_state = state
            for held in () if unit.is_sharded else unit.fsdp_params:
                whole = held._unsharded_param if unit.is_unsharded else held._sharded_post_forward_param
                held._setattr_on_modules(whole)


def _tell_frozen(held: Any) -> None:
    """Have the chunk know what was frozen, or unfrozen, of what is gathered of it."""
    was, whole = getattr(held, "is_trained", None), getattr(held, "_unsharded_param", None)
    if was is not None and whole is not None and whole.requires_grad is not was:
        held.sharded_param.requires_grad_(whole.requires_grad)
        held.is_trained = whole.requires_grad


def wholes(module: nn.Module) -> set[int]:
    """ids of what FSDP2 has gathered or may gather again: whole over its ranks, and DTensors still where tensor
    parallelism has split them."""
    fsdp = [each._get_fsdp_state() for each in module.modules() if hasattr(each, "_get_fsdp_state")]  # type: ignore[operator]
    held = [each for state in fsdp for unit in state._fsdp_param_groups for each in unit.fsdp_params]
    return {id(each._unsharded_param) for each in held if hasattr(each, "_unsharded_param")}
