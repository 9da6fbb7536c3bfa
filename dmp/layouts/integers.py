"""Integers that a person writes as a layout's arguments, checked: each error names what was expected and what came."""

from __future__ import annotations

from operator import index
from typing import Any

from dmp.errors import ShardError
from dmp.read_values import shown

LIMIT = 1 << 62
"""Above any count of elements or ranks."""


def number(what: str, value: Any) -> int:
    """One integer >= 0.

    Raises:
        ShardError: anything else; so for each function here.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LIMIT:
        raise ShardError(f"{what} must be an integer >= 0; got {shown(value)}")
    return value


def numbers(what: str, of: str, values: Any) -> tuple[int, ...]:
    """Several integers >= 0."""
    try:
        items = tuple(values)
    except TypeError:
        raise ShardError(f"{what} must be a list of {of}; got {shown(values)}") from None
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) < LIMIT:
        return items  # there may be thousands
    return tuple(number(f"each of {what}", v) for v in items)


def integers(what: str, values: Any) -> tuple[int, ...]:
    """Several integers of any sign, NumPy's and torch's too."""
    try:
        items = tuple(values)
        if set(map(type, items)) == {int} and min(items) > -LIMIT and max(items) < LIMIT:
            return items  # there may be thousands
        found = tuple(map(index, items))
        if any(isinstance(item, bool) or abs(i) >= LIMIT for item, i in zip(items, found, strict=True)):
            raise TypeError
        return found
    except TypeError:
        raise ShardError(f"{what} must be a list of integers; got {shown(values)}") from None


def rank(value: Any) -> int:
    """A table rank."""
    return number("a rank", value)


def ranks(values: Any) -> tuple[int, ...]:
    """Table ranks, at least one."""
    found = numbers("ranks", "ranks", values)
    if not found:
        raise ShardError("a layout needs at least one rank; got none")
    return found
