"""The optimizers that a user passes, and those inside them: TorchRec's wrappers hold others, and parameters too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.errors import ShardError
from dmp.foreign import type_name
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.optimizers.keyed import inside, is_wrapper, parts


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
        raise ShardError(
            f"expected an optimizer over the model's parameters, or a list of some; got {type_name(given)}"
        )
    return [given, *(layer for each in inside(given) for layer in layers_of(each))]


def with_state(layers: Iterable[Optimizer]) -> list[Optimizer]:
    """The ordinary ones that hold state of their own, once each; a wrapper shows that of what it wraps."""
    found = {id(part): part for layer in layers for part in parts(layer)}
    return [part for part in found.values() if not isinstance(part, FusedOptimizer)]


def follow_parts(layers: Iterable[Optimizer], new: Mapping[int, nn.Parameter]) -> None:
    """Have all hold what their groups do, in other attributes too: parameters in the places of others (by id), and
    where a wrapper has them of its own, their state."""
    for layer in layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict) and name != "state":
                value.update({key: new[id(item)] for key, item in value.items() if id(item) in new})
            elif isinstance(value, list):
                value[:] = [new.get(id(item), item) for item in value]
        state = vars(layer).get("state")
        if is_wrapper(layer) and type(state) is dict:  # of its own; most hold their part's
            for old in [p for p in state if id(p) in new]:
                state.pop(old)
                state.update({p: part.state[p] for part in parts(layer) for p in [new[id(old)]] if p in part.state})
