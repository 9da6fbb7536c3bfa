"""The wrapped models of this process that are alive, for what torch calls without a model at hand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_log = logging.getLogger("dmp")

models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""Every `DistributedModelParallel`, in the order in which they were wrapped, which is the same on all ranks: of several
that one optimizer, or one list to clip, holds parameters of, ranks do the same one after the other."""

copies_of: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
"""Models that are copies of one another -> what they have in common."""

_at_first: list[Callable[[], None]] = []


def at_first_wrap(prepare: Callable[[], None]) -> None:
    """Call `prepare` once, when the first model is wrapped: who only imports dmp finds torch as it was."""
    _at_first.append(prepare)


_when_there: dict[str, list[Callable[[Any], None]]] = {}


def when_imported(module: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with a module of another package once, at the first look that finds it imported."""
    _when_there.setdefault(module, []).append(prepare)


def look() -> None:
    """Whether somebody has imported what waits to be prepared; at every wrap, and where its users come by."""
    for name in [name for name in _when_there if name in sys.modules]:
        for prepare in _when_there.pop(name):
            prepare(sys.modules[name])


def add(model: Any) -> None:
    """A model that has been wrapped, or copied."""
    models[model] = None
    look()
    while _at_first:
        _at_first.pop()()


def say_who_keeps_another_plan(model: Any) -> None:
    """After `model` has changed its plan: copies of it have other rows in the same places, which averages would mix."""
    own = copies_of.get(model)
    others = [m for m in models if own is not None and copies_of.get(m) is own and m.plan != model.plan]
    if others and model.env.rank == 0:
        _log.warning(
            "this model has another plan now, and %d of its copies have the old one: call the same reshard on them "
            "before they are averaged with it (AveragedModel), for their chunks hold other rows",
            len(others),
        )
