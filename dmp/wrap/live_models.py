"""The wrapped models of this process that are alive, for what torch calls without a model at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

models: WeakSet[Any] = WeakSet()
"""Every `DistributedModelParallel`."""

_at_first: list[Callable[[], None]] = []


def at_first_wrap(prepare: Callable[[], None]) -> None:
    """Call `prepare` once, when the first model is wrapped: who only imports dmp finds torch as it was."""
    _at_first.append(prepare)


def add(model: Any) -> None:
    """A model that has been wrapped, or copied."""
    models.add(model)
    while _at_first:
        _at_first.pop()()
