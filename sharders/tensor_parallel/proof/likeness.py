"""Whether two modules do the same with the same shapes: a key that is equal for those that are alike but for values."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

_DEPTH = 8
_INNER = frozenset(vars(nn.Module()))


class UnlikeError(Exception):
    """Something of a module cannot be compared with another's: what it does is known of this one alone."""


def likeness(modules: Mapping[str, nn.Module]) -> Hashable:
    """A key of modules by path: classes and their methods, shapes and dtypes, attributes and configurations.

    What it keeps alive are classes and functions; no module, no tensor.

    Raises:
        UnlikeError: an attribute that has no value to compare by, such as a function made at run time.
    """
    seen = _Seen()
    return (
        tuple((path, *seen.module(module)) for path, module in modules.items()),
        tuple(seen.classes.items()),
        torch.get_default_dtype(),
    )


def value_key(value: Any) -> Hashable:
    """A key of any value that is made of plain ones.

    Raises:
        UnlikeError: it is not.
    """
    key: Hashable = _Seen().value(value, 0)
    return key


class _Seen:
    """One walk; configurations that many modules hold are looked at once."""

    def __init__(self) -> None:
        self.classes: dict[type, Hashable] = {}
        self._objects: dict[int, Any] = {}
        self._alive: list[Any] = []

    def module(self, module: nn.Module) -> tuple[Any, ...]:
        """Class, shapes, kinds of children, and attributes of its own."""
        self._class(type(module))
        own = vars(module)
        return (
            type(module),
            tuple((name, _tensor(p)) for name, p in own["_parameters"].items()),
            tuple((name, _tensor(b)) for name, b in own["_buffers"].items()),
            tuple((name, None if child is None else type(child)) for name, child in own["_modules"].items()),
            tuple((name, self.value(value, 0)) for name, value in own.items() if name not in _INNER),
        )

    def value(self, value: Any, depth: int) -> Any:
        """A key of what an attribute holds, with its type: 1, 1.0 and True are not alike."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum | torch.dtype):
            return type(value), value
        if isinstance(value, torch.device | torch.memory_format | torch.layout):
            return str(value)
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, nn.Module):
            return type(value)
        if isinstance(value, type):
            return value
        if depth > _DEPTH:
            raise UnlikeError(f"{type(value).__name__} is nested too deeply")
        if isinstance(value, Mapping):
            items = value.items()
            return type(value), tuple((self.value(k, depth + 1), self.value(v, depth + 1)) for k, v in items)
        if isinstance(value, list | tuple):
            return type(value), tuple(self.value(v, depth + 1) for v in value)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self.value(v, depth + 1) for v in value)
        if callable(value) and hasattr(value, "__qualname__"):
            return _function(value)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        if id(value) not in self._objects:
            if not hasattr(value, "__dict__") or callable(value):
                raise UnlikeError(f"a {type(value).__name__} has no attributes to compare")
            self._alive.append(value)  # so that its id stays its own
            self._objects[id(value)] = type(value)  # where it holds itself
            self._class(type(value))
            self._objects[id(value)] = (type(value), self.value(dict(vars(value)), depth + 1))
        return self._objects[id(value)]

    def _class(self, kind: type) -> None:
        """Its methods, and those of its bases: one may have been put in the place of another."""
        for base in kind.__mro__:
            if base in self.classes or base is nn.Module or base is object:
                continue
            self.classes[base] = tuple(
                (name, value) for name, value in vars(base).items() if hasattr(value, "__code__")
            )


def _tensor(value: torch.Tensor | None) -> Hashable:
    if value is None:
        return None
    shape = None if nn.parameter.is_lazy(value) else tuple(value.shape)
    return type(value), shape, value.dtype, value.is_sparse


def _function(value: Any) -> Hashable:
    """By its place in a module that can be imported, where it lies there."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is None or (found is not value and found != value):
        raise UnlikeError(f"function {value.__qualname__} is not one that can be imported")
    return "function", value.__module__, value.__qualname__
