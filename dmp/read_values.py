"""Values that came out of a file, from whoever wrote it: JSON as the standard says, what they can stand for, and how an
error shows them.

JSON may be nested without end, a number too long to be printed: each is an error here, before anything relies on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from reprlib import Repr
from typing import Any

_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """A value from a file as an error may show it: neither long nor deep."""
    try:
        return _repr.repr(value)
    except Exception:  # such as an integer of too many digits
        return f"a {type(value).__name__}"


def some(names: Sequence[str], count: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - count
    return ", ".join(map(repr, names[:count])) + (f" and {more:,} more" if more > 0 else "")


def parse_json(text: str | bytes, parse_int: Callable[[str], Any] | None = None) -> Any:
    """As the standard says: no NaN, no key twice, and not nested without end.

    Args:
        parse_int: as of `json.loads`.

    Raises:
        ValueError: saying what is wrong.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return json.loads(text, object_pairs_hook=_unique, parse_int=parse_int, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


def is_size(value: Any) -> bool:
    """Whether it is an integer that a size, an offset or a place in a file can be."""
    return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: Any) -> bool:
    """Whether it is a list of such integers whose elements can be counted."""
    if not isinstance(value, (list, tuple)) or not all(map(is_size, value)):
        return False
    return all(count < 1 << 62 for count in accumulate((n or 1 for n in value), mul))
