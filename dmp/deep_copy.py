"""Deep copies of modules that hold what Python does not copy: groups of ranks, locks, open files, writers of logs.

Such a module trains as it is, and under DDP. Its copies, made here for a look or to be unsharded, share it with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

_REFUSALS = (TypeError, ValueError)
"""`cannot pickle '_thread.lock' object`, and of ctypes."""


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`copy.deepcopy`, but what it refuses of modules' attributes, or the value itself, is the same object in the copy.

    Args:
        memo: of `copy.deepcopy`.
    """
    given = dict(memo or {})
    memo = {} if memo is None else memo
    try:
        return copy.deepcopy(value, memo)
    except _REFUSALS:
        if not isinstance(value, nn.Module):
            return value
        modules = list(value.modules())
        held = {id(t): t for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        known = {**held, **{id(m): m for m in modules}, **given}
        memo.clear()
        memo.update(given)
        memo.update((id(v), v) for m in modules for each in vars(m).values() for v in _refused(each, known))
        return copy.deepcopy(value, memo)


def _refused(value: Any, known: dict[int, Any]) -> Iterator[Any]:
    """What is not copied of a value, looked for in lists, tuples and dicts."""
    try:
        copy.deepcopy(value, dict(known))
    except _REFUSALS:
        inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        found = [each for part in inside for each in _refused(part, known)]
        yield from found or [value]
