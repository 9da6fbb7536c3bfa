"""The search on tables of families: divisible items, phases that a host shares, memory that is nearly full."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from planner.search.cost_table import Array, CostTable
from planner.search.cuts import Cuts
from planner.search.exact import exact
from planner.search.problem import Choice, Infeasible, Item, Option, Problem
from planner.search.solve import Solution, search
from planner.search.tight import pour

Rows = list[tuple[int, int, int, int, Array, Array, Array, int]]


def problem(
    rows: Rows, ranks: int, capacity: float, span: list[int], setups: Array | None = None, filled: Sequence[int] = ()
) -> Problem:
    """`rows`: owner, size, units, least, fixed, slope, everywhere, kinds; items are one of each class."""
    owner, size, units, least, fixed, slope, everywhere, kinds = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    ones, of_blocks = np.ones_like(size), np.array(filled, dtype=np.int64)
    table = CostTable(owner, size, ones, units, least, fixed, slope, everywhere, kinds, filled=of_blocks)
    base = np.zeros((ranks, len(span) + 1))
    setups = np.zeros((1, len(span))) if setups is None else setups
    items = np.arange(owner.max() + 1)
    return Problem.of_table(table, items, np.full(ranks, capacity), base, setups, np.array(span))


def drawn(seed: int, items: int, ranks: int, sizes: tuple[int, ...], units: int, capacity: float, span: int) -> Problem:
    """Items whose lookups and bytes are shared by the ranks of a block, and whose results are not.

    Args:
        sizes: of blocks; others than powers of two are filled ranks of the next one.
    """
    random = np.random.default_rng(seed)
    rows: Rows = []
    filled = []
    for item in range(items):
        fixed, slope = random.uniform(0, 0.2, 4), random.uniform(0.2, 1, 4)
        shared = np.array([1.0, 1.0, 1.0, 0.0])
        for size in sizes:
            part = np.where(shared > 0, 1.0, 1.0 / size)
            part[0] = 1.0 / size
            block = 1 << (size - 1).bit_length()
            rows.append((item, block, units, 1, fixed * part, slope * part, random.uniform(0, 0.02, 4), 1))
            filled.append(size)
        filled.append(ranks)
        all_ranks = np.append(random.uniform(0.5, 1, 3) * units / 3, slope[3] * units)
        rows.append((item, ranks, 0, 0, all_ranks, np.zeros(4), np.zeros(4), 2))
    return problem(rows, ranks, capacity, [1, 1, span], random.uniform(0, 0.3, (2, 3)), filled)


def loads(p: Problem, item: int, choice: Choice) -> Array:
    """(ranks, phases + 1) that a choice puts down, told rank by rank."""
    table, ranks = p.table, len(p.capacity)
    row = int(p.starts[p.item_class[item]]) + choice.option
    size, load = int(table.size[row]), np.tile(table.everywhere[row], (ranks, 1))
    widths = choice.widths or (0,) * len(choice.blocks)
    for block, width in zip(choice.blocks, widths, strict=True):
        piece = table.fixed[row] + width * table.slope[row]
        for phase, span in enumerate([*p.span.tolist(), 1]):
            groups = {rank // span for rank in range(block * size, block * size + int(table.filled[row]))}
            load[[rank for rank in range(ranks) if rank // span in groups], phase] += piece[phase]
    return load


def check(p: Problem, solution: Solution) -> None:
    """Pieces are whole items, in blocks of their own; the load is what they put down, and fits."""
    table, load, kinds = p.table, p.base.copy(), 0
    for item, choice in enumerate(solution.choices):
        row = int(p.starts[p.item_class[item]]) + choice.option
        assert len(set(choice.blocks)) == len(choice.blocks)
        if table.units[row]:
            assert choice.widths is not None
            assert sum(choice.widths) == table.units[row]
            assert min(choice.widths) >= table.least[row]
        else:
            assert choice.widths is None
            assert len(choice.blocks) == table.pieces[row]
        load += loads(p, item, choice)
        kinds |= int(table.kinds[row])
    np.testing.assert_allclose(load, solution.load, atol=1e-9)
    assert (load[:, -1] <= p.capacity * (1 + 1e-9)).all()
    paid = p.setups[[kind for kind in range(len(p.setups)) if kinds >> kind & 1]].sum(0)
    np.testing.assert_allclose(load[:, :-1].max(0) + paid, solution.phase_seconds)
    assert solution.lower_bound <= solution.seconds


def choices(p: Problem, item: int) -> Iterator[Choice]:
    """Every way to place an item."""
    table, first = p.table, int(p.starts[item])
    for row in range(first, int(p.starts[item + 1])):
        blocks = len(p.capacity) // int(table.size[row])
        if not table.units[row]:
            yield from (Choice(row - first, (block,)) for block in range(blocks))
            continue
        for widths in itertools.product(range(int(table.units[row]) + 1), repeat=blocks):
            if sum(widths) == table.units[row]:
                held = [block for block in range(blocks) if widths[block]]
                yield Choice(row - first, tuple(held), tuple(widths[block] for block in held))


def best_by_trying_all(p: Problem) -> float:
    ways = [
        [(loads(p, i, c), int(p.table.kinds[p.starts[i] + c.option])) for c in choices(p, i)]
        for i in range(len(p.item_class))
    ]
    best = np.inf
    for chosen in itertools.product(*ways):
        load = p.base + sum(load for load, _ in chosen)
        if (load[:, -1] > p.capacity).any():
            continue
        kinds = int(np.bitwise_or.reduce([kind for _, kind in chosen]))
        best = min(best, float(load[:, :-1].max(0).sum() + p.setups[[k for k in range(2) if kinds >> k & 1]].sum()))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1.6, 9.0])
def test_near_the_optimum_and_never_below_the_bound(capacity: float) -> None:
    ratios = []
    for seed in range(5):
        p = drawn(seed, 2, 4, (1, 2), 3, capacity, 2)
        best = best_by_trying_all(p)
        if not np.isfinite(best):
            with pytest.raises(Infeasible):
                search(p)
            continue
        solution = search(p)
        check(p, solution)
        assert solution.lower_bound <= best * (1 + 1e-9) <= solution.seconds * (1 + 1e-8)
        ratios.append(solution.seconds / best)
    print(f"{capacity=}: {len(ratios)} problems, search/optimum worst {max(ratios):.4f} mean {np.mean(ratios):.4f}")
    assert len(ratios) >= 3
    assert max(ratios) < 1.1
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize("ranks", [8, 64, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("span", [1, 8])
@pytest.mark.sampled(4)
def test_pieces_of_many_sizes_add_up(ranks: int, span: int) -> None:
    sizes = tuple(size for i in range(10) for size in (2**i, 3 * 2**i) if size < ranks)
    p = drawn(5, 30, ranks, sizes, 24, 1e9, span)
    solution = search(p)
    check(p, solution)
    assert any(len(choice.blocks) > 1 for choice in solution.choices)


def filled(share: float, ranks: int = 16, items: int = 40, least: int = 8) -> Problem:
    """Divisible items that take a share of all memory."""
    random = np.random.default_rng(2)
    rows: Rows = []
    for item in range(items):
        units = int(random.choice([8, 16, 32, 64]))
        cost = np.array([random.uniform(0.1, 1), random.uniform(0.1, 1), 0.1, random.uniform(1, 20)])
        for size in (1, 2, 4):
            rows.append((item, size, units, least, cost * 0.02, cost / size, np.zeros(4), 1))
    needed = sum(float((row[4][3] + row[5][3] * row[2]) * row[1]) for row in rows if row[1] == 1)
    return problem(rows, ranks, needed / ranks / share, [1, 1, 8])


@pytest.mark.parametrize("share", [pytest.param(0.9, marks=pytest.mark.slow), 0.98])
def test_memory_that_is_nearly_full(share: float) -> None:
    p = filled(share)
    check(p, search(p))


def test_items_put_down_first_leave_room_for_what_others_put_on_every_rank() -> None:
    """Giants that fit whole alone, but not with the bytes that small items put on every rank."""
    zeros, rows = np.zeros(4), []
    for item in range(36):
        if item < 4:
            rows += [(item, 1, 0, 0, np.array([0.1, 0.1, 0.1, 99.0]), zeros, zeros, 1)]
            rows += [(item, 8, 0, 0, np.array([9.0, 9.0, 9.0, 12.5]), zeros, zeros, 1)]
            continue
        everywhere = np.array([0.0, 0.0, 0.0, 0.1])
        rows += [(item, 1, 8, 1, zeros, np.array([0.1, 0.1, 0.1, 0.25]), everywhere, 1)]
    p = problem(rows, 8, 100.0, [1, 1, 8])
    check(p, search(p, lambda: True))


def test_what_fits_only_over_all_ranks_is_put_down_before_what_fits_anywhere() -> None:
    """Indivisible items that take 93 % of the memory: whole, some leave no room for those that must be spread."""
    items = []
    for size in [1.887, 1.61, 1.19, 1.098, 0.823, 0.37, 0.2, 0.13, 0.06, 0.04, *[0.01] * 10]:
        spread = Option(np.tile([0.07 + size / 50, size / 8], (1, 8, 1)), np.zeros(2))
        halves, whole = ([Option(np.tile([0.03, size / n], (n, 1, 1)), np.zeros(2))] for n in (2, 1))
        items.append(Item((*(whole if size < 1 else halves), spread)))
    p = Problem(tuple(items), np.full(8, 1.0), np.zeros((8, 2)), np.zeros((1, 1)))
    check(p, search(p, lambda: True))
    assert all(part is not None for part in pour(p, Cuts.of(p)))


def test_what_all_items_put_on_every_rank_has_room_from_the_first() -> None:
    """One that would fill a rank is cut, for of the many that follow each takes a little there too."""
    none, one = np.zeros(2), np.array([0.0, 1.0])
    rows: Rows = [(0, 1, 65, 1, none, 0.1 * one, none, 1)]
    rows += [(item, 1, 0, 0, 0.05 * one, none, 0.005 * one, 1) for item in range(1, 281)]
    p = problem(rows, 4, 7.0, [1])
    assert all(part is not None for part in pour(p, Cuts.of(p)))


def test_the_last_byte_is_found_by_a_programme() -> None:
    """Numbers that fill two ranks in one way only, which no order of putting them down finds."""
    pytest.importorskip("scipy")
    sizes = [27, 26, 24, 21, 19, 17, 14, 12]
    options = ((Option(np.array([[[1.0, size]]]), np.zeros(2)),) for size in sizes)
    p = Problem(tuple(Item(option) for option in options), np.full(2, 80.0), np.zeros((2, 2)), np.zeros((1, 1)))
    parts = exact(p)
    assert parts is not None
    check(p, search(p, lambda: True))
    wide = filled(0.9, ranks=8, items=6)
    assert exact(wide) is not None
    assert exact(filled(1.02, ranks=8, items=6)) is None


def test_less_than_all_memory_is_infeasible() -> None:
    with pytest.raises(Infeasible) as caught:
        search(filled(1.02))
    assert caught.value.bytes_short > 0
    assert caught.value.rank is not None


def test_constraints_on_families() -> None:
    p = drawn(1, 6, 8, (1, 2), 4, 1e9, 4)
    allowed = {0: np.arange(8) < 2, 1: np.arange(8) >= 6}
    spread = {2: frozenset(["g"]), 3: frozenset(["g"])}
    taken = {"g": np.arange(8) < 4}
    p = Problem.of_table(
        p.table, p.item_class, p.capacity, p.base, p.setups, p.span, allowed=allowed, spread=spread, taken=taken
    )
    solution = search(p)
    check(p, solution)
    held = [
        loads(p, item, choice)[:, -1] > p.table.everywhere[:, -1].max() for item, choice in enumerate(solution.choices)
    ]
    assert not held[0][2:].any()
    assert not held[1][:6].any()
    assert not (held[2] & held[3]).any()
    assert not (held[2] | held[3])[:4].any()


def test_out_of_time_keeps_the_first_solution() -> None:
    p = drawn(3, 20, 16, (1, 2, 4), 16, 1e9, 8)
    solution = search(p, lambda: True)
    check(p, solution)
    assert solution.is_cut_short
    assert search(p).seconds <= solution.seconds
