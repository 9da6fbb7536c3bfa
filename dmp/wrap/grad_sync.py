"""Averages of dense gradients, left out while they accumulate: by `no_sync`, or as DDP's attribute says."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


def without_averages(model: Any) -> ExitStack:
    """The model's dense gradients are each rank's own from now on, until what is returned is closed."""
    stack, layer = ExitStack(), model.running
    while layer is not model.module:
        stack.enter_context(layer.no_sync())
        layer = layer.module
    if hasattr(type(layer), "set_requires_gradient_sync"):  # FSDP2
        layer.set_requires_gradient_sync(False)
        stack.callback(layer.set_requires_gradient_sync, True)
    return stack


class GradSync:
    """`model.require_backward_grad_sync`, which scripts set on DDP instead of `no_sync`: False until it is True. Copies
    of a model begin anew."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[nn.Module, ExitStack] = WeakKeyDictionary()

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        return self if model is None else model not in self._held

    def __set__(self, model: nn.Module, value: bool) -> None:
        if model in self._held:
            self._held.pop(model).close()
        if not value:
            self._held[model] = without_averages(model)
