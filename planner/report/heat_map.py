"""Which table is where: ranks across, tables down, as a heat map; many of either are put together in buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.svg import Matrix, cells, drawing, levels, scale, text
from planner.report.words import apart, milliseconds, plural, shortened

_COLUMNS = 128
_NAMED = 64
"""Up to so many tables each have a row with a name."""
_ROWS = 120
_LEFT = 190
_WIDTH = 1060
_TOP = 44


class HeatMap(NamedTuple):
    """What is where.

    Args:
        picture: text of SVG.
        seconds: (rows, columns) of a step, on a rank of the column, by the tables of the row; mean over its ranks.
        bytes: the same of memory.
        rows: what each row is.
        columns: what each column is.
        box: left, top, width and height of a cell.
    """

    picture: str
    seconds: Matrix
    bytes: Matrix
    rows: list[str]
    columns: list[str]
    box: tuple[float, float, float, float]


def heat_map(f: Figures) -> HeatMap:
    """The heat map of a report that has tables."""
    order, row_of, rows = _rows(f)
    ranks = len(f.rank_bytes)
    width = _bucket_of_ranks(f, ranks)
    edges = [*range(0, ranks, width)]
    seconds, sizes = (_summed(f, row_of, len(rows), values, width) for values in _values(f))
    wide = min(100.0, (_WIDTH - _LEFT) / len(edges))
    high = 15.0 if len(order) <= _NAMED else max(3.0, 480 // len(rows))
    xs, ys = [_LEFT + wide * i for i in range(len(edges))], [_TOP + high * i for i in range(len(rows))]
    gap = 1 if wide >= 8 and high >= 8 else 0
    drawn = []
    for index, (values, shown) in enumerate(((seconds, milliseconds), (sizes, shown_bytes))):
        most = float(values.max(initial=0))
        inner = cells(levels(values, most, is_root=True), xs, ys, wide - gap, high - gap)
        drawn.append(f'<g class="shade m{index}">{inner}{scale(_LEFT + 20, 4, "0", shown(most))}</g>')
    columns = [_column(f, first, min(first + width, ranks) - 1) for first in edges]
    drawn += [_row_labels(f, rows, order, row_of, ys, high), _column_labels(columns, xs, wide)]
    drawn.append('<rect class="pointed" width="0" height="0"/>')
    picture = drawing(_WIDTH, ys[-1] + high + 6, "".join(drawn), "which table is on which rank", "heat")
    return HeatMap(picture, seconds, sizes, rows, columns, (_LEFT, _TOP, wide, high))


def _values(f: Figures) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return f.planned.pieces.seconds, f.planned.pieces.bytes


def _bucket_of_ranks(f: Figures, ranks: int) -> int:
    """Ranks in a column: one, or so many whole hosts that there are few enough columns."""
    if ranks <= _COLUMNS:
        return 1
    local = ranks // f.setting.hosts if f.setting.hosts > 1 else 1
    return local * -(-ranks // (local * _COLUMNS))


def _rows(f: Figures) -> tuple[list[int], NDArray[np.int64], list[str]]:
    """Tables in the order of the map, the row of each table, and what each row is.

    By layout, that with most work first, then by where they begin: so that the map shows how layouts share the ranks.
    """
    p = f.planned
    first = np.full(len(p.names), np.iinfo(np.int32).max)
    np.minimum.at(first, p.pieces.owner, p.pieces.first)
    kinds: dict[str, list[int]] = {}
    for index in p.by_work():
        kinds.setdefault(p.layouts[index].name, []).append(index)
    per_row = 1 if len(p.names) <= _NAMED else -(-len(p.names) // _ROWS)
    order: list[int] = []
    rows: list[str] = []
    row_of = np.zeros(len(p.names), dtype=np.int64)
    for kind, members in kinds.items():
        members.sort(key=lambda i: (int(first[i]), i))
        for start in range(0, len(members), per_row):
            chosen = members[start : start + per_row]
            row_of[chosen] = len(rows)
            more = f" and {len(chosen) - 1} more" * (len(chosen) > 1)
            rows.append(f"{p.names[chosen[0]]}{more}, {kind}")
            order += chosen
    return order, row_of, rows


def _summed(f: Figures, row_of: NDArray[np.int64], rows: int, values: NDArray[np.float32], width: int) -> Matrix:
    """(rows, buckets of ranks): what pieces put on a rank, mean over the bucket."""
    pieces, ranks = f.planned.pieces, len(f.rank_bytes)
    steps = np.zeros((rows, ranks + 1))
    row = row_of[pieces.owner]
    np.add.at(steps, (row, pieces.first), values)
    np.add.at(steps, (row, pieces.first + pieces.size), -values.astype(np.float64))
    held = np.cumsum(steps, axis=1)[:, :-1]
    edges = np.arange(0, ranks, width)
    counts = np.diff(np.append(edges, ranks))
    found: Matrix = np.add.reduceat(held, edges, axis=1) / counts
    return np.where(found > values.max(initial=0) * 1e-9, found, 0.0)  # what sums left over


def _column(f: Figures, first: int, last: int) -> str:
    local = len(f.rank_bytes) // f.setting.hosts
    if first == last:
        return f"rank {first}" + f" (host {first // local})" * (f.setting.hosts > 1)
    hosts = f" ({_span('host', first // local, last // local)})" * (f.setting.hosts > 1)
    return f"ranks {first}-{last}{hosts}"


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _row_labels(
    f: Figures, rows: list[str], order: list[int], row_of: NDArray[np.int64], ys: list[float], high: float
) -> str:
    p = f.planned
    if len(order) <= _NAMED:
        names, _ = apart(p.names, 28)
        named = ((ys[i] + high - 4, shortened(names[index], 28)) for i, index in enumerate(order))
        return "".join(text(_LEFT - 8, y, name, "label", "end") for y, name in named)
    found, kinds = [], [row.rpartition(", ")[2] for row in rows]
    counts = np.bincount(row_of, minlength=len(rows))
    below = 0.0
    for kind in dict.fromkeys(kinds):
        mine = [i for i, each in enumerate(kinds) if each == kind]
        middle = max(below + 14, (ys[mine[0]] + ys[mine[-1]] + high) / 2 + 4)
        words = f"{kind}: {plural(int(counts[mine].sum()), 'table')}"
        found.append(text(_LEFT - 8, middle, shortened(words, 30), "label", "end"))
        below = middle
    return "".join(found)


def _column_labels(columns: list[str], xs: list[float], wide: float) -> str:
    each = max(1, -(-110 // int(max(1, wide)))) if len(columns) > 16 else max(1, -(-40 // int(wide)))
    found = []
    for i in range(0, len(columns), each):
        words = columns[i].partition(" (")[0]
        short = words.replace("ranks ", "").partition("-")[0].replace("rank ", "")
        found.append(text(xs[i], _TOP - 6, f"rank {short}" if i == 0 else short, "quiet"))
    return "".join(found)
