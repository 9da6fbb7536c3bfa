"""The tensors in what a model returns, whatever holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in an output, with its place; keyed and jagged ones by what they hold."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{where}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_of(item, f"{where}[{i}]")
    elif callable(getattr(value, "to_dict", None)):
        yield from tensors_of(value.to_dict(), where)
    elif callable(getattr(value, "values", None)):
        for part in ("values", "lengths"):
            if callable(getattr(value, part, None)):
                yield from tensors_of(getattr(value, part)(), f"{where}.{part}()")
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value), where)
