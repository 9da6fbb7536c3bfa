"""The optimizers that a user passes, and those inside them: TorchRec's wrappers hold others, and parameters too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.errors import ShardError


def layers_of(given: Any) -> list[Optimizer]:
    """Every optimizer in what was passed: one, several, or wrappers of some; outer ones first.

    Raises:
        ShardError: what is no optimizer.
    """
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return [layer for each in given for layer in layers_of(each)]
    if not isinstance(given, Optimizer):
        raise ShardError(f"expected an optimizer over the model's parameters, or a list of some; got {_kind(given)}")
    inner = [getattr(given, "_optimizer", None), *(each[1] for each in getattr(given, "optimizers", ()))]
    return [given, *(layer for each in inner if isinstance(each, Optimizer) for layer in layers_of(each))]


def with_state(layers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that hold state of their own, once each: a wrapper shows that of what it wraps."""
    found: dict[int, Optimizer] = {}
    for layer in layers:
        if not isinstance(getattr(layer, "_optimizer", None), Optimizer) and not hasattr(layer, "optimizers"):
            found.setdefault(id(layer), layer)
    return list(found.values())


def replace_in_attributes(layers: Iterable[Optimizer], new: Mapping[int, nn.Parameter]) -> None:
    """Put parameters in the places of others (by id) in lists and dicts that optimizers keep beside their groups."""
    for layer in layers:
        for name, value in vars(layer).items():
            if name in ("param_groups", "state"):
                continue
            if isinstance(value, list):
                value[:] = [new.get(id(item), item) for item in value]
            elif isinstance(value, dict):
                value.update({key: new[id(item)] for key, item in value.items() if id(item) in new})


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
