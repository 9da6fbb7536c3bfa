"""The search on its own: problems of numbers, with every placement tried where they are tiny."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.search.problem import Infeasible, Item, Option, Problem
from planner.search.solve import Solution, search

PHASES = 2


def option(rng: np.random.Generator, blocks: int, block: int, memory: float) -> Option:
    loads = rng.uniform(0.1, 1, (blocks, block, PHASES + 1)) * [1, 1, memory]
    return Option(loads, rng.uniform(0, 0.05, PHASES + 1), frozenset([int(block > 1)]))


def problem(seed: int, ranks: int = 4, items: int = 4, memory: float = 1.0) -> Problem:
    """Each item: whole on a rank, in two pieces, on a block of two ranks, or over all."""
    rng = np.random.default_rng(seed)
    shapes = [(1, 1), (2, 1), (1, 2), (1, ranks)]
    made = tuple(Item(tuple(option(rng, *shape, memory) for shape in shapes)) for _ in range(items))
    setups = np.array([[0.2, 0.0], [0.0, 0.1]])
    return Problem(made, np.full(ranks, 3.0), rng.uniform(0, 0.3, (ranks, PHASES + 1)), setups)


def placements(p: Problem, item: Item) -> tuple[np.ndarray, np.ndarray]:
    """(ways, ranks, phases + 1) loads, and kinds of set-up, a bit each, of every way to place an item."""
    ranks, ways, kinds = len(p.capacity), [], []
    for o in item.options:
        size = o.loads.shape[1]
        for blocks in itertools.permutations(range(ranks // size), len(o.loads)):
            load = np.tile(o.everywhere, (ranks, 1))
            for b, loads in zip(blocks, o.loads, strict=True):
                load[b * size : (b + 1) * size] += loads
            ways.append(load)
            kinds.append(sum(1 << kind for kind in o.kinds))
    return np.array(ways), np.array(kinds)


def best_by_trying_all(p: Problem) -> float:
    load, kinds = p.base[None], np.zeros(1, dtype=int)
    for item in p.items:  # every way of one beside every way of those before it
        more, of_more = placements(p, item)
        load = (load[:, None] + more).reshape(-1, *more.shape[1:])
        kinds = (kinds[:, None] | of_more).ravel()
    paid = (kinds[:, None] >> np.arange(len(p.setups)) & 1) @ p.setups.sum(1)
    fits = (load[..., -1] <= p.capacity).all(1)
    return float(np.where(fits, load[..., :-1].max(1).sum(1) + paid, np.inf).min())


def check_consistent(p: Problem, solution: Solution) -> None:
    """The solution's load is what its choices put down, and it fits."""
    load, kinds = p.base.copy(), set(p.base_kinds)
    for item, choice in zip(p.items, solution.choices, strict=True):
        o = item.options[choice.option]
        assert len(set(choice.blocks)) == len(o.loads)
        load += o.everywhere
        for b, loads in zip(choice.blocks, o.loads, strict=True):
            load[b * o.loads.shape[1] : (b + 1) * o.loads.shape[1]] += loads
        kinds |= o.kinds
    np.testing.assert_allclose(load, solution.load, atol=1e-9)
    assert (load[:, -1] <= p.capacity + 1e-9).all()
    np.testing.assert_allclose(load[:, :-1].max(0) + p.setups[sorted(kinds)].sum(0), solution.phase_seconds)
    assert solution.lower_bound <= solution.seconds


@pytest.mark.parametrize(
    ("memory", "number"),
    [(0.5, 4), (1.5, 3), *(pytest.param(memory, 12, marks=pytest.mark.slow) for memory in (0.5, 1.5))],
)
@pytest.mark.sampled(2)
def test_near_the_optimum_and_never_below_the_bound(memory: float, number: int) -> None:
    ratios, bounds = [], []
    for seed in range(number):
        p = problem(seed, items=3, memory=memory)
        best = best_by_trying_all(p)
        if not np.isfinite(best):
            continue
        solution = search(p)
        check_consistent(p, solution)
        assert solution.lower_bound <= best * (1 + 1e-9) <= solution.seconds * (1 + 1e-8)
        ratios.append(solution.seconds / best)
        bounds.append(solution.lower_bound / best)
    print(f"{memory=}: {len(ratios)} problems, search/optimum worst {max(ratios):.4f} mean {np.mean(ratios):.4f}, ")
    print(f"bound/optimum worst {min(bounds):.4f} mean {np.mean(bounds):.4f}")
    assert 12 * len(ratios) >= 8 * number
    assert max(ratios) < 1.15
    assert np.mean(ratios) < 1.03


def test_identical_pieces_are_packed_evenly() -> None:
    loads = np.array([[[1.0, 1.0, 1.0]]])
    one = (Option(loads, np.zeros(3)),)
    solution = search(Problem(tuple(Item(one) for _ in range(12)), np.full(4, 9.0), np.zeros((4, 3)), np.zeros((0, 2))))
    assert solution.seconds == pytest.approx(6.0)
    assert solution.lower_bound == pytest.approx(6.0, rel=1e-5)


def test_memory_wins_over_time() -> None:
    """A fast option that does not fit is left for a slow one that does."""
    fast = Option(np.array([[[0.1, 0.1, 5.0]]]), np.zeros(3))
    slow = Option(np.array([[[3.0, 3.0, 2.0]]] * 2), np.zeros(3))
    solution = search(Problem((Item((fast, slow)),), np.full(2, 4.0), np.zeros((2, 3)), np.zeros((0, 2))))
    assert solution.choices[0].option == 1


def test_memory_that_only_a_tight_packing_fits() -> None:
    sizes = [6, 5, 4, 3, 3, 3]  # 12 = 6 + 3 + 3 = 5 + 4 + 3
    items = tuple(Item((Option(np.array([[[1.0, 1.0, s]]]), np.zeros(3)),)) for s in sizes)
    p = Problem(items, np.full(2, 12.0), np.zeros((2, 3)), np.zeros((0, 2)))
    check_consistent(p, search(p))


def test_infeasible_names_item_rank_and_bytes() -> None:
    small = Item((Option(np.array([[[1.0, 1.0, 1.0]]]), np.zeros(3)),))
    large = Item(
        (Option(np.array([[[1.0, 1.0, 9.0]]]), np.zeros(3)), Option(np.array([[[1.0, 1.0, 7.0]]]), np.zeros(3)))
    )
    with pytest.raises(Infeasible) as caught:
        search(Problem((small, large), np.array([4.0, 5.0]), np.zeros((2, 3)), np.zeros((0, 2))))
    error = caught.value
    assert (error.item, error.option, error.rank, error.bytes_short) == (1, 1, 1, 2)


def test_allowed_ranks_and_spread() -> None:
    loads = np.array([[[1.0, 1.0, 1.0]]])
    one = (Option(loads, np.zeros(3)),)
    only_two = np.array([False, False, True, False])
    apart = frozenset(["g"])
    items = (Item(one, only_two), Item(one, spread=apart), Item(one, spread=apart), Item(one, only_two))
    taken = {"g": np.array([True, False, False, False])}
    solution = search(Problem(items, np.full(4, 9.0), np.zeros((4, 3)), np.zeros((0, 2)), taken=taken))
    (a,), (b,), (c,), (d,) = (x.blocks for x in solution.choices)
    assert a == d == 2
    assert len({0, b, c}) == 3
    with pytest.raises(Infeasible) as caught:
        search(
            Problem((Item(one, spread=apart),) * 4, np.full(4, 9.0), np.zeros((4, 3)), np.zeros((0, 2)), taken=taken)
        )
    assert caught.value.rank is None


def test_setup_is_paid_once_and_avoided_where_cheaper() -> None:
    with_setup = Option(np.array([[[0.1, 0.1, 0.0]]]), np.zeros(3), frozenset([0]))
    without = Option(np.array([[[0.3, 0.3, 0.0]]]), np.zeros(3))
    item = Item((with_setup, without))
    few = search(Problem((item,) * 2, np.full(1, 9.0), np.zeros((1, 3)), np.array([[5.0, 0.0]])))
    assert {c.option for c in few.choices} == {1}
    many = search(Problem((item,) * 40, np.full(1, 9.0), np.zeros((1, 3)), np.array([[5.0, 0.0]])))
    assert {c.option for c in many.choices} == {0}
    assert many.seconds == pytest.approx(13.0)


def test_out_of_time_keeps_the_first_solution() -> None:
    p = problem(0, items=6, memory=0.5)
    asked: list[int] = []
    solution = search(p, lambda: asked.append(1) is None)
    assert solution.is_cut_short
    check_consistent(p, solution)
    assert not search(p).is_cut_short


@pytest.mark.slow  # `test_workloads` of tests/test_planner.py plans twice too
def test_same_solution_every_time() -> None:
    first, second = (search(problem(3, ranks=8, items=20, memory=0.3)) for _ in range(2))
    assert first.choices == second.choices


def test_nothing_to_place() -> None:
    p = Problem((), np.full(2, 9.0), np.ones((2, 3)), np.zeros((0, 2)))
    assert search(p).seconds == pytest.approx(2.0)
