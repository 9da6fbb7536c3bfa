"""The units of a model that FSDP2 has split, and their weights.

Private to torch, as what they hold: nothing public tells what a forward computed with, or which averages wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def states(root: Any) -> list[Any]:
    """Of every module that was split by itself; known from the first forward on.

    Args:
        root: after `fully_shard`, the outermost.
    """
    found: list[Any] = root._get_fsdp_state()._state_ctx.all_states
    return found


def units(root: Any) -> Iterator[Any]:
    """What is gathered, and averaged, at once."""
    return (unit for state in states(root) for unit in state._fsdp_param_groups)


def weights(root: Any) -> Iterator[Any]:
    """Each with its `sharded_param`, and after a forward with what that computed with, `_unsharded_param`."""
    return (weight for unit in units(root) for weight in unit.fsdp_params)


def weights_below(module: Any) -> list[Any]:
    """The same ones, which a module and those below it hold; before the first forward too."""
    split = [each._get_fsdp_state() for each in module.modules() if hasattr(each, "_get_fsdp_state")]
    return [weight for state in split for unit in state._fsdp_param_groups for weight in unit.fsdp_params]
