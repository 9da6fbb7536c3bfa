"""A start that is the relaxed optimum of the bound, rounded: of each class whole items take each column. Pure."""

from __future__ import annotations

import numpy as np

from planner.search.bound import Optimum
from planner.search.cost_table import Array, Integers
from planner.search.cuts import Cuts, cut_loads
from planner.search.problem import Problem
from planner.search.starts import Start

_LEAST = 0.02
"""Share of an item below which the optimum is taken not to use a column."""
_EDGE = 1e-3
_PRICE = 0.02
"""Of a phase, at least."""


def rounded(problem: Problem, optimum: Optimum) -> tuple[Cuts, Start]:
    """Cuts of which each item has one, and a start of them.

    Of a class, as many items take a column as its share has whole ones. What is left goes, large classes first, to the
    columns with which the sum of all phases so far is nearest to that of the shares.
    """
    table, phases, of = problem.table, len(problem.span), optimum.rows
    number = np.where(table.units[of] > 0, np.maximum(optimum.pieces, 1), table.pieces[of])
    piece, mean = cut_loads(problem, of, number)
    scale = np.maximum(optimum.own, _EDGE * float(optimum.own.sum()) + 1e-30)
    load = mean[:, :phases] / scale * np.maximum(optimum.price, _PRICE)
    taken = _taken(problem.item_class, table.owner[of], optimum.share, load)
    columns, item = np.unique(taken, return_inverse=True)
    own = np.arange(len(columns))
    cuts = Cuts(own, of[columns], number[columns], piece[columns], mean[columns], np.arange(len(columns) + 1), item)
    room = max(float((problem.capacity - problem.base[:, -1]).mean()), 1e-30)
    fill = float((cuts.mean[:, -1] * np.bincount(item)).sum()) / room
    target = np.maximum(optimum.own + optimum.every, 1e-12)
    return cuts, Start(float(target.sum()), target, cuts.mean[:, :phases].sum(1), own, (1, 1), fill)


def _taken(item_class: Integers, owner: Integers, share: Array, load: Array) -> Integers:
    """(items,) the column of each.

    Args:
        owner: (columns,) class of each, ascending.
        share: (columns,) items.
        load: (columns, phases) of an item, so that phases compare.
    """
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    edges = np.append(first, len(owner)).tolist()
    whole = np.floor(share + _EDGE)
    largest = np.maximum.reduceat(load.sum(1) * (share > _LEAST), first)
    items = np.argsort(item_class, kind="stable")
    begin = np.searchsorted(item_class[items], owner[first])
    end = np.searchsorted(item_class[items], owner[first], side="right")
    taken, apart = np.zeros(len(item_class), dtype=np.int64), np.zeros(load.shape[1])
    for group in np.argsort(-largest, kind="stable").tolist():
        of = slice(edges[group], edges[group + 1])
        mine = items[begin[group] : end[group]]
        rest = np.maximum(share[of] - whole[of], 0)
        left = len(mine) - int(whole[of].sum())
        more, apart = _shared_out(rest, load[of], left, apart)
        count = (whole[of] + more).astype(np.int64)
        taken[mine] = np.repeat(np.arange(of.start, of.stop), count)[: len(mine)]
    return taken


def _shared_out(rest: Array, load: Array, items: int, apart: Array) -> tuple[Array, Array]:
    """How many of some items take each column, and by how much all so far are short of their shares then."""
    expected, more = rest @ load, np.zeros(len(rest))
    may = np.ceil(np.where(rest > _LEAST, rest, 0.0))
    for turn in range(items):
        aim = apart + expected * ((turn + 1) / items) - more @ load
        far = np.where(more < may, ((load - aim) ** 2).sum(1), np.inf)
        best = int(far.argmin()) if np.isfinite(far).any() else int(rest.argmax())
        more[best] += 1
    return more, apart + expected - more @ load
