"""The lower bound of the planner's search: below every plan there is, and not far below."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.search import bound, bound_node
from planner.search.bound import Tree, lower_bound
from planner.search.bound_blocks import Blocks, tried
from planner.search.bound_columns import Columns, columns
from planner.search.bound_counts import crowded, levels
from planner.search.bound_node import Frame, Node
from planner.search.bound_phases import joined
from planner.search.bound_programme import Programme, solve
from planner.search.cost_table import CostTable, Integers
from planner.search.placement import Part, Placement
from planner.search.problem import Problem
from tests.test_planner_families import drawn

RANKS, PHASES = 4, 3
Array = NDArray[np.float64]


def random_problem(seed: int, lacks: bool = False, partly: bool = False) -> Problem:
    """2 or 3 items on 4 ranks (2 to a host, which the last phase may be shared on): some of a kind, some divisible.

    Args:
        lacks: blocks' last ranks get less.
        partly: of blocks of 4 ranks 3 are filled, of some.
    """
    r = np.random.default_rng(seed)
    classes = int(r.integers(1, 4))
    rows, ragged = [], {}
    for c in range(classes):
        units = int(r.choice([0, 3, 4]))
        for size in (1, 2, 4) if r.random() < 0.7 else (1, 2):
            fixed, slope = r.random(PHASES + 1) / size, r.random(PHASES + 1) / size * (units > 0)
            fixed[:PHASES] *= r.choice([0.05, 1.0])
            everywhere = r.random(PHASES + 1) * r.choice([0, 0.2], PHASES + 1)
            pieces = 1 if units else int(r.integers(1, RANKS // size + 1))
            if not units and r.random() < 0.3:
                ragged[len(rows)] = r.random((pieces, size, PHASES + 1))
                fixed = ragged[len(rows)].max((0, 1))
            rows.append((c, size, pieces, units, min(units, int(r.integers(1, 3))), fixed, slope, everywhere, size > 2))
    owner, size, pieces, units, least, fixed, slope, everywhere, kinds = (np.array(v) for v in zip(*rows, strict=True))
    items = np.sort(r.choice(classes, max(classes, int(r.integers(2, 4)))))
    base = r.random((RANKS, PHASES + 1)) * r.choice([0, 0.5])
    span = np.array([1, 1, r.choice([1, 2])])
    if span[-1] > 1:
        base[:, -2] = np.repeat(base[::2, -2], 2)
    more = np.random.default_rng(seed)
    less = more.random(fixed.shape).round(1) * (size[:, None] > np.append(span, 1)) * lacks
    less[list(ragged)] = 0
    filled = np.where((size == 4) & (more.random(len(size)) < 0.7) & partly, 3, size)
    filled[list(ragged)] = size[list(ragged)]
    parts = (ragged, less * fixed, less * slope, filled)
    table = CostTable(owner, size, pieces, units, least, fixed, slope, everywhere, kinds + 1, *parts)
    allowed = {0: r.random(RANKS) < 0.7} if r.random() < 0.3 else None
    capacity = np.full(RANKS, r.choice([2.0, 3.0, 9.0])) * r.uniform(0.9, 1.1, RANKS)
    setups = r.random((2, PHASES)) * 0.3
    return Problem.of_table(table, items, capacity, base, setups, span, allowed=allowed)


def widths(units: int, least: int, blocks: int) -> list[tuple[int, ...]]:
    """All ways to give units to blocks, `least` or none each."""
    counts = [0, *range(least, units + 1)]
    return [w for w in product(counts, repeat=blocks) if sum(w) == units]


def of_piece(p: Problem, row: int, units: int = 0) -> Array:
    """(ranks, phases + 1) of a piece."""
    t, size, filled = p.table, int(p.table.size[row]), int(p.table.filled[row])
    load = np.tile(t.fixed[row] + units * t.slope[row], (size, 1))
    for phase, span in enumerate([*p.span.tolist(), 1]):
        stop = -(-filled // span) * span
        load[stop:, phase] = 0
        load[max(stop - span, 0) : stop, phase] -= t.lack[row, phase] + units * t.lack_slope[row, phase]
    return load


def placements(p: Problem, item: int) -> list[tuple[Array, int]]:
    """Everything that an item may put on the ranks, and the set-ups of it."""
    t, found = p.table, []
    for row in np.flatnonzero(t.owner == p.item_class[item]).tolist():
        size = int(t.size[row])
        blocks = RANKS // size
        if t.units[row]:
            ways = [
                {b: of_piece(p, row, w) for b, w in enumerate(way) if w}
                for way in widths(int(t.units[row]), int(t.least[row]), blocks)
            ]
        else:
            loads = t.ragged.get(row, np.tile(of_piece(p, row), (int(t.pieces[row]), 1, 1)))
            ways = [
                dict(zip(way, loads, strict=True))
                for way in product(range(blocks), repeat=len(loads))
                if len(set(way)) == len(way)
            ]
        for way in ways:
            load = np.tile(t.everywhere[row], (RANKS, 1))
            for b, piece in way.items():
                ranks = np.arange(b * size, (b + 1) * size)
                if item in p.allowed and not p.allowed[item][ranks[piece[:, -1] > 0]].all():
                    break
                own = np.append(p.span == 1, True)
                load[ranks] += np.where(own, piece, 0)
                for phase in np.flatnonzero(p.span > 1).tolist():
                    for host in np.unique(ranks // 2):
                        load[host * 2 : host * 2 + 2, phase] += piece[ranks // 2 == host, phase].max()
            else:
                found.append((load, int(t.kinds[row])))
    return found


def least_cost(p: Problem) -> float:
    """What the best plan costs, by trying all; infinite where there is none."""
    loads, kinds = p.base[None], np.zeros(1, dtype=np.int64)
    for item in range(len(p.item_class)):
        ways = placements(p, item)
        if not ways:
            return np.inf
        loads = (loads[:, None] + np.array([load for load, _ in ways])).reshape(-1, RANKS, PHASES + 1)
        kinds = (kinds[:, None] | np.array([kind for _, kind in ways])).ravel()
        fits = (loads[..., -1] <= p.capacity).all(1)
        loads, kinds = loads[fits], kinds[fits]
    paid = np.array([sum(p.setups[k].sum() for k in range(2) if bits >> k & 1) for bits in range(4)])
    costs: Array = loads[..., :-1].max(1).sum(1) + paid[kinds]
    return float(costs.min(initial=np.inf))


@pytest.mark.parametrize(
    ("above", "lacks", "partly", "near"),
    [(1.1, False, False, 0.85), (1e4, False, False, 0.85), (1e4, True, False, 0.75), (1e4, True, True, 0.75)],
)
@pytest.mark.sampled(4)
def test_below_every_plan_and_not_far_below(above: float, lacks: bool, partly: bool, near: float) -> None:
    parts = []
    for seed in range(40):
        p = random_problem(seed, lacks, partly)
        best = least_cost(p)
        if np.isfinite(best):
            bound = lower_bound(p, best * above)
            assert bound.seconds <= best * (1 + 1e-9), seed
            assert bound.alone <= best * (1 + 1e-9), seed
            parts.append(bound.seconds / best)
    assert len(parts) > 20
    assert np.mean(parts) > near


def test_below_every_plan_where_nodes_are_split_by_sums_of_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_node, "_OF_SUM", 100.0)  # a sum seems to gain most wherever a piece takes longer than it
    held: list[bool] = []

    def settled(frame: Frame, node: Node) -> Node | None:
        held.append(bool((node.together > frame.sums @ node.low + 1e-9).any()))
        return bound_node.settle(frame, node)

    monkeypatch.setattr(bound, "settle", settled)
    for seed in range(20):
        p = random_problem(seed)
        best = least_cost(p)
        assert lower_bound(p, min(1.1 * best, 1e4)).seconds <= best * (1 + 1e-9), seed
    assert sum(held) > 20


def test_below_every_plan_where_most_columns_seem_to_take_no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_node, "_COUNTED", 0)
    monkeypatch.setattr(bound_node, "_MANY", 2)
    for seed in range(20):
        p = random_problem(seed)
        best = least_cost(p)
        assert lower_bound(p, min(1.1 * best, 1e4)).seconds <= best * (1 + 1e-9), seed


def test_grows_on_below_every_plan_when_a_better_one_is_known() -> None:
    risen = 0
    for seed in range(20):
        p = random_problem(seed)
        best = least_cost(p)
        if np.isfinite(best):
            tree = Tree(p, 3 * best)
            first, last = tree.grown(3 * best, most=2), tree.grown(best * (1 + 1e-6))
            assert first.seconds * (1 - 1e-9) <= last.seconds <= best * (1 + 1e-6), seed
            assert tree.grown(best).seconds <= best
            risen += last.seconds > first.seconds * (1 + 1e-6)
    assert risen > 5


def scattered(p: Problem, r: np.random.Generator) -> Placement:
    """Every item cut anyhow, and put anywhere, but not on all ranks."""
    table, ranks, found = p.table, len(p.capacity), Placement(p)
    for item, owner in enumerate(p.item_class.tolist()):
        row = int(r.choice(np.flatnonzero((table.owner == owner) & (table.size < ranks))))
        units, blocks = int(table.units[row]), ranks // int(table.size[row])
        number = int(r.integers(1, min(units, blocks) + 1))
        edges = np.sort(r.choice(np.arange(1, units), number - 1, replace=False))
        widths = np.diff([0, *edges.tolist(), units]).tolist()
        found.add(item, Part(row, tuple(r.choice(blocks, number, replace=False).tolist()), tuple(widths)))
    return found


def taken_by(plan: Placement, found: Columns) -> Integers:
    """The column of each item."""
    rows = []
    for item, part in enumerate(plan.parts):
        assert part is not None
        of = (found.owner == plan.problem.item_class[item]) & (found.row == part.row)
        rows.append(np.flatnonzero(of & (found.pieces <= len(part.blocks)))[-1])
    return np.array(rows)


@pytest.mark.parametrize("span", [1, 4])
def test_what_blocks_ranks_leaves_room_for_every_plan(span: int) -> None:
    blocking = 0
    for seed in range(60):
        r = np.random.default_rng(seed)
        p = drawn(seed, int(r.integers(3, 9)), 16, (1, 2, 4, 8), 6, 1e9, span)
        plan = scattered(p, r)
        most, seconds = plan.local.max(0), plan.local[:, :-1].max(0)
        found = columns(p, plan.seconds())
        at = taken_by(plan, found)
        share = np.ones(len(at))
        for q in np.flatnonzero(np.append(p.span, 1) == 1).tolist():
            least, blocked, others = tried(p.table, found, at, share, q, most[q : q + 1])
            for size, of_block, of_others in zip(least.tolist(), blocked[0], others[0], strict=True):
                taken = [Blocks(q, most[q], size).taken(p.table, found, at, o, seconds[o]).sum() for o in range(PHASES)]
                assert np.allclose(taken, of_block + of_others / seconds)
                assert max(taken) <= 1 + 1e-9, (seed, q, size)
                blocking += int(of_block.any())
    assert blocking > 40


@pytest.mark.parametrize("span", [1, 4])
def test_levels_leave_room_for_every_plan(span: int) -> None:
    most_full, beside = 0.0, 0
    for seed in range(60):
        r = np.random.default_rng(seed)
        p = drawn(seed, int(r.integers(3, 9)), 16, (1, 2, 4, 8), 6, 1e9, span)
        plan = scattered(p, r)
        high, found, spans = plan.local.max(0), columns(p, plan.seconds()), np.append(p.span, 1)
        at = taken_by(plan, found)
        for part, way in crowded(p.table, found, at, np.ones(len(at)), high, spans):
            assert part <= 1 + 1e-9, (seed, way)
            assert np.isclose(way.taken(p.table, found, at, high, spans).sum(), part), (seed, way)
            most_full = max(most_full, part)
            beside += way.own >= 0 and part > 0
    assert most_full > 0.7
    assert beside > 20 * (span > 1) - 1


def test_of_no_seconds_a_piece_has_all_levels() -> None:
    """A phase of one column alone may end where that is not: its limit is 0."""
    p = drawn(0, 8, 16, (1, 2, 4, 8), 6, 1e9, 1)
    found = columns(p, scattered(p, np.random.default_rng(0)).seconds())
    takes = (p.table.whole[found.row] > 0) & (found.pieces > 0)[:, None]
    phase = int(takes[:, :-1].sum(0).argmax())
    rows = np.flatnonzero(takes[:, phase])
    taken = levels(p.table, found, rows, np.array([phase]), np.zeros(1), np.array([2]))[0]
    assert len(rows) and np.isfinite(taken).all()
    assert (taken >= found.hits(rows)[:, phase] - 1e-9).all()


def test_one_piece_too_many_counts_though_it_is_little_beside_the_step() -> None:
    """33 pieces that fill a rank each, on 32 ranks: two are on one, or an item is on all, which takes half a second."""
    loads, every = np.array([[1.0, 1.0], [0.5, 1.0]]), np.array([[3.0, 0.0], [3.0, 0.0]])
    ones, zeros, nothing = np.ones(2, dtype=np.int64), np.zeros(2, dtype=np.int64), np.zeros((2, 2))
    table = CostTable(zeros, np.array([1, 32]), ones, zeros, zeros, loads, nothing, every, zeros)
    items = np.zeros(33, dtype=np.int64)
    p = Problem.of_table(table, items, np.full(32, 1e3), np.zeros((32, 2)), np.zeros((0, 1)))
    assert 100.45 < lower_bound(p, 101.0).seconds <= 100.5


def test_prices_are_nearly_the_best() -> None:
    from scipy.optimize import linprog

    for seed in range(20):
        r = np.random.default_rng(seed)
        groups, number, rows = 60, 12, 9
        work = r.random((groups * number, rows)) ** 3 * r.random((groups, 1, 1)).repeat(number, 1).reshape(-1, 1) / 20
        items, times = np.ones(groups), np.eye(rows)[:, :6]
        base = np.where(np.arange(rows) < 6, 0.0, -0.6 * work.sum(0) / number)
        every, low, high = r.random(len(work)) * 0.01, np.zeros(6), np.ones(6)
        p = Programme(every, work, np.arange(groups) * number, items, base, low, high, times)
        one_each = np.kron(np.eye(groups), np.ones(number))
        exact = linprog(
            np.append(p.every, np.ones(6)),
            np.hstack([work.T, -times]),
            -base,
            np.hstack([one_each, np.zeros((groups, 6))]),
            items,
            bounds=[(0, None)] * len(work) + [(0, 1)] * 6,
        )
        value = p.value(solve(p, 2 * exact.fun).price)
        assert 1 - 1e-3 < value / exact.fun < 1 + 1e-9, seed


def doubled(p: Problem, factor: float, at: int = 2) -> Problem:
    """With the phase before `at` once more there, longer by a factor."""
    before = max(at - 1, 0)

    def more(loads: Array) -> Array:
        return np.insert(loads, at, factor * loads[..., before], axis=-1)

    t = p.table
    named = {name: more(getattr(t, name)) for name in ("fixed", "slope", "everywhere", "lack", "lack_slope")}
    table = replace(t, ragged={row: more(part) for row, part in t.ragged.items()}, **named)
    return replace(p, table=table, base=more(p.base), setups=more(p.setups), span=np.insert(p.span, at, p.span[before]))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.slow)], ids=str)
def test_phases_in_proportion_are_one(seeds: range) -> None:
    for seed in seeds:
        r = np.random.default_rng(seed)
        p = doubled(drawn(seed, int(r.integers(3, 9)), 16, (1, 2, 4, 8), 6, 1e9, 4), 0.5)
        fewer, phases = joined(p)
        assert phases.of.tolist() == [0, 1, 1, 2]
        assert np.allclose(phases.part, [1, 2 / 3, 1 / 3, 1])
        plan = scattered(p, r)
        same = Placement(fewer)
        for item, part in enumerate(plan.parts):
            assert part is not None
            same.add(item, part)
        assert np.isclose(plan.seconds(), same.seconds(), rtol=1e-12)
        assert np.allclose(phases.apart(same.local[:, :-1].max(0)), plan.local[:, :-1].max(0))
        found, alike = lower_bound(p, plan.seconds()), lower_bound(fewer, plan.seconds())
        assert np.isclose(found.seconds, alike.seconds, rtol=1e-6)
        assert (found.relaxed is None) == (alike.relaxed is None)
        if found.relaxed is not None:
            assert found.relaxed.own.shape == found.relaxed.every.shape == found.relaxed.price.shape == (4,)


def test_phases_that_take_no_time_are_in_proportion_to_none() -> None:
    p = drawn(0, 6, 16, (1, 2, 4, 8), 6, 1e9, 3)
    for at in range(3):
        assert joined(doubled(p, 0.0, at))[1].of.tolist() == [0, 1, 2, 3]
