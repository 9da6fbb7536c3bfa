"""What copied tables cost depends on what else is copied: costs are settled for a plan, and the search told them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
from torch import nn

from dmp import Layout, ShardingEnv, data_parallel, row_wise, table_wise
from planner import Constraint, CostModel, ShardingPlanner
from planner.candidates import request
from planner.candidates.candidates import Candidates
from planner.costs.copies import Travel, conditions, travel, ways
from planner.costs.cost_model import BACKWARD, FORWARD, GRADIENT, SYNC
from planner.costs.protocol import ShardTable
from planner.costs.speeds import Speeds
from planner.costs.step import Placed, phase_seconds, whole
from planner.search.bound import lower_bound
from planner.search.bound_held import bound_of_held
from planner.search.placement import Part, Placement, even
from sharders import default_sharders
from tests.planner_bags import MEASURED, bags, hosts, one_axis
from tests.test_cost_model import ENVS, by_name, info
from tests.test_planner_families import drawn


@pytest.mark.parametrize("env", ENVS, ids=str)
def test_a_rank_sends_the_rows_of_a_copy_that_its_own_ids_name(env: ShardingEnv) -> None:
    of_table = whole(info(100_000, 64), 8.0, 2000.0)
    for is_copied in (True, False):
        known = [of_table._replace(replicated=is_copied, named_rows_of_rank=rows) for rows in (0.0, 2000.0, 500.0)]
        as_all, the_same, fewer = CostModel().costs(ShardTable.of(known), env, MEASURED, 64)[0]
        assert np.array_equal(as_all, the_same)
        less = fewer < as_all * (1 - 1e-9)
        assert less[BACKWARD] == (less[GRADIENT] or less[SYNC]) == is_copied and not less[FORWARD]
        assert (fewer <= as_all).all()


def test_what_a_copy_costs_is_settled_by_all_of_them() -> None:
    """Each of these would go by rows if it were alone; together they are too many, and an all-reduce is fewer bytes."""
    env = one_axis(8)

    def phases(tables: int, samples: int, *others: Layout) -> dict[str, float]:
        layouts = [data_parallel()] * tables + list(others)
        placed = [Placed(info(20_000, 64), layout, 10.0) for layout in layouts]
        return by_name(phase_seconds(CostModel(), placed, env, MEASURED, samples))

    one, many = phases(1, 4096), phases(40, 4096)
    assert one["grad a2a"] > 0 and one["replica sync"] == 0
    all_reduce = 2 * 7 / 8 * 40 * 20_000 * 65 * 4 / MEASURED.links(env)["dp"].bandwidth
    assert many["replica sync"] == pytest.approx(all_reduce, rel=0.3)
    assert many["grad a2a"] < one["grad a2a"]
    few = phases(40, 16)
    assert few["grad a2a"] + few["replica sync"] < many["replica sync"] / 10, "few rows are named"


def test_rows_of_copies_that_come_among_other_gradients_are_copied() -> None:
    """All that there is room for; those that have an exchange to themselves are read where they come."""
    topology = replace(MEASURED, speeds=Speeds(fetch=1e-9), link_latency=0.0, link_bandwidth=1e30)

    def seconds(*others: Layout) -> float:
        placed = [Placed(info(1000, 64), layout, 1.0) for layout in (data_parallel(), *others)]
        return float(phase_seconds(CostModel(), placed, ENVS[0], topology, 512).sum())

    assert seconds(table_wise(0)) == pytest.approx(7 * 512 * (64 * 4 + 8) * 1e-9)
    assert seconds() == pytest.approx(0, abs=1e-12)
    assert seconds(*[table_wise(i) for i in range(8)]) == pytest.approx(0, abs=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("env", [one_axis(8), hosts(2, 4)], ids=str)
@pytest.mark.parametrize("is_guessed", [True, False])
def test_planned_costs_what_it_costs_pinned_however_copies_travel(env: ShardingEnv, is_guessed: bool) -> None:
    """Also where it was first taken for another plan."""
    found = set()
    for rows, tables, samples in ((300, 6, 64), (20_000, 30, 2048), (200_000, 6, 512)):
        module = nn.ModuleDict({f"t{i}": nn.EmbeddingBag(rows, 64, mode="sum", device="meta") for i in range(tables)})
        planner = ShardingPlanner(batch_size=samples, constraints={"*": Constraint(pooling_factor=20)})
        likely = Candidates.likely if is_guessed else lambda self: self
        with mock.patch.object(Candidates, "likely", likely):
            plan = planner.plan(module, default_sharders(), env)
        pinned = planner.plan(module, default_sharders(), env, pinned=plan)
        assert pinned.report.step_seconds == pytest.approx(plan.report.step_seconds, rel=1e-9)
        assert plan.report.lower_bound <= pinned.report.step_seconds * (1 + 1e-9)
        assert pinned.report.phase_seconds == pytest.approx(plan.report.phase_seconds, rel=1e-6)
        assert (pinned.report.rank_bytes == plan.report.rank_bytes).all()
        found.add(any(entry.layout.is_copied for entry in plan.values()))
    assert found == {False, True}


def test_the_way_of_which_a_plan_seems_quickest_is_searched() -> None:
    """Were some of these copied, rows would travel that batches name; were all, whole tables, which is quicker."""
    module = bags(*((rows, 64) for rows in np.geomspace(10, 10_000, 100).astype(int).tolist()))
    planner, seconds = ShardingPlanner(batch_size=8192, constraints={"*": Constraint(pooling_factor=12)}), []
    for ways_of in (Candidates.other_ways, lambda *_: iter(())):
        with mock.patch.object(Candidates, "other_ways", ways_of):
            seconds.append(planner.plan(module, default_sharders(), one_axis(4)).report.step_seconds)
    assert seconds[0] < 0.95 * seconds[1]


def test_a_way_with_a_lower_bound_than_what_was_searched_is_searched_too() -> None:
    """Were all copied, nobody would exchange results; of the large one by itself that does not seem to pay."""
    module = bags((56, 64), (111, 64), (3232, 16), (67, 64), (382_456, 16))
    planner, seconds = ShardingPlanner(batch_size=1024, constraints={"*": Constraint(pooling_factor=20)}), []
    for of_way in (request._of_way, lambda *_: ([], 0.0)):
        with mock.patch.object(request, "_of_way", of_way):
            report = planner.plan(module, default_sharders(), one_axis(64)).report
            seconds.append(report.step_seconds)
            assert report.lower_bound <= seconds[0] * (1 + 1e-9)
    assert seconds[0] < 0.95 * seconds[1]


def test_a_plan_is_of_one_of_the_ways_that_are_asked() -> None:
    """Whatever is copied: a bound over all ways is one for all plans."""
    rng, found, left_out = np.random.default_rng(0), set(), 0
    for _ in range(1500):
        env = ENVS[int(rng.integers(len(ENVS)))]
        number, samples = int(rng.integers(1, 7)), float(2 ** rng.integers(3, 14))
        rows, ids = 2 ** rng.integers(4, 22, number), 2.0 ** rng.integers(-2, 6, number)
        dims = 2 ** rng.integers(2, 9, number)
        tables = [whole(info(int(r), int(d)), float(i)) for r, d, i in zip(rows, dims, ids, strict=True)]
        asked = ways(ShardTable.of(tables), env, samples)
        for _ in range(4):
            copied = rng.random(number) < rng.choice([0.3, 0.9, 1.0])
            plan = [t._replace(replicated=c) for t, c in zip(tables, copied.tolist(), strict=True)]
            way = travel(ShardTable.of(plan), env, samples)
            assert way is None or way in asked
            for adds, least in conditions(way, ShardTable.of(tables), env, samples) if way is not None else ():
                assert adds[copied].sum() >= least - 1e-9 * np.abs(adds).sum()
            found.add(way)
        left_out += len(Travel) - len(asked)
    assert found == {None, *Travel} and left_out > 1000


@pytest.mark.sampled(4)
@pytest.mark.parametrize("samples", [16, 2048])
def test_no_plan_of_any_way_costs_less_than_the_bound(samples: int) -> None:
    """All choices of three tables on four ranks, some of them copied, by what they cost pinned."""
    module, env = bags((300, 16), (200_000, 32), (3000, 128)), one_axis(4)
    planner = ShardingPlanner(batch_size=samples, constraints={"*": Constraint(pooling_factor=8)})
    bound = planner.plan(module, default_sharders(), env).report.lower_bound
    seconds = []
    for chosen in product((data_parallel(), table_wise(1), row_wise()), repeat=3):
        pins = {f"t{i}.weight": layout for i, layout in enumerate(chosen)}
        seconds.append(planner.plan(module, default_sharders(), env, pinned=pins).report.step_seconds)
    assert bound <= min(seconds) * (1 + 1e-9)


def test_what_must_be_copied_for_a_way_is_counted() -> None:
    """Of 26 tables on two ranks 14 are copied; were all, their gradients would travel alone, and cost less."""
    module = bags(*((rows, 128) for rows in np.geomspace(10, 2e6, 26).astype(int).tolist()))
    planner, gaps = ShardingPlanner(batch_size=2048, constraints={"*": Constraint(pooling_factor=1)}), []
    for conditions_of in (Candidates.conditions, lambda _: iter(())):
        with mock.patch.object(Candidates, "conditions", conditions_of):
            gaps.append(planner.plan(module, default_sharders(), one_axis(2)).report.gap)
    assert gaps[0] < 0.5 * gaps[1]


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_of_which_a_sum_is_so_much_costs_less_than_the_bound_of_those(seed: int) -> None:
    """All plans of four items on two ranks, and sums that one plan in three, in ten and in a hundred have."""
    p, random = drawn(seed, 4, 2, (1, 2), 2, 1e9, 1), np.random.default_rng(seed)
    adds = random.normal(size=len(p.table.size))
    of_item = []
    for first, stop in zip(p.starts[p.item_class], p.starts[p.item_class + 1], strict=True):
        parts = []
        for row in range(first, stop):
            size, units = int(p.table.size[row]), int(p.table.units[row])
            blocks = [(b,) for b in range(2 // size)] + ([(0, 1)] if size == 1 and units > 1 else [])
            parts += [Part(row, of, even(units, len(of))) for of in blocks]
        of_item.append(parts)
    plans = list(product(*of_item))
    seconds = np.array([Placement.of(p, plan).seconds() for plan in plans])
    sums = np.array([sum(adds[part.row] for part in plan) for plan in plans])
    free, gained = lower_bound(p, float(seconds.max())), 0
    for share in (1 / 3, 0.1, 0.01):
        least = float(np.sort(sums)[int(len(sums) * (1 - share))])
        bound = bound_of_held(p, adds, least, free, float(seconds.max()))
        assert free.seconds <= bound <= seconds[sums >= least].min() * (1 + 1e-9)
        gained += bound > free.seconds * 1.001
    assert gained
