"""What the planner may choose between: families of layouts, what `accepts` opens, and what a plan gives up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest

from dmp import (
    Layout,
    ParameterInfo,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    check_cover,
    column_wise,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from planner import Constraint, ShardingPlanner
from planner.candidates import request
from planner.candidates.family import (
    Family,
    block_sizes,
    blocks_of,
    canonical_layouts,
    even_widths,
    is_filled,
    layout_of,
)
from planner.candidates.movable import placed
from planner.candidates.offered import Asked, Offer, offers
from tests.planner_bags import BagSharder, bags, hosts, one_axis, small_memory


class Open(BagSharder):
    """Runs whatever is of a kind that it offers."""

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        return True


class Even(Open):
    """Runs column cuts that are even alone."""

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        return layout.to_json().get("widths") is None


def asked(sharder: Any, shape: tuple[int, int], env: ShardingEnv, constraint: Constraint | None = None) -> list[Offer]:
    with_info: Mapping[str, ParameterInfo] = sharder.parameters(bags(shape)["t0"])
    return offers(Asked("t0", sharder, with_info["weight"], constraint or Constraint(), env))


def families(found: list[Offer]) -> set[tuple[str, int, int, int]]:
    return {offer.family[:4] for offer in found if not offer.objection}


def test_blocks_of_ranks() -> None:
    assert block_sizes((6,)) == (1, 2, 3, 6)
    assert block_sizes((4, 8)) == (1, 2, 4, 8, 16, 32)
    assert [size for size in range(1, 9) if is_filled(5, size)] == [1, 2, 3, 5]
    assert [tuple(b) for b in blocks_of((8,))] == [(1, 1), (2, 2), (4, 3), (4, 4), (8, 5), (8, 6), (8, 7), (8, 8)]
    of_hosts = [(b.size, b.filled) for b in blocks_of((8, 2)) if b.filled > 2]
    assert of_hosts == [(1 << (n - 1).bit_length(), n) for n in range(4, 17, 2)]
    many = [b.filled for b in blocks_of((512, 8))]
    assert many == [1, 2, 3, 4, 6, 8, *(8 << i for i in range(1, 10))]
    for shape in ((6,), (100,), (3, 5), (64, 8), (2, 2, 4)):
        for size, filled in blocks_of(shape):
            assert filled <= size
            assert prod(shape) % size == 0


def test_accepts_opens_rows_over_any_block_and_columns_anywhere() -> None:
    env = hosts(4, 2)
    assert families(asked(Open(only=("table_wise",)), (1000, 128), env)) == {("table_wise", 1, 1, 0)}
    rows = families(asked(Open(only=("row_wise",)), (1000, 128), env))
    assert rows == {("row_wise", size, 1, 0) for size in (2, 4, 8)}
    both = families(asked(Open(only=("table_wise", "column_wise")), (1000, 128), env))
    assert both == {("table_wise", 1, 1, 32)}
    assert ("table_row_wise", 4, 1, 32) in families(asked(Open(), (1000, 128), env))
    assert families(asked(Open(only=("row_wise",)), (3, 128), env)) == {("row_wise", 2, 1, 0)}


def test_without_accepts_a_representative_stands_for_itself() -> None:
    env = hosts(2, 4)
    assert families(asked(BagSharder(only=("column_wise",)), (1000, 128), env)) == {
        ("column_wise", 1, pieces, 0) for pieces in (2, 4)
    }
    assert families(asked(BagSharder(only=("row_wise",)), (1000, 128), env)) == {("row_wise", 8, 1, 0)}


def test_a_sharder_of_even_cuts_gets_those() -> None:
    found = families(asked(Even(only=("table_wise", "column_wise")), (1000, 128), one_axis(8)))
    assert found == {("table_wise", 1, 1, 0), ("column_wise", 1, 2, 0), ("column_wise", 1, 4, 0)}


def test_narrow_blocks_are_made_where_a_constraint_allows_them() -> None:
    env, sharder = one_axis(8), Open(only=("table_wise", "column_wise"))
    assert families(asked(sharder, (1000, 48), env)) == {("table_wise", 1, 1, 0)}
    assert families(asked(sharder, (1000, 48), env, Constraint(min_columns=16))) == {("table_wise", 1, 1, 12)}
    only = asked(Open(only=("column_wise",)), (1000, 16), env)  # nothing else is left
    assert families(only) >= {("column_wise", 1, 2, 0)}
    with pytest.raises(PlanError, match="min_columns is 32"):
        asked(Open(only=("column_wise",)), (1000, 16), env, Constraint(min_columns=32))


def every_place() -> Iterator[tuple[Layout, ShardingEnv]]:
    for env in (one_axis(8), hosts(4, 2)):
        yield table_wise(5), env
        yield row_wise(), env
        yield row_wise([4, 5]), env
        yield column_wise([3, 0]), env
        yield grid([[2, 6], [3, 7]]), env
    yield table_row_wise([2, 3]), hosts(4, 2)
    for env in (one_axis(8), hosts(2, 4)):
        yield row_wise([4, 5, 6]), env
        yield grid([[4, 0], [5, 1], [6, 2]]), env


@pytest.mark.parametrize(("layout", "env"), list(every_place()), ids=str)
def test_a_layout_is_found_in_its_family(layout: Layout, env: ShardingEnv) -> None:
    place = placed(layout, env)
    assert place is not None
    assert layout_of(place.family, place.blocks, None, 128, env) == layout
    assert place.family in canonical_layouts(env.table_shape).values()


@pytest.mark.parametrize("columns", [64, 66, 130])
def test_uneven_cuts_cover(columns: int) -> None:
    env = hosts(4, 2)
    for size, blocks, widths in ((1, (6, 0, 3), (4, 4, 8)), (2, (3, 0, 1), (10, 2, 4)), (4, (1, 0), (8, 8))):
        units = [*widths[:-1], columns // 4 - sum(widths[:-1])]
        layout = layout_of(Family("table_wise", size, 1, columns // 4, 1), blocks, units, columns, env)
        shards = layout.shards((40, columns), env)
        check_cover(shards, (40, columns), 8)
        assert {s.rank // size for s in shards} == set(blocks)
        assert Layout.from_json(layout.to_json()) == layout
    assert sum(even_widths(columns, 3)) == columns


def test_what_is_given_up_where_nothing_fits(caplog: pytest.LogCaptureFixture) -> None:
    env = one_axis(4)
    narrow = ShardingPlanner(small_memory(1_000_000), batch_size=1)
    plan = narrow.plan(bags((20_000, 16)), [Open(only=("table_wise", "column_wise"))], env)
    assert plan["t0.weight"].layout.name == "column_wise"
    assert narrow.report is not None
    assert narrow.report.notes == ()
    tight = ShardingPlanner(small_memory(10_000_000), batch_size=1)
    tight.plan(bags(*[(20_000, 64)] * 3), [BagSharder(None)], env)
    assert tight.report is not None
    assert "no optimizer in the backward pass" in tight.report.notes[0]
    assert caplog.text.count("no optimizer in the backward pass") == 1


def test_what_an_error_tells_is_true() -> None:
    module, sharder, env = bags((5000, 16), (6000, 16)), BagSharder(), hosts(2, 2)
    pins = {"t0.weight": table_wise(0), "t1.weight": table_wise(0)}
    with pytest.raises(PlanError, match=r"no pin on 't1.weight'") as caught:
        ShardingPlanner(small_memory(1_000_000), batch_size=1).plan(module, [sharder], env, pins)
    assert (caught.value.table, caught.value.rank) == ("t1.weight", 0)
    ShardingPlanner(small_memory(1_000_000), batch_size=1).plan(
        module, [sharder], env, {"t0.weight": pins["t0.weight"]}
    )
    with pytest.raises(PlanError, match="batch_size of ") as caught:
        ShardingPlanner(small_memory(2_000_000), batch_size=100_000).plan(module, [sharder], env)
    batch = int(str(caught.value).split("batch_size of ")[1].split()[0])
    ShardingPlanner(small_memory(2_000_000), batch_size=batch).plan(module, [sharder], env)
    with pytest.raises(PlanError, match=r"more hosts?, (\d+) in all") as caught:
        ShardingPlanner(small_memory(300_000), batch_size=1).plan(module, [sharder], env)
    more = int(str(caught.value).split(" in all")[0].split()[-1])
    ShardingPlanner(small_memory(300_000), batch_size=1).plan(module, [sharder], hosts(more, 2))


def test_kernels_go_into_the_plan_and_its_memory() -> None:
    module, sharder, env = bags((5000, 16), (6000, 16)), BagSharder(None, only=("table_wise",)), one_axis(1)
    sizes = {}
    for kernel in ("fused", "dense"):
        planner = ShardingPlanner(constraints={"*": Constraint(kernel=kernel)}, batch_size=1)
        plan = planner.plan(module, [sharder], env)
        assert {entry.kernel for entry in plan.values()} == {kernel}
        assert ShardingPlan.from_json(plan.to_json()) == plan
        assert planner.report is not None
        sizes[kernel] = int(planner.report.rank_bytes[0])
    assert sizes["dense"] > 3 * sizes["fused"]
    with pytest.raises(ValueError, match="kernel"):
        Constraint(kernel="uvm")


def test_the_nearest_layout_is_told_where_it_would_lie() -> None:
    planner = ShardingPlanner(small_memory(1000), {"t0": Constraint(ranks=[2])}, batch_size=1)
    with pytest.raises(PlanError, match=r"nearest layout, table_wise\(2\), rank 2 is \d+ bytes"):
        planner.plan(bags((5000, 16)), [BagSharder()], one_axis(3))


def test_an_optimizer_in_the_backward_pass_is_not_counted_where_the_dense_kernel_forgets_it() -> None:
    """The table then has a gradient, and the state of an optimizer that nobody knows, whatever had been attached."""
    module, env = bags((5000, 16)), one_axis(1)
    planner = ShardingPlanner(constraints={"*": Constraint(kernel="dense")}, batch_size=1)
    plans = [planner.plan(module, [BagSharder(of, ("table_wise",))], env) for of in (None, "rowwise_adagrad")]
    assert plans[1].report.rank_bytes == plans[0].report.rank_bytes > 4 * 5000 * 16 * 4
    assert plans[1].report.step_seconds == plans[0].report.step_seconds


def test_what_is_short_by_bytes_alone_is_told_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(30_000 + 10 * i, 512) for i in range(300)]
    env, sharder, memory = hosts(1, 8), Open(only=("table_wise", "row_wise")), 1_500_000_000

    def planned(on: ShardingEnv, size: float) -> None:
        ShardingPlanner(small_memory(size), batch_size=1).plan(bags(*shapes), [sharder], on)

    with monkeypatch.context() as without:
        without.setattr(request, "search", None)
        with pytest.raises(PlanError, match=r"the 300 tables do not fit.*short together") as caught:
            planned(env, memory)
    error, text = caught.value, str(caught.value)
    weights, usable = 8 * sum(rows * columns for rows, columns in shapes), 8 * memory  # and state
    assert error.table == "t299.weight"
    assert error.bytes_short is not None
    assert weights - usable <= error.bytes_short < 1.01 * weights - usable
    more, size = int(text.split(" in all")[0].split()[-1]), float(text.split("memory_bytes of ")[1].split()[0])
    planned(hosts(more, 8), memory)
    planned(env, size)


def test_columns_beyond_a_multiple_of_four_are_counted_once() -> None:
    """All pieces together take what the table takes, and each has room for them: one will have them."""
    module, sharder, env = bags((50_000, 1022), (40_000, 67)), Open(only=("table_wise", "column_wise")), one_axis(8)
    planner = ShardingPlanner(batch_size=512)
    plan = planner.plan(module, [sharder], env)
    planned, pinned = plan.report, planner.plan(module, [sharder], env, plan).report
    assert planned is not None and pinned is not None
    seconds = [np.sum(of.rank_seconds) for of in (planned, pinned)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
    assert (np.array(planned.rank_bytes) >= pinned.rank_bytes).all()
    assert planned.lower_bound <= pinned.table_seconds
