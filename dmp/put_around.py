"""How a function of another package is stood in for: by one of ours that is given it, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def put_around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `owner.name(...)` be `around(own, ...)` from now on, where `own` is what it was.

    Args:
        owner: a module or a class.
    """
    own = getattr(owner, name)

    @wraps(own)
    def stand_in(*args: Any, **options: Any) -> Any:
        return around(own, *args, **options)

    setattr(owner, name, stand_in)
