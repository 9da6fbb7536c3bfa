"""Where modules keep tensors and modules beside their places: in a list, a dict, an object of their own.

What is put into a parameter's place is not seen there, so a weight that is kept is no table. A module is: where one is
kept that a sharder takes, the sharded one is put there too (`rebind`), as features that made their tables keep them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from dmp.plans.reachable import closed_over, is_foreign

_OF_MODULE = frozenset(vars(nn.Module()))  # attributes that every module has

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_SIZED = (list, dict, tuple, set, frozenset, deque)
_DEEP, _MANY = 4, 1000
"""Objects in objects that are looked into; elements of a container that is not, if they are numbers or text."""


class Kept(NamedTuple):
    """Something that is kept.

    Args:
        where: for showing.
        value: it.
        put: puts something else there; None where that cannot be done, as in a tuple or a function's closure.
    """

    where: str
    value: Any
    put: Callable[[Any], None] | None = None


def kept_in(modules: Iterable[nn.Module]) -> Iterator[Kept]:
    """What modules keep, other than as submodules, parameters and buffers."""
    for m in modules:
        for name, value in list(vars(m).items()):
            if name in _OF_MODULE or (isinstance(m, nn.RNNBase) and name == "_flat_weights"):  # which it keeps current
                continue
            for kept in _contents(value, functools.partial(vars(m).__setitem__, name), set()):
                yield kept._replace(where=f"{type(m).__name__}.{name}{kept.where}")


def kept_on_meta(model: nn.Module, skip: Iterable[nn.Module]) -> list[str]:
    """Where modules keep tensors on meta that are no parameters or buffers; without what is in those to skip."""
    skipped = {id(m) for s in skip for m in s.modules()}
    modules = [m for m in model.modules() if id(m) not in skipped]
    found = (kept.where for kept in kept_in(modules) if isinstance(kept.value, torch.Tensor) and kept.value.is_meta)
    return list(dict.fromkeys(found))


def kept_beside(model: nn.Module) -> dict[int, str]:
    """id of each tensor that a module keeps, beside its place if it has one, in a list or dict of its own -> where.

    What is put into the parameter's place is not seen there.
    """
    return {id(kept.value): kept.where for kept in kept_in(model.modules()) if isinstance(kept.value, torch.Tensor)}


def rebind(model: nn.Module, instead: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others wherever the model keeps these beside their places."""
    if instead:
        for kept in list(kept_in(model.modules())):
            if kept.put is not None and isinstance(kept.value, nn.Module) and kept.value in instead:
                kept.put(instead[kept.value])


def _contents(value: Any, put: Callable[[Any], None] | None, seen: set[int], depth: int = 0) -> Iterator[Kept]:
    """A value and what it holds: of plain containers, functions with arguments or closures, objects of a user's; and
    where, if it is an attribute of such an object.

    Args:
        seen: what has been looked into, which grows.
    """
    if isinstance(value, _PLAIN):
        return
    yield Kept("", value, put)
    if depth > _DEEP or id(value) in seen or _is_of_numbers(value):
        return
    seen.add(id(value))
    inner: Iterable[tuple[str, Any, Callable[[Any], None] | None]] = ()
    if isinstance(value, list):
        inner = [("", each, functools.partial(value.__setitem__, i)) for i, each in enumerate(value)]
    elif isinstance(value, dict):
        inner = [("", each, functools.partial(value.__setitem__, key)) for key, each in value.items()]
    elif isinstance(value, tuple | set | frozenset | deque):
        inner = [("", each, None) for each in value]
    elif isinstance(value, functools.partial):
        inner = [("", each, None) for each in (*value.args, *value.keywords.values(), value.func)]
    elif isinstance(value, FunctionType):
        inner = [("", each, None) for each in (*closed_over(value).values(), *(value.__defaults__ or ()))]
    elif isinstance(value, SimpleNamespace) or not (
        isinstance(value, nn.Module | type) or is_foreign(type(value).__module__)
    ):
        own = getattr(value, "__dict__", {})
        name_of = f" ({type(value).__name__}.%s)"
        inner = [(name_of % name, each, functools.partial(_set, value, name)) for name, each in [*own.items()]]
    for at, each, there in inner:
        for kept in _contents(each, there, seen, depth + 1):
            yield kept._replace(where=kept.where or at)


def _is_of_numbers(value: Any) -> bool:
    """Whether it is long, and of numbers or text by its first element."""
    if not isinstance(value, _SIZED) or len(value) < _MANY:
        return False
    return isinstance(next(iter(value.values() if isinstance(value, dict) else value)), _PLAIN)


def _set(owner: Any, name: str, value: Any) -> None:
    """Past properties and what forbids it, as in a frozen dataclass."""
    owner.__dict__[name] = value
