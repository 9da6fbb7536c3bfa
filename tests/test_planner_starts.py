"""Starts like the relaxed optimum: of each class whole items take what the optimum has shares of. Shaken placements."""

from __future__ import annotations

import numpy as np

from planner.search.bound import lower_bound
from planner.search.cuts import Cuts
from planner.search.guided import LIKE, ways
from planner.search.improve import Improver
from planner.search.packing import Packer, menus
from planner.search.placement import Placement
from planner.search.potential import Potential
from planner.search.rounded import rounded
from planner.search.starts import starts
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


def test_ways_to_be_like_the_optimum_have_cuts_for_every_class() -> None:
    p = drawn(4, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    optimum = lower_bound(p, 1e3, most=4).relaxed
    assert optimum is not None
    found = list(ways(p, Cuts.of(p), optimum, many=True))
    assert len(found) > 2 * len(LIKE)
    firsts = set()
    for like, cuts, start in found:
        assert like in LIKE
        assert (cuts.owner[start.first] == np.arange(len(cuts.start) - 1)).all() and np.isfinite(start.cost).any()
        firsts.add(start.first.tobytes())
    assert len(firsts) > 3
    assert len(list(ways(p, Cuts.of(p), optimum, many=False))) == len(LIKE)


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
        np.testing.assert_allclose(placement.local, placement.copy().local, rtol=1e-9, atol=1e-12)
        moved += differ
    assert moved > 20
    placement.become(before)
    assert placement.parts == before
