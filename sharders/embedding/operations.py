"""torch's operations by their names: which there are, and which of them work on each element by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch


@cache
def operations() -> Mapping[str, list[str]]:
    """Names without underscores -> names of torch's operations; `add_` is of `add`."""
    found: dict[str, list[str]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            name = full.removeprefix("aten::").partition(".")[0]
            found.setdefault(name.replace("_", ""), []).append(name)
    return found


@cache
def is_pointwise(name: str) -> bool:
    """Whether an operation, by its name without underscores, gives for each element a function of it."""
    packets = [getattr(torch.ops.aten, full, None) for full in dict.fromkeys(operations().get(name, ()))]
    return any(torch.Tag.pointwise in getattr(p, o).tags for p in packets if p is not None for o in p.overloads())
