"""Values and sizes as a person reads them."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any


def shown(value: Any) -> str:
    """As an error may show it: not long."""
    try:
        return short(value)
    except ValueError:  # an integer of too many digits
        return f"a {type(value).__name__} of thousands of digits"


def show_bytes(size: float) -> str:
    """A size that a person reads."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
