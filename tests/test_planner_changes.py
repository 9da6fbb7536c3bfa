"""Placements that are changed in part are as if they were made anew; many exchanges at once are what they gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.search.cuts import Cuts
from planner.search.improve import Improver
from planner.search.packing import Packer, menus
from planner.search.placement import Part, Placement, even
from planner.search.potential import Potential, powered
from planner.search.starts import starts
from tests.test_planner_families import drawn, search


@pytest.mark.parametrize("ranks", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_what_is_changed_in_part_is_as_if_it_were_made_anew(ranks: int) -> None:
    p = drawn(3, 30, ranks, (1, 2, 3, 6, 8), 24, 1e9, 8)
    solution = search(p)
    placement, random = Placement(p), np.random.default_rng(0)
    for item, choice in enumerate(solution.choices):
        row = int(p.starts[p.item_class[item]] + choice.option)
        placement.add(item, Part(row, choice.blocks, choice.widths or (0,) * len(choice.blocks)))
    potential = Potential(placement, solution.phase_seconds, 0.1)
    for power in (4, 64):
        potential.aim(power)
        for _ in range(40):
            item = int(random.integers(len(placement.parts)))
            part = placement.parts[item]
            assert part is not None
            blocks = list(part.blocks)
            free = sorted(set(range(ranks // int(p.table.size[part.row]))) - set(blocks))
            if free:
                blocks[int(random.integers(len(blocks)))] = int(random.choice(free))
            before = placement.swap(item, Part(part.row, tuple(blocks), part.widths))
            assert before == part
            value = potential.weigh()
            x = (placement.local + placement.every) / potential.scale
            sums = powered(x, power).sum(0)
            whole = float((potential.scale[:-1] * sums[:-1] ** (1 / power)).sum()) + potential.weight[-1] * sums[-1]
            assert value == pytest.approx(whole + float(p.setups[placement.users > 0].sum()), rel=1e-9)
        anew = Placement.of(p, placement.parts)
        np.testing.assert_allclose(placement.local, anew.local, rtol=1e-9, atol=1e-12)
        assert {k: set(v) for k, v in placement.held.items() if v} == {k: set(v) for k, v in anew.held.items() if v}


@pytest.mark.parametrize("ranks", [1, 16])
def test_items_put_down_together_are_as_if_put_down_one_by_one(ranks: int) -> None:
    """Also those whose last rank has less, or whose ranks differ, or that share no rank with others."""
    p = drawn(6, 30, ranks, (1, 2, 3, 6, 8) if ranks > 1 else (1,), 24, 1e9, min(8, ranks))
    random, rows = np.random.default_rng(0), len(p.table.size)
    lack = random.uniform(0, 0.1, p.table.fixed.shape) * (random.random(rows) < 0.5)[:, None]
    lack[p.table.filled % min(8, ranks) > 0, len(p.span) - 1] = 0
    ragged = {row: random.random((24, int(p.table.size[row]), 4)) for row in (3, 10, 17)}
    p = replace(p, table=replace(p.table, lack=lack, lack_slope=lack / 8, ragged=ragged), spread={5: frozenset({"a"})})
    one_by_one = Placement(p)
    for item, first in enumerate(p.starts[p.item_class].tolist()):
        row = first + int(random.integers(6 if ranks > 1 else 2))
        units = int(p.table.units[row])
        number = int(random.integers(1, min(units, ranks // int(p.table.size[row])) + 1)) if units else 1
        blocks = random.permutation(ranks // int(p.table.size[row]))[:number].tolist()
        one_by_one.add(item, Part(row, tuple(blocks), even(units, number)))
    together = Placement.of(p, one_by_one.parts)
    np.testing.assert_allclose(together.local, one_by_one.local, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(together.every, one_by_one.every, rtol=1e-12)
    assert (together.users == one_by_one.users).all() and together.parts == one_by_one.parts
    assert (together.taken["a"] == one_by_one.taken["a"]).all() and together.taken["a"].any()
    assert {k: set(v) for k, v in together.held.items()} == {k: set(v) for k, v in one_by_one.held.items()}


def test_many_exchanges_at_once_never_raise_the_potential() -> None:
    p = drawn(5, 300, 256, (1, 2, 3, 6, 8), 24, 1e9, 8)
    cuts = Cuts.of(p)
    start = starts(p, cuts)[0]
    placement, random = Placement(p), np.random.default_rng(0)
    for item, owner in enumerate(p.item_class.tolist()):  # anywhere
        cut = int(start.first[owner])
        row, number = int(cuts.row[cut]), int(cuts.number[cut])
        blocks = random.permutation(256 // int(p.table.size[row]))[:number].tolist()
        placement.add(item, Part(row, tuple(blocks), even(int(p.table.units[row]), number)))
    potential = Potential(placement, start.target, 0.1)
    potential.aim(16)
    improver = Improver(Packer(potential, menus(p, cuts, start.cost, 12)))
    before, begin, done = [part and sorted(part.widths) for part in placement.parts], placement.seconds(), 0
    for turn in range(48):
        value = improver.value
        phase = turn % len(p.span)
        exchanged = improver.exchange_many(phase, random)
        assert (improver.value < value) == (exchanged > 0)
        assert improver.value == pytest.approx(potential.weigh(), rel=1e-9)
        done += exchanged
    assert done > 100
    assert placement.seconds() < 0.9 * begin
    assert [part and sorted(part.widths) for part in placement.parts] == before
    np.testing.assert_allclose(placement.local, Placement.of(p, placement.parts).local, rtol=1e-9, atol=1e-12)
