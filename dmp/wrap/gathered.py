"""Weights that FSDP2 has left gathered: whoever looks at the model sees this rank's pieces, and changes nothing.

[Note: gathered] FSDP2 keeps the root's weights whole after a forward, for the backward pass to begin with, and those of
units where the user asks for it. An optimizer must not meet them: it would train copies. Nor may one rank free them
because it looks: at the next forward it would gather alone, and wait for ever. So a look has the modules hold the
pieces, and then the gathered weights again, which lay where they were. What is written into pieces meanwhile is for the
next forward to see: it frees what is older than that, on all ranks (`FSDPWrapper` sees to it).

Private names of torch's here: nothing public tells what is gathered, or shows pieces without freeing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def pieces_shown(module: nn.Module) -> Iterator[list[Any]]:
    """`module` with pieces in place of what is gathered, see [Note: gathered]; gives the units that are.

    A forward, or a backward pass, may come before it ends: what that has done stays.
    """
    states = [each._get_fsdp_state() for each in module.modules() if hasattr(each, "_get_fsdp_state")]  # type: ignore[operator]
    units = [unit for state in states for unit in state._fsdp_param_groups if not unit.is_sharded]
    for unit in units:
        for held in unit.fsdp_params:
            held._setattr_on_modules(held.sharded_param)
    try:
        yield units
    finally:
        for unit in units:
            for held in () if unit.is_sharded else unit.fsdp_params:
                whole = held._unsharded_param if unit.is_unsharded else held._sharded_post_forward_param
                held._setattr_on_modules(whole)


def state_dict_of_pieces(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`module.state_dict`, by which torch would free what is gathered."""
    with pieces_shown(module) as units:
        states = [unit._sharded_state for unit in units]
        for unit, state in zip(units, states, strict=True):
            unit._sharded_state = type(state).SHARDED  # torch's hook has nothing to do then
        try:
            return module.state_dict(*args, **kwargs)
        finally:
            for unit, state in zip(units, states, strict=True):
                unit._sharded_state = state
