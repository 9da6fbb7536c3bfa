"""Packing in two levels: what it counts is what lies there, and items of all sizes are spread over many hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.search import solve
from planner.search.cuts import Cuts
from planner.search.hosts import can_pack, pack_hosts
from planner.search.starts import starts
from tests.test_planner_families import check, drawn, search


@pytest.mark.parametrize(("span", "sizes"), [(8, (1, 2, 4, 8, 16, 1024)), (8, (1, 3, 6, 24, 1024)), (1, (1, 8, 32))])
@pytest.mark.sampled(3)
def test_loads_by_host_and_by_rank_are_those_of_the_placement(span: int, sizes: tuple[int, ...]) -> None:
    p = drawn(3, 60, 1024, sizes, 12, 1e9, span)
    group = max(8, span)
    assert can_pack(p, group)
    cuts = Cuts.of(p)
    for start in starts(p, cuts)[:3]:
        placement, work = pack_hosts(p, cuts, start, group)
        assert placement is not None and work > 0
        assert all(part is not None for part in placement.parts)
        hosts = placement.local[:, :-1].reshape(-1, group, 3).mean(1)
        assert (hosts.max(0) < 2.5 * hosts.mean(0)).all()  # one item at a time on the idlest: 1.04 to 2.05
    check(p, search(p))


def test_few_hosts_or_ranks_that_are_minded_are_packed_otherwise() -> None:
    assert not can_pack(drawn(3, 4, 64, (1, 8), 12, 1e9, 8), 8)
    p = drawn(3, 4, 1024, (1, 8), 12, 1e9, 8)
    minded = type(p).of_table(
        p.table, p.item_class, p.capacity, p.base, p.setups, p.span, allowed={0: np.arange(1024) < 8}
    )
    assert not can_pack(minded, 8)


def test_memory_that_no_host_has_is_no_placement() -> None:
    p = drawn(3, 60, 1024, (1, 2, 4), 12, 1e9, 8)
    cuts = Cuts.of(p)
    found = [pack_hosts(replace(p, capacity=p.capacity * part), cuts, starts(p, cuts)[0], 8)[0] for part in (1, 1e-12)]
    assert found[0] is not None and found[1] is None


def test_one_start_is_packed_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    p = drawn(3, 60, 1024, (1, 2, 4, 8, 16), 12, 1e9, 8)
    packed = []

    def counted(*args: Any) -> Any:
        packed.append(args)
        return pack_hosts(*args)

    monkeypatch.setattr(solve, "pack_hosts", counted)
    solution = solve.search(p, lambda: True)
    check(p, solution)
    assert solution.is_cut_short
    assert len(packed) == 1
    solve.search(p)
    assert len(packed) > 3
