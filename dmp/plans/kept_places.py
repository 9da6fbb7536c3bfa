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
_DEEP = 4
"""Objects in objects that are looked into."""


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
    """Put modules in the place of others wherever the model keeps these beside their places; what the new ones keep is
    their own.
    """
    inside = {id(m) for new in instead.values() for m in new.modules()}
    for kept in list(kept_in(m for m in model.modules() if id(m) not in inside)) if instead else ():
        if kept.put is not None and isinstance(kept.value, nn.Module) and kept.value in instead:
            kept.put(instead[kept.value])


def _contents(value: Any, put: Callable[[Any], None] | None, seen: set[int], depth: int = 0) -> Iterator[Kept]:
    """A value and what it holds: of plain containers, functions with arguments or closures, objects of a user's; and
    where, if it is an attribute of such an object.

    Args:
        seen: what has been looked into, which grows.
    """
    yield Kept("", value, put)
    if depth > _DEEP or id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[tuple[str, Any, Callable[[Any], None] | None]] = ()
    if isinstance(value, list):
        inner = [("", x, functools.partial(value.__setitem__, i)) for i, x in enumerate(value) if not _is_plain(x)]
    elif isinstance(value, dict):
        inner = [("", x, functools.partial(value.__setitem__, k)) for k, x in value.items() if not _is_plain(x)]
    elif isinstance(value, tuple | set | frozenset | deque):
        inner = [("", x, None) for x in value if not _is_plain(x)]
    elif isinstance(value, functools.partial):
        inner = [("", each, None) for each in (*value.args, *value.keywords.values(), value.func)]
    elif isinstance(value, FunctionType):
        inner = [("", each, None) for each in (*closed_over(value).values(), *(value.__defaults__ or ()))]
    elif isinstance(value, SimpleNamespace) or not (
        isinstance(value, nn.Module | type) or is_foreign(type(value).__module__)
    ):
        own = getattr(value, "__dict__", {})
        name_of = f" ({type(value).__name__}.%s)"
        inner = [(name_of % k, x, functools.partial(_set, value, k)) for k, x in own.items() if not _is_plain(x)]
    for at, each, there in inner:
        for kept in _contents(each, there, seen, depth + 1):
            yield kept._replace(where=kept.where or at)


def _is_plain(value: Any) -> bool:
    """Whether it is no more than a number or text, of which there may be millions."""
    return isinstance(value, _PLAIN)


def _set(owner: Any, name: str, value: Any) -> None:
    """Past properties and what forbids it, as in a frozen dataclass."""
    owner.__dict__[name] = value
