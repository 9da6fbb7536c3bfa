"""`Columns`: what an item may be given, in numbers of which every plan has at least as much. Pure, as `planner.search`.

[Note: columns]
A column is a family of a `CostTable` cut into a number of pieces. Whatever its widths and wherever it lies,
- `every`: it adds so many seconds to the step, being on every rank;
- `mean`: it adds so much to each phase's mean over ranks (over the groups of ranks that share the phase) besides;
- `piece`: some rank has at least so much of it in each phase besides;
- `size`: it takes such a part of all memory that is free.
Of a family whose pieces matter to nobody, one column stands for all numbers of pieces: the mean of the fewest, the
piece of the most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.cost_table import Array, CostTable, Integers
from planner.search.problem import Problem

_SMALL = 0.01
"""Of the step's time, or of a rank's memory: a piece that is less matters to nobody."""
_AT_ONCE = 4096
"""Columns: memory that was never used before costs more time than the sums."""


class Columns(NamedTuple):
    """See [Note: columns]. Sorted by class.

    Args:
        owner: (columns,) class.
        row: (columns,) of the table.
        every: (columns,) seconds.
        work: (columns, phases + 1) seconds, the means; then `size`, parts of the free memory.
        piece: (phases, columns) seconds, a phase's side by side: it is looked at by phase, again and again.
        kinds: (columns,) set-ups needed, a bit each.
        pieces: (columns,) how many; 0 where nobody counts them.
        hits_of_row: (rows, phases + 1) of the table: part of the ranks, or groups that share the phase, that a piece is
            on at least.
        one: (phases + 1,) part of them that one is.
    """

    owner: Integers
    row: Integers
    every: Array
    work: Array
    piece: Array
    kinds: Integers
    pieces: Integers
    hits_of_row: Array
    one: Array

    @property
    def mean(self) -> Array:
        """(columns, phases) seconds."""
        return self.work[:, :-1]

    def hits(self, rows: Integers) -> Array:
        """(len(rows), phases + 1) of some columns."""
        found: Array = self.hits_of_row[self.row[rows]]
        return found

    def kept(self, is_kept: NDArray[np.bool_]) -> Columns:
        """Some of them."""
        if is_kept.all():
            return self
        return Columns(
            self.owner[is_kept],
            self.row[is_kept],
            self.every[is_kept],
            self.work[is_kept],
            np.ascontiguousarray(self.piece[:, is_kept]),
            self.kinds[is_kept],
            self.pieces[is_kept],
            self.hits_of_row,
            self.one,
        )


def columns(problem: Problem, upper: float) -> Columns:
    """The columns of a problem, but for those that fit on no rank.

    Args:
        upper: seconds; what takes longer is left out, and pieces that are small beside it matter to nobody.
    """
    table, num_ranks = problem.table, len(problem.capacity)
    span = np.append(problem.span, 1)
    row, number, widest, is_fine = _cuts(problem, upper)
    # a piece meets at least so many of the groups of ranks that share a phase
    one = 1 / -(-num_ranks // span)
    hits = -(-table.filled[:, None] // span) * one
    is_ragged = np.isin(np.arange(len(table.owner)), list(table.ragged))
    is_everywhere = (table.filled >= num_ranks) & ~is_ragged
    every, work = np.empty((len(row), 2)), np.empty((len(row), len(span)))
    piece, piece_bytes = np.empty((len(problem.span), len(row))), np.empty(len(row))
    for begin in range(0, len(row), _AT_ONCE):
        of = slice(begin, begin + _AT_ONCE)
        loads = _loads(table, (row[of], number[of], widest[of]), (hits, one), is_everywhere)
        for j in np.flatnonzero(is_ragged[row[of]]).tolist():
            loads[1][j], least = _ragged(table.ragged[int(row[of][j])], span, num_ranks)
            loads[0][j] += least
            loads[1][j] -= least
            loads[2][j] -= least
        every[of, 0], every[of, 1] = loads[0][:, :-1].sum(1), loads[0][:, -1]
        work[of], piece[:, of], piece_bytes[of] = loads[1], loads[2][:, :-1].T, loads[2][:, -1]
    free = max(float((problem.capacity - problem.base[:, -1]).sum()), 1.0)
    work[:, -1] = (every[:, 1] + work[:, -1]) * num_ranks / free
    fits = _fits(problem, table.owner[row], every[:, 1], piece_bytes)
    is_counted = ~is_everywhere[row] & (is_fine | (table.units[row] == 0)) & ~is_ragged[row]
    pieces = np.where(is_counted, number, 0)
    seconds = np.ascontiguousarray(every[:, 0])
    return Columns(table.owner[row], row, seconds, work, piece, table.kinds[row], pieces, hits, one).kept(fits)


def _cuts(problem: Problem, upper: float) -> tuple[Integers, Integers, Integers, NDArray[np.bool_]]:
    """Of each column its row of the table, number of pieces and units of the widest, and whether its pieces matter."""
    table, num_ranks = problem.table, len(problem.capacity)
    is_cut = table.units > 0
    most = np.where(is_cut, np.minimum(table.units // np.maximum(table.least, 1), num_ranks // table.size), 1)
    most = np.maximum(most, 1)
    largest = table.fixed + table.units[:, None] * table.slope
    room = np.append(np.full(len(problem.span), upper), problem.capacity.max())
    is_fine = np.asarray((largest > _SMALL * room).any(1))
    smallest = table.fixed + (-(-table.units // most))[:, None] * table.slope
    alone = table.everywhere + smallest * (table.filled < num_ranks)[:, None]
    is_quick = np.asarray(alone[:, :-1].sum(1) <= upper)
    times = is_quick * np.where(is_fine, most, 1)
    row = np.repeat(np.arange(len(most)), times)
    number = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times) + 1
    finest = np.where(is_fine[row], number, most[row])
    widest = np.where(is_cut[row], -(-table.units[row] // finest), 0)
    # of numbers with the same widest piece the fewest
    is_new = (np.diff(row, prepend=-1) > 0) | (np.diff(widest, prepend=-1) != 0)
    row, number, widest = row[is_new], number[is_new], widest[is_new]
    return row, np.where(is_cut[row], number, table.pieces[row]), widest, is_fine[row]


def _loads(
    table: CostTable,
    cuts: tuple[Integers, Integers, Integers],
    hits: tuple[Array, Array],
    is_everywhere: NDArray[np.bool_],
) -> tuple[Array, Array, Array]:
    """(cuts, phases + 1) three times: what each puts on every rank, on the mean besides, and its widest piece besides.

    Args:
        cuts: (cuts,) row of the table, number of pieces, units of the widest.
        hits: see `Columns.hits_of_row`, and `Columns.one`.
        is_everywhere: (rows,) of the table: every rank has the same.
    """
    (row, number, widest), (of_row, one), units = cuts, hits, table.units[cuts[0]][:, None]
    fixed, slope, is_whole = table.fixed[row], table.slope[row], is_everywhere[row]
    piece = fixed + widest[:, None] * slope
    mean = (number[:, None] * fixed + units * slope) * of_row[row]
    every = table.everywhere[row].copy()
    # where the last rank has less, all have that, and the others a piece besides
    lack = number[:, None] * table.lack[row] + units * table.lack_slope[row]
    mean -= lack * one
    of_all = np.where(is_whole[:, None], piece - lack, 0)
    every, mean, piece = every + of_all, mean - of_all, piece - of_all
    mean[is_whole & ~table.lacking[row]] = 0  # what rounding has left
    return every, mean, piece


def _ragged(loads: Array, span: Integers, num_ranks: int) -> tuple[Array, Array]:
    """(phases + 1,) mean over ranks, or groups of ranks, and what is on every one of them."""
    pieces, size, width = loads.shape
    mean, least = np.zeros(width), np.zeros(width)
    for phase in range(width):
        length = int(span[phase])
        groups = -(-size // length)
        padded = np.zeros((pieces, groups * length))
        padded[:, :size] = loads[..., phase]
        shared = padded.reshape(pieces, groups, length).max(2)
        mean[phase] = shared.sum() / -(-num_ranks // length)
        if size >= num_ranks:
            least[phase] = shared.sum(0).min()
    return mean, least


def _fits(problem: Problem, owner: Integers, every: Array, piece: Array) -> NDArray[np.bool_]:
    """(columns,) whether a rank is left that has the bytes, all others at their least everywhere."""
    room = problem.capacity - problem.base[:, -1]
    classes = int(owner.max(initial=-1)) + 1
    counts = np.bincount(problem.item_class, minlength=classes)[:classes]
    least = np.full(classes, np.inf)
    np.minimum.at(least, owner, every)
    least = np.where(counts > 0, least, 0)
    others = float((least * counts).sum()) - least[owner]
    needed = every + others
    most, least_room = room.max() * (1 + 1e-12) + 1, room.min() * (1 + 1e-12) + 1
    fits: NDArray[np.bool_] = (needed + piece <= most) & (needed <= least_room)
    return fits
