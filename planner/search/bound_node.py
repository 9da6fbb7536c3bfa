"""`Node`: a part of all plans, what it costs at least, and how it splits in two. Pure, as `planner.search`.

A node is the plans in which items of each group take one of the columns left to it, each phase takes a time between
`low` and `high` (of what is not the same on every rank), and no set-up but `allowed` ones is used; those of `paid` are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.bound_columns import Columns
from planner.search.bound_programme import Programme, Relaxed, solve
from planner.search.cost_table import Array, Integers

_ROUNDS = 3
_EXACT = 1e-3
"""Of the step: by how much a piece may take longer than its phase."""
_AIMS = np.array([0.1, 0.3, 0.5, 0.75, 1.0])
"""Where between a phase's time and the largest piece in use a node is split."""


class Frame(NamedTuple):
    """What all nodes share.

    Args:
        columns: see [Note: columns].
        work: (columns, phases + 1) mean and size.
        base: (phases + 1,) mean of what is there already above the idlest rank's; then -1.
        upper: seconds of a plan; nobody cares for what costs more.
        setups: (kinds,) seconds.
    """

    columns: Columns
    work: Array
    base: Array
    upper: float
    setups: Array


class Node(NamedTuple):
    """See the top of the file.

    Args:
        value: seconds at least.
        rows: columns left, by group.
        start: (groups,) first of each among `rows`.
        items: (groups,) how many there are of each.
        low: (phases,) seconds.
        high: (phases,) seconds.
        paid: set-ups used, a bit each.
        allowed: set-ups that may be used.
        relaxed: its optimum when items are shared out; of `rows`.
    """

    value: float
    rows: Integers
    start: Integers
    items: Array
    low: Array
    high: Array
    paid: int
    allowed: int
    relaxed: Relaxed | None = None

    @property
    def group(self) -> Integers:
        """(rows,) group of each."""
        return np.repeat(np.arange(len(self.start)), np.diff(np.append(self.start, len(self.rows))))


def keep(node: Node, kept: NDArray[np.bool_]) -> Node | None:
    """The node with some of its columns; None where a group has none left."""
    if kept.all():
        return node
    left = np.add.reduceat(kept, node.start, dtype=np.int64)
    if not left.all():
        return None
    relaxed = node.relaxed and node.relaxed._replace(share=node.relaxed.share[kept])
    return node._replace(rows=node.rows[kept], start=np.cumsum(left) - left, relaxed=relaxed)


def settle(frame: Frame, node: Node) -> Node | None:
    """The node with its bound, rid of what cannot be better than `frame.upper`; None where nothing is left."""
    barred = (frame.columns.kinds[node.rows] & ~node.allowed) != 0
    found = keep(node, ~barred)
    for _ in range(_ROUNDS):
        found = found and _narrow(frame, found)
        if found is None:
            return None
        paid = _paid(frame, found)
        limit = frame.upper - paid
        programme = _programme(frame, found)
        relaxed = solve(programme, limit, found.relaxed and found.relaxed.price)
        value, reduced = programme.value(relaxed.price)
        if value >= limit:
            return None
        # what an item costs at least with each column: the phases that its piece prolongs are paid for that
        rest = 1 - relaxed.price[:-1]
        piece = frame.columns.piece[found.rows]
        single = value + reduced + np.maximum(piece - found.low, 0) @ np.maximum(rest, 0)
        least = float(np.minimum.reduceat(single, found.start).max())
        spare = limit - value
        with np.errstate(divide="ignore", over="ignore"):
            high = np.where(rest > 1e-9, found.low + spare / np.maximum(rest, 1e-300), np.inf)
            low = np.where(rest < -1e-9, found.high - spare / np.maximum(-rest, 1e-300), 0)
        before = len(found.rows)
        found = found._replace(
            value=max(node.value, max(value, least) + paid),
            low=np.maximum(found.low, low),
            high=np.minimum(found.high, high),
            relaxed=relaxed,
        )
        found = keep(found, single < limit)
        if found is None or len(found.rows) > 0.8 * before:
            return found
    return found


def _paid(frame: Frame, node: Node) -> float:
    return sum(float(s) for kind, s in enumerate(frame.setups) if node.paid >> kind & 1)


def _programme(frame: Frame, node: Node) -> Programme:
    rows = node.rows
    every, work = frame.columns.every[rows], frame.work[rows]
    return Programme(every, work, node.start, node.items, frame.base, node.low, node.high)


def _narrow(frame: Frame, node: Node) -> Node | None:
    """Times raised to what some item needs whatever it takes, limits lowered, columns struck out, until all agree."""
    found: Node | None = node
    for _ in range(4):
        assert found is not None
        piece, every = frame.columns.piece[found.rows], frame.columns.every[found.rows]
        low = np.maximum(found.low, np.minimum.reduceat(piece, found.start, axis=0).max(0))
        least = np.minimum.reduceat(every, found.start)
        spare = frame.upper - _paid(frame, found) - float(found.items @ least)
        high = np.minimum(found.high, spare - (low.sum() - low))
        if (low > high).any():
            return None
        own = every - least[found.group]
        kept = (own + np.maximum(piece, low).sum(1) <= spare) & (piece <= high).all(1)
        is_same = kept.all() and (low <= found.low).all()
        found = keep(found._replace(low=low, high=high), kept)
        if found is None or is_same:
            return found
    return found


def split(frame: Frame, node: Node) -> tuple[Node, ...]:
    """Two nodes that are all of this one; none where it is exact."""
    assert node.relaxed is not None
    used = np.minimum(node.relaxed.share, 1.0)
    kinds = frame.columns.kinds[node.rows]
    for kind in range(len(frame.setups)):
        bit = 1 << kind
        if not node.paid & bit and node.allowed & bit and (used[(kinds & bit) > 0] > 1e-3).any():
            return node._replace(allowed=node.allowed & ~bit), node._replace(paid=node.paid | bit)
    found = _threshold(frame, node, used)
    if found is None:
        return _split_group(frame, node)
    phase, least = found
    below = keep(node, frame.columns.piece[node.rows, phase] < least)
    low = node.low.copy()
    low[phase] = max(low[phase], least)
    above = node._replace(low=low)
    return (above,) if below is None else (below, above)


def _threshold(frame: Frame, node: Node, used: Array) -> tuple[int, float] | None:
    """A phase and a size of piece: one node has smaller ones only, in the other the phase takes so long.

    Of the pieces in use that take longer than their phase, that is the one that makes both nodes dear. What the first
    costs more is known at the present prices; of the second, half of what the phase takes longer is a guess.
    """
    assert node.relaxed is not None
    relaxed, spare = node.relaxed, frame.upper - node.value
    piece = frame.columns.piece[node.rows]
    beyond = (piece - relaxed.seconds) * used[:, None]
    if beyond.max() <= _EXACT * frame.upper:
        return None
    reduced = _programme(frame, node).value(relaxed.price)[1]
    found: list[tuple[float, float, int, float]] = []
    for phase in np.flatnonzero(beyond.max(0) > _EXACT * frame.upper).tolist():
        sizes = np.unique(piece[beyond[:, phase] > _EXACT * frame.upper, phase])
        start, stop = relaxed.seconds[phase], sizes[-1]
        aims = np.searchsorted(sizes[:-1], start + (stop - start) * _AIMS)
        for least in np.unique(sizes[aims]).tolist():
            cost = np.where(piece[:, phase] < least, reduced, np.inf)
            below = float(node.items @ np.minimum.reduceat(cost, node.start))
            above = 0.5 * (least - start)
            found.append((min(below, above, spare), float(beyond[:, phase].max()), phase, least))
    _, _, phase, least = max(found)
    return phase, least


def _split_group(frame: Frame, node: Node) -> tuple[Node, ...]:
    """More than so many items of a group among its last columns, or not."""
    assert node.relaxed is not None
    share = node.relaxed.share
    cost = frame.work[node.rows]
    before = np.cumsum(share) - share
    before -= before[node.start][node.group]  # items of the group in earlier columns
    part = before - np.floor(before + 1e-6)
    part = np.where((part > 1e-3) & (part < 1 - 1e-3), np.minimum(part, 1 - part), 0)
    # how much the sides differ
    mean = np.add.reduceat(share[:, None] * cost, node.start, axis=0) / node.items[:, None]
    apart = np.add.reduceat(share * np.abs(cost - mean[node.group])[:, :-1].sum(1), node.start) / node.items
    score = part * apart[node.group]
    column = int(score.argmax())
    if score[column] <= 0:
        return ()
    group = int(node.group[column])
    first, stop = int(node.start[group]), int(np.append(node.start, len(node.rows))[group + 1])
    number = int(np.floor(before[column] + 1e-6))
    count = int(node.items[group])
    # at most `number` items before the column: the others have what follows; or one more
    return (
        _regroup(node, group, (column, stop, count - number), (first, stop, number)),
        _regroup(node, group, (first, column, number + 1), (first, stop, count - number - 1)),
    )


def _regroup(node: Node, group: int, *parts: tuple[int, int, int]) -> Node:
    """The node with a group in parts: each from one column to another, so many items."""
    ends = np.append(node.start, len(node.rows))
    pieces = [(int(ends[g]), int(ends[g + 1]), int(node.items[g])) for g in range(len(node.start))]
    pieces[group : group + 1] = [p for p in parts if p[2]]
    rows = np.concatenate([node.rows[a:b] for a, b, _ in pieces])
    length = np.array([b - a for a, b, _ in pieces])
    items = np.array([n for _, _, n in pieces], dtype=float)
    return node._replace(rows=rows, start=np.cumsum(length) - length, items=items, relaxed=None)
