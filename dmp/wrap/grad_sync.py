"""Averages of dense gradients, left out while they accumulate: by `no_sync`, or as DDP's attribute says."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

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
    """`model.require_backward_grad_sync`, which scripts set on DDP instead of `no_sync`: False until it is True."""

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        return self if model is None else HELD not in model.__dict__

    def __set__(self, model: nn.Module, value: bool) -> None:
        if HELD in model.__dict__:
            model.__dict__.pop(HELD).close()
        if not value:
            model.__dict__[HELD] = without_averages(model)


HELD = "_without_averages"
"""Where a wrapped model keeps what ends it; copies begin anew."""
