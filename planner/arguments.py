"""What a user passes to the planner, checked one by one: numbers and names."""

from __future__ import annotations

from numbers import Real
from typing import Any

from dmp import shown


def is_number(value: Any, *, least: float = 0.0) -> bool:
    """Whether it is a real number above `least`, which may be infinite; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return float(value) > least
    except OverflowError:
        return False


def positive(what: str, value: Any) -> None:
    """Raise `ValueError` unless it is a number > 0."""
    if not is_number(value):
        raise ValueError(f"{what} must be positive, a number; got {shown(value)}")


def names(what: str, value: Any) -> tuple[str, ...] | None:
    """One name or several as a tuple.

    Raises:
        ValueError: anything else.
    """
    if value is None:
        return None
    try:
        several = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        several = (None,)
    if not all(isinstance(name, str) for name in several):
        raise ValueError(f"{what} must be names of layouts such as 'row_wise'; got {shown(value)}")
    return several
