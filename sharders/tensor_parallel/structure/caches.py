"""What functions of a model's code keep by `functools.lru_cache`, and a run on meta or of random weights leaves there.

[Note: caches] A table of positions that is kept for a shape would be kept on meta, and torch reads memory that is not
its own where a tensor of the CPU is indexed by one on meta: the next real forward, or the next copy that is tried, gave
numbers of no meaning, without an error. So what such a run leaves behind is let go of.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NOT_OF_MODELS = ("torch", "sympy")
"""Packages whose caches know what they keep."""


@contextmanager
def forgetful() -> Iterator[None]:
    """Caches with tensors that something was put into within are cleared, of all they hold: one key cannot be. Others
    stay: what a function drew once may be meant to stay as it is.
    """
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(id(cache), 0) and _holds_tensor(cache):
                cache.cache_clear()


def _caches() -> list[Any]:
    return [cache for ref in _known(len(sys.modules)) if (cache := ref()) is not None]


@functools.lru_cache(maxsize=1)
def _known(modules: int) -> list[weakref.ref[Any]]:
    """All there are, looked for again where more modules were imported: that takes some 40 ms. None is kept alive: that
    of a bound method holds a model.
    """
    kind = type(_known)
    every = (x for x in gc.get_objects() if type(x) is kind)
    of_models = (x for x in every if str(getattr(x, "__module__", "")).partition(".")[0] not in _NOT_OF_MODELS)
    return [weakref.ref(x) for x in of_models]


def _holds_tensor(cache: Any) -> bool:
    held = gc.get_referents(cache)
    inside = gc.get_referents(*(x for x in held if isinstance(x, tuple | list | dict)))
    return any(isinstance(x, torch.Tensor) for x in (*held, *inside))
