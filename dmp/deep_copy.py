"""Deep copies of modules that hold what Python does not copy: groups of ranks, locks, open files, writers of logs.

Such a module trains as it is, and under DDP. Its copies, made here for a look or to be unsharded, share it with it. A
user's own object with a lock inside (a cache, a memory of past samples) is state that both write then, which is said.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from dmp.names import join_name
from dmp.ranks.saying import say_once

_REFUSALS = (TypeError, ValueError)
"""`cannot pickle '_thread.lock' object`, and of ctypes."""


def deep_copy(value: Any, memo: dict[int, Any] | None = None, *, is_to_keep: bool = False) -> Any:
    """`copy.deepcopy`, but what it refuses in modules' attributes, or in the value, is the same object in the copy.

    Args:
        memo: of `copy.deepcopy`.
        is_to_keep: a user keeps the copy, and is told what of the user's own it shares.
    """
    given = dict(memo or {})
    memo = {} if memo is None else memo
    try:
        return copy.deepcopy(value, memo)
    except _REFUSALS:
        modules = list(value.named_modules()) if isinstance(value, nn.Module) else []
        held = (t for _, m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        known = {**{id(t): t for t in held}, **{id(m): m for _, m in modules}, **given}
        attributes = [(join_name(path, name), each) for path, m in modules for name, each in vars(m).items()]
        found = ((name, v) for name, each in attributes or [("", value)] for v in _refused(each, known))
        shared = {id(v): (name, v) for name, v in found}
        for name, each in shared.values():
            if is_to_keep and _is_own(type(each)):
                say_once(
                    f"a copy of {type(value).__name__} shares {name!r} ({type(each).__name__}) with the model, for "
                    "Python does not copy it: what one of them writes there, the other reads",
                    by_first=True,
                )
        memo.clear()
        memo.update(given)
        memo.update((key, v) for key, (_, v) in shared.items())
        return copy.deepcopy(value, memo)


def _is_own(kind: type) -> bool:
    """Whether a class is a user's: locks, files, queues and groups of ranks are there to be shared."""
    is_pythons = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return not is_pythons and not kind.__module__.startswith(("torch._C", "torch.distributed"))


def _refused(value: Any, known: dict[int, Any]) -> Iterator[Any]:
    """What is not copied of a value, looked for in lists, tuples and dicts."""
    try:
        copy.deepcopy(value, dict(known))
    except _REFUSALS:
        inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        found = [each for part in inside for each in _refused(part, known)]
        yield from found or [value]
