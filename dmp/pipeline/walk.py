"""What a batch holds, and where. A *path* is how an object is come by from a batch: attributes and items, as in
`.features` or `['ids'][0]`; it finds in the next batch what it found in this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

Path = tuple[tuple[str, Any], ...]
"""Steps: `("attribute", name)` or `("item", key)`."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""What has no parts, and is compared by value."""

NOTHING_THERE = (LookupError, AttributeError, TypeError)
"""What `resolve` raises."""

Found = list[tuple[Path, Any]]
"""Objects with their paths."""

MAX_OBJECTS = 20_000
"""Of one batch: one that refers to more than a batch is not followed to its end."""

_MAX_TYPES = 1024  # that are kept

AS_VALUE, WHOLE, BY_KEY, BY_PLACE, BY_NAME = range(5)
"""How an object is looked into; the first two are not."""


class _Looks(dict[type, int]):
    """Type -> how its objects are looked into. A batch is walked in each step, often of a few milliseconds, and to ask
    each object what it is takes half of that."""

    def __missing__(self, kind: type) -> int:
        if len(self) >= _MAX_TYPES:
            self.clear()
        self[kind] = _look_of(kind)
        return self[kind]


def _look_of(kind: type) -> int:
    if issubclass(kind, (*PLAIN, type)):
        return AS_VALUE
    if issubclass(kind, (torch.Tensor, nn.Module)):
        return WHOLE
    if issubclass(kind, Mapping):
        return BY_KEY
    return BY_PLACE if issubclass(kind, (list, tuple)) else BY_NAME


looks = _Looks()


def walk(value: Any, path: Path = (), limit: int = MAX_OBJECTS) -> Found:
    """Every object in a batch, each once, with its path; not plain values, nor what tensors and modules hold.

    Args:
        path: of the value itself, in a batch that it is a part of.
        limit: how many objects are found at most.
    """
    seen: set[int] = set()
    found: Found = []
    waiting = [(path, value)] if looks[type(value)] else []
    while waiting and len(found) < limit:
        path, each = at = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        found.append(at)
        look = looks[type(each)]
        if look != WHOLE:
            waiting += [((*path, step), part) for step, part in reversed(_parts(each, look))]
    return found


def _parts(value: Any, look: int) -> list[tuple[tuple[str, Any], Any]]:
    """Those that are not plain: of the thousands of numbers in a list of them none is looked at twice."""
    if look == BY_PLACE:
        if not any(map(looks.__getitem__, set(map(type, value)))):
            return []
        return [(("item", i), part) for i, part in enumerate(value) if looks[type(part)]]
    if look == BY_KEY:
        named = [(key, part) for key, part in value.items() if isinstance(key, (str, int))]
        return [(("item", key), part) for key, part in named if looks[type(part)]]
    kind: Any = type(value)
    held = getattr(value, "__dict__", {})
    if slots := _slots(kind):
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | held
    return [(("attribute", name), part) for name, part in held.items() if part is not None and looks[type(part)]]


@lru_cache(maxsize=_MAX_TYPES)
def _slots(kind: type) -> list[str]:
    """Of the type and its bases."""
    named = (name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if isinstance(name, str))
    return [name for name in named if not name.startswith("__")]


def resolve(value: Any, path: Path) -> Any:
    """What is at the path.

    Raises:
        LookupError, AttributeError, TypeError: nothing is.
    """
    for kind, name in path:
        value = getattr(value, name) if kind == "attribute" else value[name]
    return value


def shown_path(path: Path) -> str:
    """As Python writes it."""
    return "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in path)


class Snapshot:
    """The tensors of a value and how often each had been written to: whether it is still what it was.

    Only what torch writes is seen; memory that NumPy writes to is not.

    Args:
        found: what `walk` found in it.
    """

    def __init__(self, found: Found) -> None:
        self._tensors = [(path, each, _version(each)) for path, each in found if isinstance(each, torch.Tensor)]

    def changed_in(self, value: Any) -> Path | None:
        """Path of a tensor that is another now, or has been written to; more of them, as a cache is, are no change."""
        for path, tensor, version in self._tensors:
            try:
                now = resolve(value, path)
            except NOTHING_THERE:
                return path
            if now is not tensor or _version(tensor) != version:
                return path
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that it has seen."""
        return (tensor for _, tensor, _ in self._tensors)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
