"""Blocks of ranks searched as ranks: what is counted there is what ranks then carry. Changes in part are exact."""

from __future__ import annotations

import numpy as np
import pytest

from planner.search.cells import cells
from planner.search.cuts import Cuts
from planner.search.improve import Improver
from planner.search.packing import Packer, menus
from planner.search.placement import Part, Placement, even
from planner.search.potential import Potential, powered
from planner.search.problem import Problem
from planner.search.starts import starts
from tests.test_planner_families import check, drawn, search


@pytest.mark.parametrize("size", [4, 8, 32, 64])
def test_what_lies_on_a_part_of_a_cell_counts_by_its_mean(size: int) -> None:
    p = drawn(5, 40, 512, (1, 2, 4, 8, 16, 512), 64, 1e9, 8)
    made = next(cells(p, np.full(len(p.span), 1e9), (size,)))
    partly = np.flatnonzero(made.side_by_side == 0)
    assert len(np.unique(p.table.size[made.row[partly]])) == sum(s < size for s in (1, 2, 4, 8, 16))
    for row in partly.tolist():
        there = Placement(p)
        there.put(int(made.row[row]), 0, 0, 1, 1)
        np.testing.assert_allclose(
            made.problem.table.fixed[row] + made.problem.table.slope[row], there.local[:size].mean(0)
        )


@pytest.mark.parametrize(("span", "sizes"), [(8, (1, 2, 4, 8, 16, 512)), (1, (1, 2, 8))])
def test_loads_on_cells_are_those_of_their_ranks(span: int, sizes: tuple[int, ...]) -> None:
    p = drawn(5, 40, 512, sizes, 64, 1e9, span)
    target = starts(p, Cuts.of(p))[0].target
    seen = 0
    for made in cells(p, target, (2, 4, 8, 16, 64)):
        there = Placement(made.problem)
        random = np.random.default_rng(1)
        for item, owner in enumerate(made.problem.item_class.tolist()):
            table = made.problem.table
            rows = np.flatnonzero((table.owner == owner) & (made.side_by_side > 0))
            row = int(random.choice(rows))
            block = int(random.integers(len(made.problem.capacity) // table.size[row]))
            there.add(item, Part(row, (block,), (int(table.units[row]),)))
            seen += made.side_by_side[row] > 1
        here = made.placement([part for part in there.parts if part is not None])
        on_cells = here.local.reshape(len(there.local), made.size, -1)
        np.testing.assert_allclose(on_cells, np.repeat(there.local[:, None], made.size, 1), rtol=1e-9, atol=1e-12)
        assert here.seconds() == pytest.approx(there.seconds(), rel=1e-9)
    assert seen > 10


def test_small_pieces_lie_on_the_parts_of_a_cell_that_carry_least() -> None:
    p = drawn(5, 40, 512, (1, 2, 4), 64, 1e9, 1)
    made = next(cells(p, np.full(len(p.span), 1e9), (4,)))
    row = int(np.flatnonzero((made.side_by_side == 0) & (p.table.size[made.row] == 1))[0])
    table = made.problem.table
    parts = [Part(row, (3,), (int(table.units[row]),))] * 4
    same = Problem.of_table(p.table, np.full(4, p.table.owner[made.row[row]]), p.capacity, p.base, p.setups, p.span)
    found = type(made)(same, made.problem, 4, made.row, made.side_by_side, made.scale).placement(parts)
    assert sorted(b for part in found.parts if part for b in part.blocks) == [12, 13, 14, 15]
    check(p, search(p))


@pytest.mark.parametrize("ranks", [64, 1024])
def test_what_is_changed_in_part_is_as_if_it_were_made_anew(ranks: int) -> None:
    p = drawn(3, 30, ranks, (1, 2, 8), 24, 1e9, 8)
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
        anew = placement.copy()
        np.testing.assert_allclose(placement.local, anew.local, rtol=1e-9, atol=1e-12)
        assert {k: set(v) for k, v in placement.held.items() if v} == {k: set(v) for k, v in anew.held.items() if v}


def test_many_exchanges_at_once_never_raise_the_potential() -> None:
    p = drawn(5, 300, 256, (1, 2, 8), 24, 1e9, 8)
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
    np.testing.assert_allclose(placement.local, placement.copy().local, rtol=1e-9, atol=1e-12)
