"""The wrapped models of this process that are alive, for what torch calls without a model at hand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from dmp.plans.remarks import are_cut_otherwise, say_what_is_cut_otherwise

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
    if model not in models:
        _say_who_is_cut_otherwise(model)
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


def _say_who_is_cut_otherwise(model: Any) -> None:
    """Of a frozen model, as a target network is, and one that it may follow, wrapped by themselves: planned apart, for
    a table that nobody trains is cheap where it is whole."""
    if model.env.rank != 0 or model.env.size == 1:
        return
    own = dict(model.named_parameters())
    for other in [m for m in models if m.env == model.env and m.plan != model.plan]:
        theirs, shapes = dict(other.named_parameters()), other.plan.setting.shapes
        for name, shape in model.plan.setting.shapes.items():
            if name not in own or name not in theirs or shapes.get(name) != shape:
                continue
            if own[name].requires_grad is theirs[name].requires_grad:
                continue
            both = {f"{name} of the model wrapped now": model, f"{name} of one wrapped before": other}
            (frozen, its), (trained, of) = both.items() if theirs[name].requires_grad else reversed(both.items())
            cut, of_cut = its.plan[name].layout, of.plan[name].layout
            if are_cut_otherwise(cut, of_cut, shape, model.env):
                say_what_is_cut_otherwise(frozen, cut, trained, of_cut, "Wrap the second with plan=first.plan")
                return
