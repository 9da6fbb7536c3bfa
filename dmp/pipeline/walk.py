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

_PLAIN_TYPES = frozenset(PLAIN)

NOTHING_THERE = (LookupError, AttributeError, TypeError)
"""What `resolve` raises."""

_MAX_OBJECTS = 20_000  # of one batch: one that refers to more than a batch is not followed to its end


def walk(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every object in a batch, each once, with its path; not plain values, nor what tensors and modules hold."""
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting and len(seen) < _MAX_OBJECTS:
        path, each = waiting.pop()
        if isinstance(each, (*PLAIN, type)) or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        if not isinstance(each, (torch.Tensor, nn.Module)):
            waiting += [((*path, step), part) for step, part in _parts(each)][::-1]


def _parts(value: Any) -> list[tuple[tuple[str, Any], Any]]:
    """Those that are not plain: of the thousands of numbers in a list of them none is looked at twice."""
    if isinstance(value, Mapping):
        items = value.items()
        return [(("item", key), part) for key, part in items if isinstance(key, (str, int)) and not _is_plain(part)]
    if isinstance(value, (list, tuple)):
        if _PLAIN_TYPES.issuperset(map(type, value)):
            return []
        return [(("item", i), part) for i, part in enumerate(value) if not _is_plain(part)]
    kind: Any = type(value)
    held = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    held.update(getattr(value, "__dict__", {}))
    return [(("attribute", name), part) for name, part in held.items() if not _is_plain(part)]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES or isinstance(value, PLAIN)


@lru_cache(maxsize=1024)
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
    """

    def __init__(self, value: Any) -> None:
        self._tensors = {path: (each, _version(each)) for path, each in walk(value) if isinstance(each, torch.Tensor)}

    def changed_in(self, value: Any) -> Path | None:
        """Path of a tensor that is another now, or has been written to; more of them, as a cache is, are no change."""
        for path, (tensor, version) in self._tensors.items():
            try:
                now = resolve(value, path)
            except NOTHING_THERE:
                return path
            if now is not tensor or _version(tensor) != version:
                return path
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that it has seen."""
        return (tensor for tensor, _ in self._tensors.values())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
