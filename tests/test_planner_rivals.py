"""Rivals: of starts that differ in what items take several are improved, and one that was packed worse may win."""

from __future__ import annotations

import numpy as np

from planner.search.best import Best
from planner.search.cuts import Cuts
from planner.search.hosts import pack_hosts
from planner.search.placement import Placement
from planner.search.rivals import compete
from planner.search.starts import starts
from tests.test_planner_families import drawn


def test_of_placements_in_which_items_take_the_same_the_better_is_kept() -> None:
    p = drawn(4, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    cuts, best = Cuts.of(p), Best(p)
    placements = [found for s in starts(p, cuts)[:4] if (found := pack_hosts(p, cuts, s, 8)[0]) is not None]
    assert len(placements) > 1
    for placement in placements * 2:
        best.rival(placement, 0.0)
    rows = [tuple(rival.rows.tolist()) for rival in best.rivals]
    assert len(set(rows)) == len(rows) > 0
    assert best.rivals[0].seconds == best.seconds == min(placement.seconds() for placement in placements)
    assert [r.seconds for r in best.rivals] == sorted(r.seconds for r in best.rivals)

    other = Placement.of(p, placements[0].parts)  # where items lie in the order of ranks is no other way to place them
    turned = Placement(p)
    number = len(p.capacity)
    for item, part in enumerate(other.parts):
        assert part is not None
        blocks = number // int(p.table.size[part.row])
        turned.add(item, part._replace(blocks=tuple(blocks - 1 - b for b in part.blocks)))
    before = len(best.rivals)
    best.rival(turned, 0.0)
    assert len(best.rivals) == before


def test_rivals_are_improved_and_the_best_of_them_is_told() -> None:
    p = drawn(4, 60, 64, (1, 2, 4, 8, 64), 24, 1e9, 8)
    cuts, told = Cuts.of(p), list[float]()
    best = Best(p, lambda seconds, _: told.append(seconds))
    for start in starts(p, cuts)[:4]:
        placement, _ = pack_hosts(p, cuts, start, 8)
        if placement is not None:
            best.rival(placement, 0.0)
    packed = best.seconds
    assert not compete(p, cuts, best, 60e3, lambda: False)
    assert best.seconds < packed
    assert told == sorted(told, reverse=True) and told[-1] == best.seconds
    assert np.isclose(best.placement().seconds(), best.seconds) and best.placement().fits()
    assert compete(p, cuts, best, 60e3, lambda: True)  # cut short, and nothing lost
    assert best.seconds == told[-1]
