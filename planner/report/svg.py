"""Shapes of the page's pictures, as text of SVG. Colours are classes of its style, so that they follow its theme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

LEVELS = 8
Matrix = NDArray[np.float64]


def number(value: float) -> str:
    """A coordinate, no longer than it must be."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """A rectangle; one without width is nothing."""
    if width <= 0:
        return ""
    size = f'x="{number(x)}" y="{number(y)}" width="{max(0.1, width):.1f}" height="{number(height)}"'
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect class="{style}" {size}{inner}'


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Text on a base line."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{number(x)}" y="{number(y)}"{at}>{escape(words)}</text>'


def drawing(width: float, height: float, inner: str, label: str, identity: str = "") -> str:
    """The whole picture, as wide as its place and at most `width` pixels."""
    named = f' id="{identity}"' if identity else ""
    return (
        f'<svg xmlns="urn:svg" class="picture"{named} viewBox="0 0 {number(width)} {number(height)}" '
        f'style="max-width:{number(width)}px" role="img" aria-label="{escape(label)}">{inner}</svg>'
    ).replace(' xmlns="urn:svg"', "")


def levels(values: Matrix, most: float, *, is_root: bool = False) -> NDArray[np.int64]:
    """0 for nothing, -1 for less; else 1 to `LEVELS`, as part of `most` or the square root of that."""
    part = values / most if most > 0 else np.zeros_like(values)
    if is_root:
        part = np.sqrt(np.maximum(part, 0))
    found = np.clip(np.ceil(part * LEVELS), 1, LEVELS).astype(np.int64)
    return np.where(values > 0, found, np.where(values < 0, -1, 0))


def cells(level: NDArray[np.int64], xs: Sequence[float], ys: Sequence[float], width: float, height: float) -> str:
    """A matrix of cells, one path for each level; neighbours of one level that touch are one rectangle.

    Args:
        level: (rows, columns), -1 for no cell.
        xs: left edge of each column.
        ys: top edge of each row.
    """
    drawn: dict[int, list[str]] = {}
    touches = np.isclose(np.diff(np.array(xs)), width)
    for row, y in zip(level, ys, strict=True):
        ends = np.flatnonzero(np.append((row[1:] != row[:-1]) | ~touches, True))
        start = 0
        for end in ends.tolist():
            value = int(row[start])
            if value >= 0:
                wide = number(xs[end] - xs[start] + width)
                drawn.setdefault(value, []).append(f"M{number(xs[start])} {number(y)}h{wide}v{number(height)}h-{wide}z")
            start = end + 1
    return "".join(f'<path class="l{value}" d="{"".join(parts)}"/>' for value, parts in sorted(drawn.items()))


def scale(x: float, y: float, low: str, high: str) -> str:
    """The colours of the levels from left to right, between two words."""
    steps = "".join(rect(x + 18 * i, y, 18, 10, f"l{i + 1}") for i in range(LEVELS))
    return text(x - 6, y + 9, low, "quiet", "end") + steps + text(x + 18 * LEVELS + 6, y + 9, high, "quiet")
