"""What the server of the ranks has imported, and what ranks have before a call, stays: collections of garbage need not
look at it.

The server imports this file last, for it looks at each object: a worker that did would copy all of the memory that it
shares.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

_LRU = type(functools.lru_cache(repr))
_unfrozen = gc.get_objects
_function_caches: weakref.WeakSet[Any] = weakref.WeakSet()


def freeze() -> None:
    """Leave what is there out of collections, and of what `gc.get_objects` finds but for functions' caches."""
    _function_caches.update(x for x in _unfrozen() if type(x) is _LRU)
    gc.freeze()


def _objects(generation: int | None = None) -> list[Any]:
    """Those that are not frozen, and functions' caches, for which our code looks.

    No list is made before, in which it would find itself: it would live on, and all that it holds.
    """
    found = _unfrozen(generation)
    if generation is None:
        found.extend(_function_caches)
    return found


gc.get_objects = _objects  # type: ignore[assignment]
gc.enable()  # see tests/importing.py
gc.collect()
freeze()
