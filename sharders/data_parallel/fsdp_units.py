"""The units of a model that FSDP2 has split, and their weights.

Private to torch, as what they hold: nothing public tells what a forward computed with, or which averages wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from dmp import join_name

OfWeights: Any = object  # base of what weights are to be too: torch's `FSDPParam` stands behind it


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
    split = [each for each in module.modules() if hasattr(each, "_get_fsdp_state")]
    return [weight for unit in units_of(split) for weight in unit.fsdp_params]


def units_of(modules: Iterable[Any]) -> list[Any]:
    """What is gathered at once, of modules that were each split by themselves; before the first forward too."""
    return [unit for module in modules for unit in module._get_fsdp_state()._fsdp_param_groups]


def is_idle(module: Any) -> bool:
    """Whether a module that was split by itself is in no pass: it is called from outside then."""
    is_in_none: bool = module._get_fsdp_state()._training_state.name == "IDLE"
    return is_in_none


def name_of(root: Any, weight: Any) -> str:
    """Where a weight is in the model."""
    place = weight._module_info
    return join_name(next((path for path, m in root.named_modules() if m is place.module), ""), place.param_name)


def be_too(kind: type, weights: Sequence[Any]) -> Sequence[Any]:
    """Have these weights be of a kind too, which stands before their own."""
    for weight in weights:
        weight.__class__ = _both(kind, type(weight))  # type: ignore[arg-type]
    return weights


@cache
def _both(kind: type, of: type) -> type:
    return type(kind.__name__, (kind, of), {})
