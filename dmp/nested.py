"""What dicts, lists, tuples and objects hold inside each other, as models take and return it: read, and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_of(value: Any, where: str = "", *, as_held: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in what a model takes or returns, with its place.

    Args:
        value: tensors; mappings, lists and tuples; TorchRec's keyed and jagged ones, by what they stand for; other
            objects, by their attributes.
        where: what the places begin with.
        as_held: keyed and jagged ones by their attributes too: the very tensors that they hold, for hooks.
    """
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{where}[{key!r}]", as_held=as_held)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_of(item, f"{where}[{i}]", as_held=as_held)
    elif not as_held and callable(getattr(value, "to_dict", None)):
        yield from tensors_of(value.to_dict(), where)
    elif not as_held and callable(getattr(value, "values", None)):
        for part in ("values", "lengths"):
            if callable(getattr(value, part, None)):
                yield from tensors_of(getattr(value, part)(), f"{where}.{part}()")
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from tensors_of(vars(value), where, as_held=as_held)


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
