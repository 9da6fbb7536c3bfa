"""The load of all ranks in order, phases stacked: where the ranks are uneven, and which phase makes them so."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from planner.report.figures import Figures
from planner.report.svg import drawing, number, text
from planner.report.words import milliseconds

_WIDTH, _LEFT, _HIGH, _TOP = 1060, 60, 130, 16
_BINS = 500


def profile(f: Figures, styles: dict[str, str]) -> str:
    """A picture as wide as the page; of more ranks than fit, each step is the busiest of some neighbours.

    Args:
        styles: phase -> class of its colour.
    """
    total = f.rank_seconds.sum(1)
    ranks, most = len(total), float(total.max(initial=0))
    if most <= 0:
        return ""
    edges = np.unique(np.linspace(0, ranks, min(ranks, _BINS) + 1).astype(np.int64))
    busiest = [int(a + total[a:b].argmax()) for a, b in pairwise(edges.tolist())]
    wide = (_WIDTH - _LEFT) / ranks
    base = np.zeros(len(busiest))
    drawn = []
    for name, seconds in zip(f.phases, f.rank_seconds[busiest].T, strict=True):
        if seconds.any():
            top = base + seconds / most * _HIGH
            drawn.append(f'<path class="{styles[name]}" d="{_band(edges, base, top, wide)}"/>')
            base = top
    mean = _TOP + _HIGH * (1 - float(total.mean()) / most)
    drawn.append(f'<path class="mark dashed" d="M{_LEFT} {number(mean)}H{_WIDTH}"/>')
    drawn.append(text(_LEFT - 6, _TOP + 8, milliseconds(most), "quiet", "end"))
    if mean > _TOP + 22:
        drawn.append(text(_LEFT - 6, mean + 4, "mean", "quiet", "end"))
    drawn.append(text(_LEFT, _TOP + _HIGH + 14, "rank 0", "quiet"))
    drawn.append(text(_WIDTH, _TOP + _HIGH + 14, f"rank {ranks - 1}", "quiet", "end"))
    return drawing(_WIDTH, _TOP + _HIGH + 20, "".join(drawn), "time of each rank by phase")


def _band(edges: np.ndarray, low: np.ndarray, high: np.ndarray, wide: float) -> str:
    """Steps along the upper edge, and back along the lower one."""
    xs = [number(_LEFT + wide * float(edge)) for edge in edges]
    up = [number(_TOP + _HIGH - float(y)) for y in high]
    down = [number(_TOP + _HIGH - float(y)) for y in low]
    steps = [f"M{xs[0]} {up[0]}"]
    steps += [f"H{xs[i + 1]}" + (f"V{up[i + 1]}" if i + 1 < len(up) else f"V{down[i]}") for i in range(len(up))]
    steps += [f"H{xs[i]}" + (f"V{down[i - 1]}" if i else "") for i in range(len(down) - 1, -1, -1)]
    return "".join(steps) + "z"
