"""What is true of every plan: it covers, fits, obeys; it is the same again; more freedom never costs time.

Models, meshes and machines are drawn by hypothesis, the same ones in every run. Bytes are counted here anew, from the
rectangles.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from dmp import (
    Found,
    Layout,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from planner import Constraint, PlanReport, ShardingPlanner, Topology
from planner.costs.step import Placed, loads
from sharders import default_sharders
from tests.planner_bags import bags

SHAPES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (3, 2), (2, 8), (6, 4)]
NAMES = {1: ("dp",), 2: ("host", "local")}
HARDLY = 1e-9
WITHIN = 0.01  # of the best plan is how near plans are meant to be; two searches may differ by as much


@dataclass(frozen=True)
class Drawn:
    """A model, a mesh and a machine.

    Args:
        fill: how often the weights would fit the machine; below 1 they do not.
        frozen: for each table whether it is; the first ones count.
    """

    shapes: tuple[tuple[int, int], ...]
    pooling: tuple[float, ...]
    mesh: tuple[int, ...]
    fill: float
    batch_size: int
    latency: float
    frozen: tuple[bool, ...] = ()

    @property
    def env(self) -> ShardingEnv:
        return ShardingEnv.abstract(self.mesh, NAMES[len(self.mesh)])

    @property
    def module(self) -> nn.ModuleDict:
        module = bags(*self.shapes)
        for table, is_frozen in zip(module.values(), self.frozen, strict=False):
            table.requires_grad_(not is_frozen)
        return module

    @property
    def names(self) -> list[str]:
        return [f"t{i}.weight" for i in range(len(self.shapes))]

    @property
    def weight_bytes(self) -> int:
        return sum(rows * columns * 4 for rows, columns in self.shapes)

    def topology(self, factor: float = 1.0) -> Topology:
        """With so many times the memory that was drawn; bags and gradients need room too."""
        bags = sum(40 * columns + 400 for _, columns in self.shapes) * self.batch_size
        rank_bytes = 3 * self.weight_bytes / self.env.size * self.fill + bags
        links = (5e10, 4.5e11)[-len(self.mesh) :]
        return Topology(rank_bytes * factor, 2.5e12, 6e13, links, self.latency, reserved_fraction=0.0)

    def planner(self, factor: float = 1.0, constraints: Mapping[str, Constraint] | None = None) -> ShardingPlanner:
        pooling = {f"t{i}.weight": Constraint(pooling_factor=p) for i, p in enumerate(self.pooling[: len(self.shapes)])}
        more = dict(constraints or {})
        return ShardingPlanner(
            self.topology(factor), {**more, **pooling}, batch_size=self.batch_size, time_budget_s=1e6
        )

    def plan(self, factor: float = 1.0, constraints: Mapping[str, Constraint] | None = None) -> ShardingPlan | None:
        """None where there is none."""
        try:
            return self.planner(factor, constraints).plan(self.module, default_sharders(), self.env)
        except PlanError as error:
            if error.table is None:  # something else is wrong
                raise
            return None


def _table() -> st.SearchStrategy[tuple[int, int]]:
    rows = st.one_of(st.integers(1, 40), st.integers(100, 100_000), st.integers(1_000_000, 50_000_000))
    return st.tuples(rows, st.sampled_from([1, 3, 4, 16, 32, 64, 96, 128, 512]))


DRAWN = st.builds(
    lambda shapes, pooling, *others: Drawn(tuple(shapes), tuple(pooling[: len(shapes)]), *others),
    st.lists(_table(), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]), min_size=8, max_size=8),
    st.sampled_from(SHAPES),
    st.sampled_from([0.3, 0.5, 1.0, 3.0, 100.0]),
    st.sampled_from([1, 64, 2048]),
    st.sampled_from([0.0, 2e-5]),
    st.sampled_from([(), (True, False) * 4, (True,) * 8]),
)

Test = Callable[..., None]


def of_drawn(check: Callable[[Drawn], None]) -> tuple[Test, Test]:
    """The test with few examples, and the slow one with many."""

    def test(count: int) -> Test:
        @settings(
            max_examples=count,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(DRAWN)
        def run(drawn: Drawn) -> None:
            check(drawn)

        run.__doc__ = check.__doc__
        return run

    return test(2), pytest.mark.slow(test(150))


def held(plan: ShardingPlan, drawn: Drawn) -> list[int]:
    """Bytes of weights on each rank, from the rectangles, which cover each table (`shards` checks)."""
    env = drawn.env
    total = [0] * env.size
    for name, shape in zip(drawn.names, drawn.shapes, strict=True):
        for shard in plan[name].layout.shards(shape, env):
            total[shard.rank] += shard.sizes[0] * shard.sizes[1] * 4
    return total


def report(plan: ShardingPlan) -> PlanReport:
    found = plan.report
    assert isinstance(found, PlanReport)
    return found


def _covers_and_fits(drawn: Drawn) -> None:
    """Every table is covered once, ranks hold no more than they have, the report says what they hold and no less."""
    plan = drawn.plan()
    if plan is None:
        assert drawn.plan(1000.0) is not None
        return
    plan.validate(drawn.module, drawn.env, default_sharders())
    assert set(plan) == set(drawn.names)
    said = report(plan)
    usable = drawn.topology().usable_bytes
    for weights, counted in zip(held(plan, drawn), said.rank_bytes, strict=True):
        assert weights <= counted + 1 and counted <= usable * (1 + HARDLY)
    assert said.lower_bound <= said.step_seconds * (1 + HARDLY)
    _is_exact(plan, drawn)


def _is_exact(plan: ShardingPlan, drawn: Drawn) -> None:
    """The report says what each rank's shards cost, counted one by one: last row blocks are smaller than others."""
    taken = Found.of(drawn.module, default_sharders(), drawn.env, {}, None).sites.parameters(frozenset())
    infos = {name: info for name, (_, info) in taken.items()}
    said, planner = report(plan), drawn.planner()
    if any("Adam's state" in note for note in said.notes):
        infos = {name: replace(info, state_bytes=(0, 0)) for name, info in infos.items()}
    placed = [Placed(infos[n], plan[n].layout, p) for n, p in zip(drawn.names, drawn.pooling, strict=False)]
    found = loads(planner.cost_model, placed, drawn.env, drawn.topology(), drawn.batch_size)
    assert np.abs(found[:, -1] - said.rank_bytes).max() <= 1 + HARDLY * found[:, -1].max()
    assert said.rank_seconds.sum(1) == pytest.approx(found[:, :-1].sum(1), rel=1e-6)


test_plans_cover_and_fit, test_many_plans_cover_and_fit = of_drawn(_covers_and_fits)


def test_what_rounding_leaves_of_an_empty_phase_is_no_load() -> None:
    """A rank that gave away all that it had in a phase may be left with less than nothing."""
    shapes = ((1073, 16), (26, 3), (72565, 3), (33, 32), (7, 128), (1502349, 512), (22953, 32), (312, 4))
    _covers_and_fits(Drawn(shapes, (1.0, 0.5, 0.0, 0.5, 3.0, 3.0, 3.0, 20.0), (2, 4), 1.0, 1, 0.0))


def _is_kept(drawn: Drawn) -> None:
    """A plan survives JSON, and planned again with every entry pinned it is the same, at the same cost."""
    plan = drawn.plan()
    if plan is None:
        return
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    pinned = drawn.planner().plan(drawn.module, default_sharders(), drawn.env, pinned=again)
    assert pinned == plan
    first, second = report(plan).step_seconds, report(pinned).step_seconds
    assert second == pytest.approx(first, rel=1e-6)


test_plans_are_kept, test_many_plans_are_kept = of_drawn(_is_kept)


def test_a_pinned_cut_of_uneven_columns_has_as_many_row_blocks_as_a_planned_one() -> None:
    """3,750 rows in four blocks of at most 938: by these alone they were 3.998 blocks, of which bags go another way."""
    shapes = ((3, 32), (3750, 96), (19746973, 512), (100, 4), (39916799, 96))
    _is_kept(Drawn(shapes, (1.0, 1.0, 0.5, 1.0, 0.5), (2, 4), 1.0, 2048, 2e-05))


def _freedom_is_free(drawn: Drawn) -> None:
    """More memory does not cost time, nor do more layouts to choose from; a bound is one for what may do less, too."""
    free, tight = drawn.plan(2.0), drawn.plan()
    assert free is not None or tight is None
    if free is None:
        return
    less = {"memory": tight}
    for layouts in (["table_wise"], ["row_wise"], ["table_wise", "row_wise", "data_parallel"]):
        less[f"{layouts} alone"] = drawn.plan(2.0, {"*": Constraint(layouts=layouts)})
    step, bound = report(free).step_seconds, report(free).lower_bound
    for what, plan in less.items():
        if plan is not None:
            other = report(plan).step_seconds
            assert step <= other * (1 + WITHIN), what
            assert bound <= other * (1 + HARDLY), what


test_freedom_is_free, test_freedom_is_free_of_many = of_drawn(_freedom_is_free)


def _order_is_nothing(drawn: Drawn) -> None:
    """Tables in another order make another plan perhaps, but not a slower one."""
    frozen = drawn.frozen[: len(drawn.shapes)][::-1]
    turned = replace(drawn, shapes=drawn.shapes[::-1], pooling=drawn.pooling[::-1], frozen=frozen)
    plan, other = drawn.plan(), turned.plan()
    assert (plan is None) == (other is None)
    if plan is not None and other is not None:
        first, second = report(plan).step_seconds, report(other).step_seconds
        assert second == pytest.approx(first, rel=WITHIN)


test_order_is_nothing, test_order_is_nothing_to_many = of_drawn(_order_is_nothing)


def _obeys(drawn: Drawn) -> None:
    """Allowed and forbidden layouts, ranks, tables together and apart."""
    env, last = drawn.env, drawn.env.size - 1
    alike = [i for i, shape in enumerate(drawn.shapes) if shape == drawn.shapes[0]]
    rules = {
        "forbid": Constraint(forbid=["row_wise", "data_parallel"]),
        "ranks": Constraint(ranks=[0, last]),
        "spread": Constraint(spread="apart", layouts=["table_wise"]),
        "colocate": Constraint(colocate="together"),
    }
    for rule, constraint in rules.items():
        plan = drawn.plan(
            100.0, {f"t{i}": constraint for i in (alike if rule == "colocate" else range(len(drawn.shapes)))}
        )
        if plan is None:
            assert rule in ("ranks", "spread") or rule == "colocate"
            continue
        ranks = [
            {s.rank for s in plan[n].layout.shards(s, env)} for n, s in zip(drawn.names, drawn.shapes, strict=True)
        ]
        if env.size == 1:
            continue
        if rule == "forbid":
            assert not {e.layout.name for e in plan.values()} & {"row_wise", "data_parallel"}
        if rule == "ranks":
            assert all(found <= {0, last} for found in ranks)
        if rule == "spread":
            assert sum(map(len, ranks)) == len(set.union(*ranks))
        if rule == "colocate":
            assert all(ranks[i] == ranks[0] for i in alike)


test_obeys, test_obeys_often = of_drawn(_obeys)


@pytest.mark.parametrize(
    ("shape", "seed"),
    [((2,), 0), *(pytest.param((2,) * n, seed, marks=pytest.mark.slow) for n in (1, 2) for seed in (1, 2, 3))],
    ids=str,
)
def test_no_plan_is_below_the_bound(shape: tuple[int, ...], seed: int) -> None:
    """Every plan of a few tables that cuts them in a few ways, costed as pinned; none is below the bound."""
    shapes = ((60, 64), (1000 * 10**seed, 32), (7, 32))[: 2 if seed == 0 or len(shape) == 2 else 3]
    drawn = Drawn(shapes, (3.0, 20.0, 1.0), shape, 1000.0, 2048, 0.0)
    ranks, found, steps = range(drawn.env.size), drawn.plan(), []
    assert found is not None
    ways: list[Layout] = [table_wise(r) for r in ranks]
    ways += [row_wise(), data_parallel(), row_wise([0, 1]), column_wise([0, 1], [28, 4]), column_wise([1, 0], [20, 12])]
    wide: list[Layout] = [column_wise([0, 1]), column_wise([1, 0], [40, 24])]
    for layouts in itertools.product(ways[:-2] + wide, *[ways] * (len(shapes) - 1)):
        pinned = dict(zip(drawn.names, layouts, strict=True))
        steps.append(
            report(drawn.planner().plan(drawn.module, default_sharders(), drawn.env, pinned=pinned)).step_seconds
        )
    bound, step = report(found).lower_bound, report(found).step_seconds
    assert bound <= min(steps) * (1 + HARDLY)
    assert step <= min(steps) * (1 + WITHIN)


def test_a_spent_budget_gives_the_first_plan() -> None:
    module = bags(*[(100_000 + 137 * i, 32) for i in range(11)])
    planner = ShardingPlanner(time_budget_s=1e-9)
    plan = planner.plan(module, default_sharders(), ShardingEnv.abstract((2, 2), NAMES[2]))
    assert len(plan) == 11 and report(plan).is_cut_short


@pytest.mark.slow
def test_processes_agree() -> None:
    """Whatever order sets and dicts of strings have in a process."""
    digests = {_digest(str(seed)) for seed in (0, 1, 77)}
    assert len(digests) == 1


def _digest(hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.test_planner_properties import print_digests; print_digests()"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def print_digests() -> None:
    """Of plans of two models."""
    shapes = tuple((1000 * (i * 7919 % 97 + 1), (16, 64, 96)[i % 3]) for i in range(60))
    for mesh in ((8,), (4, 8)):
        plan = Drawn(shapes, (2.0,) * 60, mesh, 2.0, 512, 1e-5).plan()
        assert plan is not None
        print(plan.digest)
