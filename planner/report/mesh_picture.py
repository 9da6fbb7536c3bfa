"""The mesh as a picture: hosts and their ranks as cells, coloured by time, by memory or by one phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.svg import LEVELS, Matrix, cells, drawing, levels, scale, text
from planner.report.words import milliseconds

_WIDTH = 1060
_HEIGHT = 420
_SIZES = (36, 28, 22, 18, 14, 11, 9, 7, 5, 4, 3)
_NUMBERED = 28
"""Pixels that a cell needs for its rank's number."""
_SPOKEN = 84
"""For its value too."""
_HOST_ROWS = 8
"""Up to so many hosts each have a row; more are blocks side by side."""


class Grid(NamedTuple):
    """Where ranks are in the picture: a block of cells for each host, blocks in rows. Lengths are pixels."""

    hosts: int
    local: int
    across: int
    """Cells of a block side by side."""
    blocks: int
    """Blocks side by side."""
    wide: int
    """Of a cell, with its share of the gaps."""
    high: int
    gap: int
    """Between blocks."""
    left: int
    top: int = 34

    @classmethod
    def of(cls, hosts: int, local: int) -> Grid:
        """For so many hosts of so many ranks: the largest cells that fit."""
        if hosts == 1:
            across = min(local, 8 if local <= 32 else 1 << int(np.ceil(np.log2(local * 2.5) / 2)))
            shapes, gap, left = [(across, 1)], 0, 0
        elif hosts <= _HOST_ROWS and local <= 64:
            shapes, gap, left = [(local, 1)], 8, 64
        else:
            across = next(n for n in range(int(np.ceil(local**0.5)), local + 1) if local % n == 0)
            shapes, gap, left = [(across, n) for n in range(hosts, 0, -1)], 4, 0
        wide = min(150, (_WIDTH - left) // shapes[0][0])
        if len(shapes) == 1 and wide >= _SPOKEN:
            return cls(hosts, local, *shapes[0], wide, 44, gap, left)
        for size in _SIZES:
            for across, blocks in shapes:
                width = left + blocks * (across * size + gap)
                height = -(-hosts // blocks) * (-(-local // across) * size + gap)
                if width <= _WIDTH and height <= _HEIGHT:
                    return cls(hosts, local, across, blocks, size, size, gap, left)
        return cls(hosts, local, *shapes[0], _SIZES[-1], _SIZES[-1], gap, left)

    @property
    def down(self) -> int:
        """Cells of a block under each other."""
        return -(-self.local // self.across)

    @property
    def inset(self) -> int:
        """Gap between cells."""
        return 3 if self.high >= _NUMBERED else 1 if self.high >= 14 else 0

    def columns(self) -> list[float]:
        """Left edge of each column of cells."""
        step = self.across * self.wide + self.gap
        return [self.left + b * step + c * self.wide for b in range(self.blocks) for c in range(self.across)]

    def rows(self) -> list[float]:
        """Top edge of each row of cells."""
        step = self.down * self.high + self.gap
        blocks = -(-self.hosts // self.blocks)
        return [self.top + b * step + r * self.high for b in range(blocks) for r in range(self.down)]

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each rank's cell."""
        host, local = np.divmod(np.arange(self.hosts * self.local), self.local)
        row = host // self.blocks * self.down + local // self.across
        return row, host % self.blocks * self.across + local % self.across

    def matrix(self, values: NDArray[np.float64]) -> Matrix:
        """(rows, columns) of cells from a value of each rank; -1 where none is."""
        found = np.full((-(-self.hosts // self.blocks) * self.down, self.blocks * self.across), -1.0)
        found[self.places()] = values
        return found


def mesh_picture(f: Figures) -> tuple[str, list[str], Grid]:
    """The picture, the names of what it can be coloured by, and where ranks are in it."""
    ranks = len(f.rank_bytes)
    hosts = f.setting.hosts if ranks % f.setting.hosts == 0 else 1
    grid = Grid.of(hosts, ranks // hosts)
    xs, ys = grid.columns(), grid.rows()
    drawn, names = [], []
    for index, (name, values, most, high, words) in enumerate(_shown(f)):
        level = levels(grid.matrix(values), most)
        inner = cells(level, xs, ys, grid.wide - grid.inset, grid.high - grid.inset)
        inner += _in_cells(grid, level, values, words) + scale(40, 4, "0", high)
        drawn.append(f'<g class="shade m{index}">{inner}</g>')
        names.append(name)
    step = grid.down * grid.high + grid.gap
    if grid.left:
        drawn += [text(0, grid.top + h * step + grid.high / 2 + 3, f"host {h}", "quiet") for h in range(grid.hosts)]
    drawn.append('<rect class="pointed" width="0" height="0"/>')
    width = max(420, xs[-1] + grid.wide + 4)
    label = f"{ranks} ranks on {hosts} hosts, coloured by load"
    return drawing(width, ys[-1] + grid.high + 4, "".join(drawn), label, "mesh"), names, grid


def _shown(f: Figures) -> list[tuple[str, NDArray[np.float64], float, str, Callable[[float], str]]]:
    """What the picture can be coloured by: name, value of each rank, what is darkest, that in words, and how to say."""
    total, usable = f.rank_seconds.sum(1), float(f.usable_bytes)
    found = [
        ("time of tables", total, float(total.max(initial=0)), "", milliseconds),
        ("memory", f.rank_bytes.astype(np.float64), usable, f"{shown_bytes(usable)} usable", shown_bytes),
    ]
    for phase, seconds in zip(f.phases, f.rank_seconds.T, strict=True):
        found += [(phase, seconds, float(seconds.max()), "", milliseconds)] * bool(seconds.any())
    return [(name, values, most, high or say(most), say) for name, values, most, high, say in found]


def _in_cells(grid: Grid, level: NDArray[np.int64], values: NDArray[np.float64], say: Callable[[float], str]) -> str:
    """The rank's number in its cell, and its value, where there is room."""
    if grid.wide < _NUMBERED:
        return ""
    xs, ys = grid.columns(), grid.rows()
    found = []
    for rank, (row, column) in enumerate(zip(*grid.places(), strict=True)):
        style = "on" if level[row, column] > LEVELS // 2 else ""
        x, y = xs[column] + (grid.wide - grid.inset) / 2, ys[row] + grid.high / 2
        if grid.wide >= _SPOKEN:
            found.append(text(x, y - 4, f"rank {rank}", f"{style} small".strip(), "middle"))
            found.append(text(x, y + 12, say(float(values[rank])), style, "middle"))
        else:
            found.append(text(x, y + 3, str(rank), f"{style} small".strip(), "middle"))
    return "".join(found)
