"""Whose class an object is of: how errors name it, and whether it is TorchRec's, which is not imported for that."""

from __future__ import annotations

from typing import Any


def type_name(value: Any) -> str:
    """The class of a value, or a class itself, as an error names it: with its module, which tells two of one name."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_torchrecs(value: Any, *names: str) -> bool:
    """Whether a value is of one of the classes of TorchRec that have these names, or of a subclass."""
    return any(kind.__name__ in names and kind.__module__.startswith("torchrec.") for kind in type(value).__mro__)
