"""Starts with slots: pieces keep to the limits, hosts have slots for them, and plans of a piece for each rank gain."""

from __future__ import annotations

import numpy as np
import pytest

import planner.search.slots as module
from planner import Constraint, ShardingPlanner, Topology
from planner.search.best import Best
from planner.search.bound import lower_bound
from planner.search.cuts import Cuts
from planner.search.hosts import pack_hosts
from planner.search.placement import Placement
from planner.search.problem import Problem
from planner.search.slots import Loads, Slots, slots
from planner.search.slotted import pack_slots
from planner.search.starts import starts
from planner.search.tight import pour
from tests.planner_bags import BagSharder, bags, one_axis
from tests.test_planner_families import Rows, check, drawn, problem, search

MOST = 1e9


def begun(p: Problem) -> tuple[Loads, list[Slots], float]:
    """What cuts put on ranks, starts, and seconds of what is packed without slots."""
    cuts, best = Cuts.of(p), Best(p)
    for start in starts(p, cuts)[:4]:
        placement, _ = pack_hosts(p, cuts, start, 8)
        if placement is not None:
            best.rival(placement, 0.0)
    if best.parts is None:
        best.offer(Placement.of(p, pour(p, cuts)), 0.0)
    relaxed = lower_bound(p, best.seconds).relaxed
    assert relaxed is not None
    loads = Loads(p, cuts, best.placement())
    return loads, list(slots(loads, relaxed.own, best.placement(), best.seconds, MOST)), best.seconds


@pytest.mark.parametrize(("items", "sizes"), [(60, (1, 2, 4, 8, 16)), (60, (1, 2, 3, 6, 8, 24)), (300, (1, 8))])
@pytest.mark.sampled(4)
def test_pieces_keep_to_limits_and_find_slots(items: int, sizes: tuple[int, ...]) -> None:
    p = drawn(3, items, 1024, sizes, 12 if items == 60 else 3, 1e9, 8)
    loads, found, before = begun(p)
    assert found and found[0].seconds == min(start.seconds for start in found)
    packed = []
    for start in found:
        own = loads.own[start.cut] / start.limit[: loads.own.shape[1]]
        assert (own <= 1 + 1e-6).all()
        beside = np.floor(1 / own.max(1) * (1 + 1e-9))
        assert (loads.ranks[start.cut] / beside).sum() <= 0.95 * 1024 * 1.0001
        work = loads.work
        placement = pack_slots(loads, start)
        assert loads.work > work and placement.fits()
        rows = [part.row for part in placement.parts if part is not None]
        assert rows == loads.cuts.row[start.cut[p.item_class]].tolist()
        assert all(len(set(part.blocks)) == len(part.blocks) for part in placement.parts if part is not None)
        packed.append(placement.seconds())
        assert packed[-1] < 1.3 * start.seconds
    assert min(packed) < before


def test_a_cut_in_more_pieces_than_hosts_is_not_taken() -> None:
    p = drawn(3, 4, 64, (1, 2, 4, 8), 64, 1e9, 8)  # 64 pieces of a rank each are on 8 hosts
    loads, found, _ = begun(p)
    assert (loads.cuts.number > 8).any()
    assert found
    for start in found:
        assert (loads.cuts.number[start.cut] <= 8).all()
        check_blocks = pack_slots(loads, start).parts
        assert all(part is not None and len(set(part.blocks)) == len(part.blocks) for part in check_blocks)


def test_hosts_that_a_piece_closes_are_counted_as_full() -> None:
    every, none = np.zeros(3), np.zeros(3)
    rows: Rows = [(item, 8, 0, 0, np.array([3.0, 0.4, 1.0]), none, every, 0) for item in range(10)]
    rows += [(item, 1, 0, 0, np.array([3.0, 0.5, 1.0]), none, every, 0) for item in range(10, 40)]
    p = problem(rows, 128, 1e3, [1, 8], np.zeros((1, 2)))
    cuts = Cuts.of(p)
    placement = Placement.of(p, pour(p, cuts))
    loads = Loads(p, cuts, placement)
    begin = slots(loads, np.array([3.0, 1.2]), placement, np.inf, MOST)
    found = [next(begin), next(begin)]
    mixed, closed = (start.seconds for start in found)  # ten hosts are closed: thirty halves on six others
    assert mixed < 4.4
    assert closed == pytest.approx(3.0 + 2.5, rel=0.1)
    assert min(pack_slots(loads, start).seconds() for start in found) == pytest.approx(3.0 + 2.5)


def test_cuts_that_are_left_out_while_limits_change_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    p = drawn(3, 60, 1024, (1, 2, 4, 8, 16), 48, 1e9, 8)
    some = min(start.seconds for start in begun(p)[1])
    monkeypatch.setattr(module, "_KEPT", 1000)
    assert some == pytest.approx(min(start.seconds for start in begun(p)[1]), rel=0.01)


def test_pieces_keep_to_the_memory_that_there_is() -> None:
    p = drawn(3, 60, 1024, (1, 2, 4), 12, 1e9, 8)
    cuts = Cuts.of(p)
    placement = Placement.of(p, pour(p, cuts))
    loads, seconds = Loads(p, cuts, placement), placement.phase_seconds()
    some = next(slots(loads, seconds, placement, np.inf, MOST))
    assert (loads.ranks[some.cut] > 0).any()
    loads.room = 1e-6
    taken = [int((loads.ranks[start.cut] > 0).sum()) for start in slots(loads, seconds, placement, np.inf, MOST)]
    assert not any(taken)  # what is on all ranks is another's business


def test_a_piece_for_each_rank_or_two_is_found() -> None:
    p = drawn(3, 60, 1024, (1, 2, 4, 8, 16), 12, 1e9, 8)
    solution = search(p)
    check(p, solution)
    assert solution.seconds < 1.07 * solution.lower_bound  # without: 1.085; with: 1.061


def test_a_step_of_microseconds_beside_much_memory_is_planned() -> None:
    """Its limits are no part of a sum with the bytes: the price that began from it was none, and doubled for ever."""
    pooling = {f"t{i}": Constraint(pooling_factor=(1, 100)[i % 2]) for i in range(12)}
    planner = ShardingPlanner(Topology(1e11, 2.5e12, 6e13, 4.5e11, 0.0), pooling, batch_size=1)
    planner.plan(bags(*[(10**6, 64)] * 12), [BagSharder()], one_axis(12))
    assert planner.report is not None and planner.report.gap < 0.05
