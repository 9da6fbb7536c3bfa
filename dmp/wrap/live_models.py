"""The wrapped models of this process that are alive, for what torch calls without a model at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

models: WeakSet[Any] = WeakSet()
"""Every `DistributedModelParallel`."""

_at_first: list[Callable[[], None]] = []


def at_first_wrap(prepare: Callable[[], None]) -> None:
    """Call `prepare` once, when the first model is wrapped: who only imports dmp finds torch as it was."""
    _at_first.append(prepare)


_when_there: dict[str, Callable[[Any], None]] = {}


def when_imported(module: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with a module of another package once, at the first look that finds it imported."""
    _when_there[module] = prepare


def look() -> None:
    """Whether somebody has imported what waits to be prepared; at every wrap, and where its users come by."""
    for name in [name for name in _when_there if name in sys.modules]:
        _when_there.pop(name)(sys.modules[name])


def add(model: Any) -> None:
    """A model that has been wrapped, or copied."""
    models.add(model)
    look()
    while _at_first:
        _at_first.pop()()
