"""What dicts, lists, tuples and objects hold inside each other, as models take and return it: read, and replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from types import CellType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

_EMPTY = CellType()
_ATOMS = (int, float, complex, str, bytes, NoneType, torch.dtype, torch.device)
"""Of which a batch may hold many."""


def tensors_of(value: Any, where: str = "", *, as_held: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in what a model takes or returns, with its place.

    Args:
        value: tensors; mappings, lists, tuples and queues; TorchRec's keyed and jagged ones, by what they stand for;
            other objects, by their attributes.
        where: what the places begin with.
        as_held: keyed and jagged ones by their attributes too, and what sets and functions hold: the very tensors, for
            hooks.
    """
    return _tensors_of(value, where, as_held, set())


def _tensors_of(value: Any, where: str, as_held: bool, above: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """`above`: what this is looked for in, by its identity: an object may hold one that holds it."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif not isinstance(value, _ATOMS) and id(value) not in above:
        above.add(id(value))
        for place, item in _held_by(value, as_held):
            yield from _tensors_of(item, where + place, as_held, above)
        above.discard(id(value))


def _held_by(value: Any, as_held: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (tuple, list, deque)) or (as_held and isinstance(value, Set)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, (type, ModuleType, nn.Module)):
        return
    elif not as_held and callable(getattr(value, "to_dict", None)):
        yield "", _of_keys(value)
    elif not as_held and callable(getattr(value, "values", None)):
        parts = (part for part in ("values", "lengths") if callable(getattr(value, part, None)))
        yield from ((f".{part}()", getattr(value, part)()) for part in parts)
    elif as_held and isinstance(value, FunctionType):
        yield "", [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
    else:
        yield "", getattr(value, "__dict__", {})
        slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        yield "", {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _of_keys(value: Any) -> Any:
    """What a keyed one has of each key; TorchRec's own way fails where a batch has no samples."""
    is_jagged = all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths"))
    is_empty = is_jagged and not value.lengths().numel()
    return dict.fromkeys(value.keys(), value.values()) if is_empty else value.to_dict()


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def map_nested(
    value: Any,
    replace: Callable[[Any, str], Any],
    where: str = "",
    is_leaf: Callable[[Any], bool] = lambda value: False,
) -> Any:
    """The same dicts, lists and tuples with `replace(leaf, its place)` for each leaf; None stays.

    Args:
        value: whatever is no mapping, list or tuple in it is a leaf.
        replace: called in the order of the leaves.
        where: what the places begin with.
        is_leaf: which tuples and the like are leaves too.
    """
    if value is None:
        return None
    if isinstance(value, Mapping) and not is_leaf(value):
        return {key: map_nested(item, replace, f"{where}[{key!r}]", is_leaf) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not is_leaf(value):
        new = [map_nested(item, replace, f"{where}[{i}]", is_leaf) for i, item in enumerate(value)]
        kind: Any = type(value)
        return kind(*new) if hasattr(value, "_fields") else kind(new)
    return replace(value, where)
