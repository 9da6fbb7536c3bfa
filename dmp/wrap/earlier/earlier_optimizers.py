"""Parameters that wrapping has replaced, in optimizers that were made before: their groups follow at the first step.
So do those that `model.reshard` has replaced, in optimizers that it was not given.

Users of DDP make the optimizer first. A table, a weight that tensor parallelism or FSDP2 splits, and one that was on
meta is another object after wrapping; the old one never gets a gradient again, and torch's optimizers pass over it in
silence. So the old one is marked with the name that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.errors import ShardError
from dmp.wrap.earlier.written_earlier import held_weakly, look_after

_SHOWN = 5
_wraps = 0  # so that an optimizer is looked at once, and again after another model has been wrapped
_NEVER = -1


class _Change:
    """A wrap or a reshard, whose model is known when it is done. Marks hold it, not their parameters: a weak reference
    would keep torch from putting a real tensor into one that is on meta."""

    model: Callable[[], nn.Module | None] = staticmethod(lambda: None)

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)


class _Replaced:
    """What a replaced parameter knows: the wrapped model, its name there, and when. Not kept where it is pickled."""

    def __init__(self, change: _Change, name: str, when: _When) -> None:
        self.change, self.name, self.when = change, name, when

    def __reduce__(self) -> Any:
        return type(None), ()


class _When(NamedTuple):
    """What has replaced parameters, and what to do about an optimizer from before."""

    event: str
    advice: str


_WRAPPED = _When(
    "the model was wrapped",
    "Make the optimizer after wrapping, from model.parameters(); load_checkpoint(path, model, optimizer) gives it "
    "earlier state",
)
_RESHARDED = _When(
    "model.reshard(plan)",
    "Pass it there, model.reshard(plan, optimizer), which moves its state with the tables; now make a new one, from "
    "model.parameters()",
)


@contextmanager
def marking_replaced(model: nn.Module, module: nn.Module, *, by_reshard: bool = False) -> Iterator[None]:
    """Mark each parameter of `module` for which `model.module` has another one at the end. Keeps none alive."""
    global _wraps
    change, when, now = _Change(module), _RESHARDED if by_reshard else _WRAPPED, module
    named: Any = list(module.named_parameters())
    for name, p in named:
        p._dmp_replaced = _Replaced(change, name, when)
    before = held_weakly(named)
    named = p = None  # of which a wrap frees those that it replaces
    try:
        yield
        _wraps += 1
        now = model.module  # type: ignore[assignment]
        change.model = weakref.ref(model)
    finally:
        for p in now.parameters():  # which are there as before
            if getattr(getattr(p, "_dmp_replaced", None), "change", None) is change:
                del p._dmp_replaced  # type: ignore[attr-defined]
    look_after(model, now, before, when.event)


def num_changes() -> int:
    """How often a model has been wrapped or resharded in this process."""
    return _wraps


def follow(optimizer: Optimizer) -> None:
    """Put the wrapped model's parameters into the groups of an optimizer that was made before wrapping.

    Raises:
        ShardError: naming the parameters, where the optimizer has state for them, or keeps them outside its groups
            too; nothing is changed.
    """
    if optimizer.__dict__.get("_dmp_wraps") in (_wraps, _NEVER):
        return
    old = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    new = {key: p for key, p in zip(old, successors(old.values()), strict=True) if p is not old[key]}
    if new:
        _check_can_follow(optimizer, [old[key] for key in new])
        _exchange(optimizer, new)
    optimizer.__dict__["_dmp_wraps"] = _wraps


def stay(optimizer: Optimizer) -> None:
    """Have it train what it was made for, where the wrapped model has another for its own."""
    optimizer.__dict__["_dmp_wraps"] = _NEVER


def successors(parameters: Iterable[Any]) -> list[Any]:
    """For each its wrapped model's parameter where wrapping has replaced it, and the model is there; else itself."""
    known: dict[int, dict[str, nn.Parameter]] = {}
    found = []
    for p in parameters:
        mark = getattr(p, "_dmp_replaced", None)
        model = mark.change.model() if mark is not None else None
        if model is not None and id(model) not in known:
            known[id(model)] = dict(model.named_parameters(remove_duplicate=False))
        found.append(p if mark is None or model is None else known[id(model)].get(mark.name, p))
    return found


def name_elsewhere(p: nn.Parameter, module: nn.Module) -> str | None:
    """Under which a wrapped model that is not of `module`, which has this parameter, has another in its place."""
    change = getattr(getattr(p, "_dmp_replaced", None), "change", None)
    if change is None or change.model() is None or any(each is change.module() for each in module.modules()):
        return None  # a table that was wrapped by itself may be wrapped again
    name: str = p._dmp_replaced.name  # type: ignore[attr-defined]
    return name


def _check_can_follow(optimizer: Optimizer, old: list[Any]) -> None:
    ids = {id(p) for p in old}
    reason = ""
    if not all(_is_fresh(optimizer.state.get(p, {})) for p in old):
        reason = "has state for them, which was gathered before"
    for name, value in vars(optimizer).items():
        items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if name not in ("param_groups", "state", "defaults") and any(id(item) in ids for item in items):
            reason = f"keeps them in its attribute {name!r} too"
    if reason:
        names, when = [p._dmp_replaced.name for p in old], old[0]._dmp_replaced.when
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ShardError(
            f"{type(optimizer).__name__} was made before {when.event}, which has replaced its parameters "
            f"{names[:_SHOWN]}{more}, and {reason}: it would not train them. {when.advice}"
        )


def _exchange(optimizer: Optimizer, new: dict[int, nn.Parameter]) -> None:
    """Replace parameters by id, in groups and state; one whose successor is held already (they were tied) goes."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        kept: list[int] = []
        for i, p in enumerate(group["params"]):
            target = new.get(id(p), p)
            if target is p or id(target) not in held:
                held.add(id(target))
                group["params"][i] = target
                kept.append(i)
            state = optimizer.state.pop(p, None) if target is not p else None
            if state:
                optimizer.state[target] = {key: _started(value, p, target) for key, value in state.items()}
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][i] for i in kept]


def _is_fresh(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer has not stepped with it: none, or as torch's Adagrad makes it, all alike."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel()]
    stepped = float(state.get("step", 0.0 if not state else 1.0)) > 0
    return not stepped and all(not value.is_meta and bool((value == value.flatten()[0]).all()) for value in tensors)


def _started(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Fresh state for a parameter of another shape."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not value.dim():
        return value
    first = value.flatten()[0].item() if value.numel() else 0.0
    return torch.full_like(new.detach(), first, dtype=value.dtype)
