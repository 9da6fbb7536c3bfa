"""Objects of whatever class: how errors name it, whether it is TorchRec's, which is not imported for that, and what an
attribute holds.
"""

from __future__ import annotations

from typing import Any


def type_name(value: Any) -> str:
    """The class of a value, or a class itself, as an error names it: with its module, which tells two of one name."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_torchrecs(value: Any, *names: str) -> bool:
    """Whether a value is of one of the classes of TorchRec that have these names, or of a subclass."""
    return any(kind.__name__ in names and kind.__module__.startswith("torchrec.") for kind in type(value).__mro__)


def attribute_of(holder: Any, name: str) -> Any:
    """An attribute, or the entry of a dict; None where there is none, or where looking raises whatever it may: some
    configurations have no one answer for all layers.
    """
    if isinstance(holder, dict):
        return holder.get(name)
    try:
        return getattr(holder, name, None)
    except Exception:
        return None
