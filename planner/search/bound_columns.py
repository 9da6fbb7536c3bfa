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

from planner.search.cost_table import Array, Integers
from planner.search.problem import Problem

_SMALL = 0.01
"""Of the step's time, or of a rank's memory: a piece that is less matters to nobody."""


class Columns(NamedTuple):
    """See [Note: columns]. Sorted by class.

    Args:
        owner: (columns,) class.
        row: (columns,) of the table.
        every: (columns,) seconds.
        mean: (columns, phases) seconds.
        piece: (columns, phases) seconds.
        size: (columns,) parts of the free memory.
        kinds: (columns,) set-ups needed, a bit each.
        pieces: (columns,) how many; 0 where nobody counts them.
        hits: (columns, phases + 1) part of the ranks, or groups that share the phase, that a piece is on at least.
        one: (phases + 1,) part of them that one is.
    """

    owner: Integers
    row: Integers
    every: Array
    mean: Array
    piece: Array
    size: Array
    kinds: Integers
    pieces: Integers
    hits: Array
    one: Array

    def take(self, rows: Integers) -> Columns:
        """Some of them."""
        return Columns(
            self.owner[rows],
            self.row[rows],
            self.every[rows],
            self.mean[rows],
            self.piece[rows],
            self.size[rows],
            self.kinds[rows],
            self.pieces[rows],
            self.hits[rows],
            self.one,
        )


def columns(problem: Problem, upper: float) -> Columns:
    """The columns of a problem, but for those that fit on no rank.

    Args:
        upper: seconds; what takes longer is left out, and pieces that are small beside it matter to nobody.
    """
    table, num_ranks = problem.table, len(problem.capacity)
    span = np.append(problem.span, 1)
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
    number = np.where(is_cut[row], number, table.pieces[row])
    fixed, slope = table.fixed[row], table.slope[row]
    piece = fixed + widest[:, None] * slope
    whole = number[:, None] * fixed + table.units[row][:, None] * slope
    # a piece meets at least so many of the groups of ranks that share a phase
    one = 1 / -(-num_ranks // span)
    hits = -(-table.filled[row][:, None] // span) * one
    mean = whole * hits
    every = table.everywhere[row].copy()
    is_ragged = np.isin(row, list(table.ragged))
    is_everywhere = ((table.filled[row] >= num_ranks) & ~is_ragged)[:, None]
    # where the last rank has less, all have that, and the others a piece besides
    lack = number[:, None] * table.lack[row] + table.units[row][:, None] * table.lack_slope[row]
    mean -= lack * one
    of_all = np.where(is_everywhere, piece - lack, 0)
    every, mean, piece = every + of_all, mean - of_all, piece - of_all
    mean[is_everywhere[:, 0] & ~table.lacking[row]] = 0  # what rounding has left
    for j in np.flatnonzero(is_ragged).tolist():
        mean[j], least = _ragged(table.ragged[int(row[j])], span, num_ranks)
        every[j] += least
        mean[j] -= least
        piece[j] -= least
    fits = _fits(problem, table.owner[row], every[:, -1], piece[:, -1])
    free = max(float((problem.capacity - problem.base[:, -1]).sum()), 1.0)
    size = (every[:, -1] + mean[:, -1]) * num_ranks / free
    is_counted = ~is_everywhere[:, 0] & (is_fine[row] | ~is_cut[row]) & ~is_ragged
    pieces = np.where(is_counted, number, 0)
    seconds = every[:, :-1].sum(1)
    found = Columns(
        table.owner[row], row, seconds, mean[:, :-1], piece[:, :-1], size, table.kinds[row], pieces, hits, one
    )
    return found.take(np.flatnonzero(fits))


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


def _fits(problem: Problem, owner: Integers, every: Array, piece: Array) -> Array:
    """(columns,) whether a rank is left that has the bytes, all others at their least everywhere."""
    room = problem.capacity - problem.base[:, -1]
    classes = int(owner.max(initial=-1)) + 1
    counts = np.bincount(problem.item_class, minlength=classes)[:classes]
    least = np.full(classes, np.inf)
    np.minimum.at(least, owner, every)
    least = np.where(counts > 0, least, 0)
    others = float((least * counts).sum()) - least[owner]
    needed = every + others
    fits: Array = (needed + piece <= room.max() * (1 + 1e-12) + 1) & (needed <= room.min() * (1 + 1e-12) + 1)
    return fits
