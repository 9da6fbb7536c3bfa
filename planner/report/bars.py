"""Rows of stacked bars: groups of ranks, dense blocks, phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.report.svg import drawing, number, rect, text
from planner.report.words import shortened

_WIDTH = 1060
_LABEL = 210
_VALUE = 150
_ROW = 24
_TOP = 22

Part = tuple[str, float, str]
"""Class of its colour, size, and what it is."""


class Bar(NamedTuple):
    """One stacked bar: its parts, and its value in words behind it."""

    parts: Sequence[Part]
    value: str
    mark: float = 0.0
    """Where a line crosses it; 0 for none."""


def bars(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[Bar]]], most: Sequence[float], label: str) -> str:
    """A row for each label, with a bar in each column.

    Args:
        titles: of the columns.
        most: what is as wide as each column.
        label: what the picture shows.
    """
    count = len(titles)
    wide = (_WIDTH - _LABEL) / count
    room = wide - _VALUE
    drawn = [text(_LABEL + wide * i, 12, title, "head") for i, title in enumerate(titles)]
    for index, (name, columns) in enumerate(rows):
        y = _TOP + _ROW * index
        drawn.append(text(0, y + 13, shortened(name, 32), "label"))
        for column, bar in enumerate(columns):
            left = _LABEL + wide * column
            drawn.append(rect(left, y + 2, room, 15, "rail"))
            x = left
            for style, size, words in bar.parts:
                long = min(size / most[column] * room if most[column] > 0 else 0.0, left + room - x)
                drawn.append(rect(x, y + 2, long, 15, style, words))
                x += max(0.0, long)
            if bar.mark > 0 and most[column] > 0:
                at = number(left + min(1.0, bar.mark / most[column]) * room)
                drawn.append(f'<path class="mark" d="M{at} {y}v19"/>')
            drawn.append(text(left + room + 8, y + 13, bar.value, "value"))
    return drawing(_WIDTH, _TOP + _ROW * len(rows) + 2, "".join(drawn), label)


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Colours and what they are, in lines of HTML that wrap."""
    items = "".join(f'<span><i class="{style}"></i>{name}</span>' for style, name in names)
    return f'<p class="legend">{items}</p>'
