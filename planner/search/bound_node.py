"""`Node`: a part of all plans, what it costs at least, and how it splits in two. Pure, as `planner.search`.

A node is the plans in which items of each group take one of the columns left to it, each phase takes a time between
`low` and `high` (of what is not the same on every rank), some sums of phases `together` at least, and no set-up but
`allowed` ones is used; those of `paid` are.

[Note: sums] Where a piece takes long in several phases, all of them take as long: together at least what it takes of
them together. A node split by that has no such pieces, or their sum to pay, where splits by each phase would make many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.bound_blocks import Blocks, tried
from planner.search.bound_columns import Columns
from planner.search.bound_counts import LEVELS, crowded, levels
from planner.search.bound_programme import Programme, Relaxed, solve
from planner.search.cost_table import Array, CostTable, Integers

_ROUNDS = 3
_EDGE = 1e-6
_JUST = 1e-6
_EXACT = 1e-3
"""Of the step: by how much a piece may take longer than its phase."""
_WORTH_SPLITTING = 2e-3
"""Of the step: a set-up that costs less is not asked about."""
_ANY = 1e-5
_UNUSED = 1e-2
_WHOLE = 0.02
_KNOWN = 1.5
"""Times its time in the relaxed optimum, about: a phase that is known to take no longer is counted."""
_SHORT = 0.7
"""Part of what there is that is taken: what is counted then may matter."""
_COUNTS = 4
"""Rows of a programme that count,"""
_COUNTED, _MANY = 8, 2000
"""so many columns for each group, and so many more."""
_LONGER = np.array([1.001, 1.01, 1.03, 1.07, 1.15, 1.3])
"""Times its time in the relaxed optimum, that a phase takes at most in one of two nodes."""
_GUESS, _OF_SUM = 0.5, 0.25
"""Part of what a phase takes longer by which a node may get dearer, and of what some take longer together."""
_CROSSED = np.arange(2, max(LEVELS) + 2)
"""Times the shortest piece: from there on one more lies beside each other than below."""
_AIMS = np.array([0.1, 0.3, 0.5, 0.75, 1.0])
"""Where between a phase's time and the largest piece in use a node is split."""


class Frame(NamedTuple):
    """What all nodes share.

    Args:
        columns: see [Note: columns].
        base: (phases + 1,) mean of what is there already above the idlest rank's; then -1.
        upper: seconds of a plan; nobody cares for what costs more.
        table: of the columns.
        span: (phases,) ranks that share each.
        room: bytes that the emptiest rank has.
        unit: (phases,) seconds of which a phase takes a whole number above what is on every rank; 0 where of none.
        setups: (kinds,) seconds.
        sums: (sums, phases) 1 for the phases of each, see [Note: sums].
    """

    columns: Columns
    base: Array
    upper: float
    table: CostTable
    span: Integers
    room: float
    unit: Array
    setups: Array
    sums: Array


class Node(NamedTuple):
    """See the top of the file.

    Args:
        value: seconds at least.
        rows: columns left, by group.
        start: (groups,) first of each among `rows`.
        items: (groups,) how many there are of each.
        low: (phases,) seconds.
        high: (phases,) seconds.
        together: (sums,) seconds.
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
    together: Array
    paid: int
    allowed: int
    relaxed: Relaxed | None = None

    @property
    def group(self) -> Integers:
        """(rows,) group of each."""
        return np.repeat(np.arange(len(self.start)), self.length)

    @property
    def length(self) -> Integers:
        """(groups,) rows of each."""
        return np.diff(np.append(self.start, len(self.rows)))


def keep(node: Node, kept: NDArray[np.bool_]) -> Node | None:
    """The node with some of its columns; None where a group has none left."""
    if kept.all():
        return node
    left = np.add.reduceat(kept, node.start, dtype=np.int64)
    if not left.all():
        return None
    relaxed = node.relaxed and node.relaxed.take(kept)
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
        relaxed = solve(programme, limit, found.relaxed)
        value = relaxed.value
        if value >= limit:
            return None
        # what an item costs at least with each column: the phases that its piece prolongs are paid for that
        rest = programme.rest(relaxed.price)
        single = value + relaxed.reduced
        for phase in np.flatnonzero(rest > 0).tolist():
            single += rest[phase] * np.maximum(frame.columns.piece[phase][found.rows] - found.low[phase], 0)
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
    rows, counted, phases = node.rows, _counted(frame, node), len(node.low)
    held = np.flatnonzero(node.together > frame.sums @ node.low)
    known, number = frame.columns.work.shape[1], counted.shape[1]
    work = np.zeros((len(rows), known + number + len(held)))
    work[:, :known] = frame.columns.work.take(rows, 0)
    work[:, known : known + number] = counted
    base = np.concatenate([frame.base, np.full(number, -1.0), node.together[held]])
    times = np.vstack([np.eye(phases), np.zeros((1 + number, phases)), frame.sums[held]])
    return Programme(frame.columns.every[rows], work, node.start, node.items, base, node.low, node.high, times)


def _counted(frame: Frame, node: Node) -> Array:
    """(rows, ways) levels that columns take, see [Note: counting], of the phases where they may be short."""
    if node.relaxed is None:
        return np.zeros((len(node.rows), 0))
    rows, share = _in_use(node)
    high = np.append(np.where(node.high < _KNOWN * node.relaxed.seconds, node.high, 0.0), frame.room)
    span = np.append(frame.span, 1)
    ways = sorted((-u, way) for u, way in crowded(frame.table, frame.columns, rows, share, high, span) if u > _SHORT)
    cheap = _cheap(node)
    rows = node.rows[cheap]
    found = [way.taken(frame.table, frame.columns, rows, high, span) for _, way in ways[:_COUNTS]]
    known = np.flatnonzero(high[:-1] > 0).tolist()
    blocks = sorted((-b[p] - o[p] / high[p], p, of) for of, b, o in _blocks(frame, node, high) for p in known)
    kept = [(p, of) for u, p, of in blocks if u < -_SHORT][:_COUNTS]
    found += [of.taken(frame.table, frame.columns, rows, p, float(high[p])) for p, of in kept]
    counted = np.zeros((len(node.rows), len(found)))
    counted[cheap] = np.array(found).reshape(len(found), len(rows)).T
    return counted


def _cheap(node: Node) -> Integers:
    """Columns that are counted: of one that costs far too much nothing is lost if it seems to take none."""
    assert node.relaxed is not None
    reduced = node.relaxed.reduced
    last = min(_COUNTED * len(node.start) + _MANY, len(reduced) - 1)
    return np.flatnonzero(reduced <= np.partition(reduced, last)[last])


def _blocks(frame: Frame, node: Node, high: Array) -> list[tuple[Blocks, Array, Array]]:
    """What may block ranks, see [Note: blocking]; of the relaxed optimum, (phases,) parts that are blocked, and seconds
    of means on others.

    Args:
        high: (phases + 1,) seconds at most by phase, then bytes; 0 where that is not known.
    """
    rows, share = _in_use(node)
    span, found = np.append(frame.span, 1), list[tuple[Blocks, Array, Array]]()
    for q in np.flatnonzero((high > 0) & (span == 1)).tolist():
        least, blocked, others = tried(frame.table, frame.columns, rows, share, q, high[q : q + 1])
        for size, of_block, of_others in zip(least.tolist(), blocked[0], others[0], strict=True):
            if of_block.any():
                found.append((Blocks(q, float(high[q]), size), of_block, of_others))
    return found


def _in_use(node: Node) -> tuple[Integers, Array]:
    """Columns that the relaxed optimum uses, and how many items take them."""
    assert node.relaxed is not None
    used = np.flatnonzero(node.relaxed.share > _UNUSED)
    return node.rows[used], node.relaxed.share[used]


def _narrow(frame: Frame, node: Node) -> Node | None:
    """Times raised to what some item needs whatever it takes, limits lowered, columns struck out, until all agree."""
    found: Node | None = node
    piece, every = frame.columns.piece.take(node.rows, 1), frame.columns.every[node.rows]
    for _ in range(4):
        assert found is not None
        low = np.maximum(found.low, np.minimum.reduceat(piece, found.start, axis=1).max(1))
        least = np.minimum.reduceat(every, found.start)
        spare = frame.upper - _paid(frame, found) - float(found.items @ least)
        low = whole(low, frame.unit, np.ceil, -_EDGE)
        high = whole(np.minimum(found.high, spare - (low.sum() - low)), frame.unit, np.floor, _EDGE)
        if (low > high).any():
            return None
        times = np.maximum(piece, low[:, None])
        longer = np.zeros(len(every))
        for number in np.flatnonzero(found.together).tolist():
            of_all = times[frame.sums[number] > 0].sum(0)
            longer = np.maximum(longer, found.together[number] - of_all)
        kept = (every - np.repeat(least, found.length) + times.sum(0) + longer <= spare) & (piece <= high[:, None]).all(
            0
        )
        is_same = kept.all() and (low <= found.low).all()
        found = keep(found._replace(low=low, high=high), kept)
        if found is None or is_same:
            return found
        piece, every = piece[:, kept], every[kept]
    return found


def whole(seconds: Array, unit: Array, rounded: Callable[[Array], Array], edge: float) -> Array:
    """Seconds rounded to whole units, where there are some; `edge` units are no more than a rounding error."""
    number = rounded(seconds / np.where(unit > 0, unit, 1.0) + edge)
    return np.where(unit > 0, number * unit, seconds)


def split(frame: Frame, node: Node) -> tuple[Node, ...]:
    """Two nodes that are all of this one; none where it is exact."""
    assert node.relaxed is not None
    used = np.minimum(node.relaxed.share, 1.0)
    kinds = frame.columns.kinds[node.rows]
    for kind in range(len(frame.setups)):
        bit = 1 << kind
        is_worth = frame.setups[kind] > _WORTH_SPLITTING * node.value
        if is_worth and not node.paid & bit and node.allowed & bit and (used[(kinds & bit) > 0] > 1e-3).any():
            return node._replace(allowed=node.allowed & ~bit), node._replace(paid=node.paid | bit)
    by_size, by_time = _threshold(frame, node, used), _interval(frame, node, blocks=False)
    if by_size is None and by_time is None:
        by_time = _interval(frame, node, blocks=True) or _interval(frame, node, blocks=False, least=_ANY)
    if by_size is None and by_time is None:
        return _split_group(frame, node)
    low, high = node.low.copy(), node.high.copy()
    if by_size is None or (by_time is not None and by_time[0] > by_size[0]):
        assert by_time is not None
        _, phase, high[phase], low[phase] = by_time
        return node._replace(high=high), node._replace(low=low)
    _, phase, least = by_size
    below = keep(node, _piece(frame, node.rows, phase) < least)
    times = np.append(low, node.together)
    times[phase] = max(times[phase], least)
    above = node._replace(low=times[: len(low)], together=times[len(low) :])
    return (above,) if below is None else (below, above)


def _interval(
    frame: Frame, node: Node, *, blocks: bool, least: float = _EXACT
) -> tuple[float, int, float, float] | None:
    """A guess of what it gains, a phase, and two times: it takes at most the first, or at least the second.

    The first is one that the relaxed optimum, in whole units, does not keep to; or at which it takes more levels than
    there are, see [Note: counting].

    Args:
        blocks: what blocks ranks counts too, see [Note: blocking].
        least: part of the step that it has to gain: one piece too many seems to cost less than it does.
    """
    assert node.relaxed is not None
    times, (rows, share) = node.relaxed.seconds, _in_use(node)
    spare = frame.upper - node.value
    known = np.append(np.where(node.high < _KNOWN * times, node.high, 0.0), frame.room)
    of_known = _blocks(frame, node, known) if blocks else []
    limits = []
    for phase, high, low in _limits(frame, node):
        above = np.maximum(1 - node.relaxed.price[phase], 0.5) * (low - times[phase])
        limits.append((float(above.max()), phase, high, low, above))
    best: tuple[float, int, float, float] | None = None
    for most, phase, high, low, above in sorted(limits, key=lambda limit: -limit[0]):
        if best is not None and min(most, spare) <= best[0]:
            break
        number, of = np.repeat(LEVELS, len(high)), np.full(len(LEVELS) * len(high), phase)
        counts = levels(frame.table, frame.columns, rows, of, np.tile(high, len(LEVELS)), number) @ share
        taken = list(counts.reshape(len(LEVELS), -1))
        taken += [of_block[phase] + of_others[phase] / high for _, of_block, of_others in of_known]
        below = np.maximum(times[phase] - high, times[phase] * (np.max(taken, axis=0) - 1))
        if blocks and frame.span[phase] == 1:
            _, blocked, others = tried(frame.table, frame.columns, rows, share, phase, high)
            longer = np.where(times > 0, others + (blocked - 1) * times, 0.0)
            below = np.maximum(below, longer.max((1, 2), initial=0.0))
        gain = np.minimum(np.minimum(above, 0.5 * below), spare)
        gains = np.flatnonzero(0.5 * below > least * frame.upper).tolist()
        found = [(float(gain[i]), phase, float(high[i]), float(low[i])) for i in gains]
        best = max(found if best is None else [best, *found], default=None)
    return best


def _limits(frame: Frame, node: Node) -> list[tuple[int, Array, Array]]:
    """Phases, and times of each: the phase takes at most the first in one node, at least the second in another."""
    assert node.relaxed is not None
    times, shortest = node.relaxed.seconds, _shortest(frame, node)
    found: list[tuple[int, Array, Array]] = []
    for phase in np.flatnonzero(times > 10 * _EXACT * frame.upper).tolist():
        seconds, unit = float(times[phase]), float(frame.unit[phase])
        if unit > _EXACT * frame.upper:
            high = (np.floor(seconds / unit + _WHOLE) + np.arange(4)) * unit
        else:
            unit, high = 0.0, seconds * _LONGER
        low = high + unit
        crossed = _CROSSED * shortest[phase]
        crossed = crossed[(crossed > seconds * (1 + _EXACT)) & np.isfinite(crossed)]
        high, low = np.append(high, crossed - (unit or crossed * _JUST)), np.append(low, crossed)
        kept = (high <= node.high[phase] - 0.5 * unit - _EXACT * seconds) & (low >= node.low[phase])
        if kept.any():
            found.append((phase, high[kept], low[kept]))
    return found


def _shortest(frame: Frame, node: Node) -> Array:
    """(phases,) of the shortest piece in each that takes long enough to matter; infinite where there is none."""
    found: list[float] = []
    for phase in range(len(frame.span)):
        piece = frame.columns.piece[phase][node.rows]
        found.append(float(piece.min(where=piece > _EXACT * frame.upper, initial=np.inf)))
    return np.array(found)


def _threshold(frame: Frame, node: Node, used: Array) -> tuple[float, int, float] | None:
    """A guess of what it gains, a phase (or sum of some, after all phases) and a size of piece: one node has smaller
    ones, in the other it takes so long.

    Of the pieces in use that take longer than their phase, that is the one that makes both nodes dear. What the first
    costs more is known at the present prices; of the second, half of what the phase takes longer is a guess.
    """
    assert node.relaxed is not None
    spare, reduced = frame.upper - node.value, node.relaxed.reduced
    seconds, some = node.relaxed.seconds, np.flatnonzero(used > _EXACT * _EXACT)
    seconds = np.append(seconds, frame.sums @ seconds)
    piece = np.column_stack([_piece(frame, node.rows[some], phase) for phase in range(len(seconds))])
    beyond = (piece - seconds) * used[some, None]
    if beyond.max() <= _EXACT * frame.upper:
        return None
    found: list[tuple[float, float, int, float]] = []
    for phase in np.flatnonzero(beyond.max(0) > _EXACT * frame.upper).tolist():
        sizes = np.unique(piece[beyond[:, phase] > _EXACT * frame.upper, phase])
        start, stop = seconds[phase], sizes[-1]
        aims = np.searchsorted(sizes[:-1], start + (stop - start) * _AIMS)
        of_all = _piece(frame, node.rows, phase)
        for least in np.unique(sizes[aims]).tolist():
            cost = np.where(of_all < least, reduced, np.inf)
            below = float(node.items @ np.minimum.reduceat(cost, node.start))
            above = (_GUESS if phase < len(node.low) else _OF_SUM) * (least - start)
            found.append((min(below, above, spare), float(beyond[:, phase].max()), phase, least))
    gain, _, phase, least = max(found)
    return gain, phase, least


def _piece(frame: Frame, rows: Integers, phase: int) -> Array:
    """(rows,) seconds of each column in a phase, or in one of the sums after all phases."""
    number = len(frame.span)
    of = frame.columns.piece[phase] if phase < number else frame.columns.piece[frame.sums[phase - number] > 0].sum(0)
    found: Array = of[rows]
    return found


def _split_group(frame: Frame, node: Node) -> tuple[Node, ...]:
    """More than so many items of a group among its last columns, or not."""
    assert node.relaxed is not None
    share = node.relaxed.share
    cost = frame.columns.work[node.rows]
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
