"""Starts like the relaxed optimum: of each class whole items take what the optimum has shares of. Shaken placements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.search.bound import lower_bound
from planner.search.cost_table import CostTable
from planner.search.cuts import Cuts
from planner.search.guided import LIKE, ways
from planner.search.improve import Improver
from planner.search.packing import Packer, menus
from planner.search.placement import Placement
from planner.search.potential import Potential
from planner.search.problem import Problem
from planner.search.rounded import rounded
from planner.search.solve import search
from planner.search.starts import least_fill, starts
from tests.test_planner_families import drawn


def test_whole_items_take_the_columns_that_the_optimum_has_shares_of() -> None:
    p = drawn(3, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    optimum = lower_bound(p, 1e3, most=4).relaxed
    assert optimum is not None
    cuts, start = rounded(p, optimum)
    table, counts = p.table, np.bincount(p.item_class)
    assert (table.owner[cuts.row[cuts.item]] == p.item_class).all()
    taken = {
        (int(cuts.row[cut]), int(cuts.number[cut])): count for cut, count in enumerate(np.bincount(cuts.item).tolist())
    }
    for row, pieces, share in zip(optimum.rows.tolist(), optimum.pieces.tolist(), optimum.share.tolist(), strict=True):
        number = max(pieces, 1) if table.units[row] else int(table.pieces[row])
        assert taken.get((row, number), 0) >= np.floor(share + 1e-3) - 1e-9, (row, pieces, share)
    assert sum(taken.values()) == counts.sum() and len(taken) > 1
    assert np.isfinite(start.cost).all() and (cuts.piece > 0).any()


def test_a_piece_that_takes_many_times_what_a_rank_has_costs_infinitely_much() -> None:
    """Memory of no weight left no number of it, which argmin takes for the least."""
    p = drawn(5, 40, 64, (1, 2, 8), 24, 1e9, 8)
    potential = Potential(Placement(p), starts(p, Cuts.of(p))[0].target, 0.0)
    potential.aim(256)
    potential.look()
    loads = np.zeros((2, len(potential.scale)))
    loads[0, -1] = 20 * p.capacity.max()
    with np.errstate(over="ignore"):
        large, none = potential.costs(loads, 1)
    assert (large == np.inf).all() and (none == 0).all()


def _tight(seed: int, fill: float) -> Problem:
    """Of which the least that is needed takes this share of the memory."""
    p = drawn(seed, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    return replace(p, capacity=np.full(64, p.base[:, -1].max() + least_fill(p, Cuts.of(p)) * 1e9 / fill))


def test_starts_fit_where_memory_is_tight() -> None:
    """Whatever the threshold that pieces stay below."""
    p = _tight(2, 0.95)
    cuts, counts = Cuts.of(p), np.bincount(p.item_class)
    found = starts(p, cuts)
    assert len(found) > 5 and least_fill(p, cuts) > 0.94
    for start in found:
        assert (cuts.mean[start.first, -1] * counts).sum() <= (p.capacity - p.base[:, -1]).mean()


def test_a_plan_where_memory_is_tight_is_no_last_resort() -> None:
    """Of packing by memory alone, it took 2.9 times the bound."""
    solution = search(_tight(2, 0.95))
    assert solution.seconds < 1.25 * solution.lower_bound


def test_ways_to_be_like_the_optimum_have_cuts_for_every_class() -> None:
    p = drawn(4, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    optimum = lower_bound(p, 1e3, most=4).relaxed
    assert optimum is not None
    found = list(ways(p, Cuts.of(p), optimum))
    assert len(found) > 2 * len(LIKE)
    firsts = set()
    for cuts, start in found:
        assert (cuts.owner[start.first] == np.arange(len(cuts.start) - 1)).all() and np.isfinite(start.cost).any()
        firsts.add(start.first.tobytes())
    assert len(firsts) > 3


def test_some_ways_have_only_rows_that_the_optimum_uses() -> None:
    p = drawn(3, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    optimum = lower_bound(p, 1e3, most=4).relaxed
    assert optimum is not None
    cuts, used = Cuts.of(p), set(optimum.used().tolist())
    own = cuts.of_rows(optimum.used())
    assert set(own.row.tolist()) == used < set(cuts.row.tolist())
    assert (np.diff(own.start) > 0).all()
    assert (own.owner == np.repeat(np.arange(60), np.diff(own.start))).all()
    of_one = cuts.of_rows(optimum.used()[:1])  # of all other classes everything is left
    assert len(np.unique(of_one.row[of_one.owner == 0])) == 1
    assert (np.diff(of_one.start)[1:] == np.diff(cuts.start)[1:]).all()
    found = [of for of, _ in ways(p, cuts, optimum)]
    assert sum(of is not cuts and set(of.row.tolist()) == used for of in found) >= 3


def test_of_a_richer_choice_there_are_starts_as_without_it_too() -> None:
    poor, rich = _with_and_without_large_blocks()
    cuts = Cuts.of(poor), Cuts.of(rich)
    found = [starts(p, of, in_turn=True) for p, of in zip((poor, rich), cuts, strict=True)]
    assert (rich.table.size[cuts[1].row[found[1][0].first]] == 32).all(), "least work"
    rows = [[of.row[start.first].tolist() for start in begun] for of, begun in zip(cuts, found, strict=True)]
    poor_rows = np.flatnonzero(rich.table.size != 32)  # in the rich table
    assert [poor_rows[row].tolist() for row in rows[0]] == rows[1][1 : 2 * len(rows[0]) : 2]
    assert search(rich).seconds <= search(poor).seconds * (1 + 1e-9)


def _with_and_without_large_blocks() -> tuple[Problem, Problem]:
    """Items on 64 ranks, hosts of eight: the second has blocks of 32 ranks too, of less work but for two at a time."""
    found = []
    for sizes in ((1, 8), (1, 8, 32)):
        size, rows = np.tile(sizes, 3), 3 * len(sizes)
        work = np.array([{1: 1.0, 8: 1.1, 32: 0.8}[s] for s in size.tolist()]) * np.repeat([1.0, 1.2, 1.5], len(sizes))
        zeros = np.zeros((rows, 3))
        fixed = np.column_stack([8 * work / size, work / np.minimum(size, 8), np.ones(rows)])
        none, one = np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
        owner = np.repeat(np.arange(3), len(sizes))
        table = CostTable(owner, size, one, none, none, fixed, zeros, zeros, none)
        capacity, base, span = np.full(64, 1e9), np.zeros((64, 3)), np.array([1, 8])
        found.append(Problem.of_table(table, np.arange(30) % 3, capacity, base, np.zeros((1, 2)), span))
    return found[0], found[1]


def test_a_shaken_placement_is_whole_and_differs_in_a_few_items() -> None:
    p = drawn(5, 40, 64, (1, 2, 8), 24, 1e9, 8)
    cuts, random = Cuts.of(p), np.random.default_rng(0)
    start, placement = starts(p, cuts)[0], Placement(p)
    potential = Potential(placement, start.target, 0.1)
    packer = Packer(potential, menus(p, cuts, start.cost, 12))
    assert packer.build(list(range(40)), np.zeros(40), 8, lambda: False) is None
    potential.aim(16)
    improver = Improver(packer)
    before, moved = list(placement.parts), 0
    for _ in range(20):
        improver.shake(before, random)
        differ = sum(a != b for a, b in zip(before, placement.parts, strict=True))
        assert differ <= 5 and all(placement.parts) and placement.fits()
        np.testing.assert_allclose(placement.local, Placement.of(p, placement.parts).local, rtol=1e-9, atol=1e-12)
        moved += differ
    assert moved > 20
    placement.become(before)
    assert placement.parts == before
