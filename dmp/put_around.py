"""How a function of another package is stood in for: by one of ours that is given it, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper, wraps
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


def put_inside(function: Any, around: Callable[..., Any]) -> None:
    """The same of a decorator's wrapper, around what is in it: it stays the object that others have imported by name.

    Args:
        function: whose `__wrapped__` is in a cell of its own.
    """
    own = function.__wrapped__
    cell = next(cell for cell in function.__closure__ if cell.cell_contents is own)
    cell.cell_contents = update_wrapper(partial(around, own), own)
