"""`without_collection`: a stretch of work that makes many objects that stay, without looking for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """For wrapping or planning a thousand tables: each full collection on the way costs 0.3 s; and for what destructors
    must not run in, see stacks.py."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
