"""The wrapped models of this process that are alive, for what torch calls without a model at hand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from dmp.plans.remarks import are_cut_otherwise, say_what_is_cut_otherwise
from dmp.put_around import put_around

_log = logging.getLogger("dmp")

models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""Every `DistributedModelParallel`, in the order in which they were wrapped, which is the same on all ranks: of several
that one optimizer, or one list to clip, holds parameters of, ranks do the same one after the other."""

copies_of: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
"""Models that are copies of one another -> what they have in common."""

HELD = "held_until_called"
"""Where a module has the wrapped model, see `_Held`."""

_at_first: list[Callable[[], None]] = []


def at_first_wrap(prepare: Callable[[], None]) -> None:
    """Call `prepare` once, when the first model is wrapped: who only imports dmp finds torch as it was."""
    _at_first.append(prepare)


_when_there: dict[str, list[Callable[[Any], None]]] = {}


def when_imported(module: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with a module of another package once, at the first look that finds it imported."""
    _when_there.setdefault(module, []).append(prepare)


def stand_in(module: str, owner: str, name: str, around: Callable[..., Any]) -> None:
    """Have `around` stand in for a function of a module of another package, or of its class `owner`, see `put_around`;
    once that is imported."""
    when_imported(module, lambda found: put_around(getattr(found, owner) if owner else found, name, around))


def look() -> None:
    """Whether somebody has imported what waits to be prepared; at every wrap, and where its users come by."""
    for name in [name for name in _when_there if name in sys.modules]:
        for prepare in _when_there.pop(name):
            prepare(sys.modules[name])


def add(model: Any) -> None:
    """A model that has been wrapped, or copied."""
    if model not in models and model not in copies_of:
        _say_who_is_cut_otherwise(model)
    models[model] = None
    vars(model.module)[HELD] = _Held(model)
    look()
    while _at_first:
        _at_first.pop()()


class _Held:
    """In a module: it has the wrapped model until that is called. Who wraps a module and goes on with it, as after
    `fully_shard(module)`, would train each rank's own, from when garbage is collected on that rank on."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()  # copies and files have a name of nothing


def say_who_keeps_another_plan(model: Any) -> None:
    """After `model` has changed its plan: copies of it, and what follows it, may have other rows in the same places."""
    own = copies_of.get(model)
    others = [m for m in models if own is not None and copies_of.get(m) is own and m.plan != model.plan]
    if others and model.env.rank == 0:
        _log.warning(
            "this model has another plan now, and %d of its copies have the old one: call the same reshard on them "
            "before they are averaged with it (AveragedModel), for their chunks hold other rows",
            len(others),
        )
    _say_who_is_cut_otherwise(model)


def _say_who_is_cut_otherwise(model: Any) -> None:
    """Of a frozen table, as a teacher or a target network has, and one that it may follow: in the model, or in one that
    was wrapped by itself, on its mesh or another. Planned apart, what nobody trains is cheap where it is whole."""
    if model.env.rank != 0 or model.env.size == 1:
        return
    shapes, cut_otherwise = model.plan.setting.shapes, are_cut_otherwise
    for name, of in model._made.copies.items():
        cut, of_cut = (model.plan[each].layout for each in (name, of))
        if cut_otherwise(shapes[name], cut, model.env, of_cut, model.env):
            return say_what_is_cut_otherwise(name, cut, of, of_cut, "Give both the same layout in the plan")
    own = dict(model.named_parameters())
    others = [m for m in models if m is not model and m.env.size > 1 and (m.env, m.plan) != (model.env, model.plan)]
    for other in others:
        theirs, of_shapes = dict(other.named_parameters()), other.plan.setting.shapes
        for name, shape in shapes.items():
            if name not in own or name not in theirs or of_shapes.get(name) != shape:
                continue
            if own[name].requires_grad is theirs[name].requires_grad:
                continue
            both = {f"{name} of this model": model, f"{name} of another": other}
            (frozen, its), (trained, of) = both.items() if theirs[name].requires_grad else reversed(both.items())
            cut, of_cut = its.plan[name].layout, of.plan[name].layout
            if cut_otherwise(shape, cut, its.env, of_cut, of.env):
                way_out = "Have both on one mesh, by one plan (plan=first.plan, the same reshard)"
                return say_what_is_cut_otherwise(frozen, cut, trained, of_cut, way_out)
