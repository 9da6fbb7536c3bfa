"""Constraints: what a user asks of the plan is kept, and what cannot be is named."""

from __future__ import annotations

import pytest
from torch import nn

from dmp import (
    PlanError,
    ShardingPlan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from planner import Constraint, ShardingPlanner
from sharders import default_sharders
from tests.planner_bags import BagSharder, bags, hosts, one_axis, ranks_of, small_memory


def test_layouts_forbid_and_ranks() -> None:
    module, sharder, env = bags(*[(1000, 16)] * 4), BagSharder(), one_axis(4)
    constraints = {
        "t0": Constraint(layouts=["row_wise"]),
        "t1.weight": Constraint(forbid=("table_wise", "data_parallel", "row_wise")),
        "t2": Constraint(ranks=[3], forbid="row_wise"),
        "t3": Constraint(layouts="row_wise", ranks=[1, 2]),
    }
    plan = ShardingPlanner(constraints=constraints).plan(module, [sharder], env)
    assert plan["t0.weight"].layout == row_wise()
    assert plan["t1.weight"].layout.name == "column_wise"
    assert plan["t2.weight"].layout == table_wise(3)
    assert plan["t3.weight"].layout == row_wise([1, 2])


@pytest.mark.parametrize("ranks", [[3, 5], [1, 2], [0, 3, 5], [7, 4, 6]], ids=str)
@pytest.mark.sampled(2)
def test_rows_over_ranks_that_are_no_block(ranks: list[int]) -> None:
    for env in (one_axis(8), hosts(2, 4), hosts(4, 2)):
        constraints = {"t0": Constraint(layouts=["row_wise"], ranks=ranks)}
        plan = ShardingPlanner(constraints=constraints).plan(bags((1000, 16), (9, 8)), [BagSharder()], env)
        assert plan["t0.weight"].layout.name == "row_wise"
        assert ranks_of(plan, "t0.weight", (1000, 16), env) == set(ranks)


def test_colocate_and_spread() -> None:
    shapes, env = [(1000, 16), (2000, 16), (3000, 32), (500, 8), (600, 8), (700, 8)], one_axis(4)
    constraints = {
        "t[012]": Constraint(colocate="together"),
        "t[2345]": Constraint(spread="apart", forbid=["data_parallel", "row_wise", "column_wise"]),
    }
    plan = ShardingPlanner(constraints=constraints).plan(bags(*shapes), [BagSharder()], env)
    at = [ranks_of(plan, f"t{i}.weight", s, env) for i, s in enumerate(shapes)]
    assert at[0] == at[1] == at[2]
    assert len(at[2] | at[3] | at[4] | at[5]) == 4
    pinned = ShardingPlanner(constraints=constraints).plan(
        bags(*shapes), [BagSharder()], env, {"t1.weight": table_wise(3)}
    )
    assert all(ranks_of(pinned, f"t{i}.weight", shapes[i], env) == {3} for i in range(3))


def test_more_to_spread_than_ranks() -> None:
    with pytest.raises(PlanError, match="no rank is left") as caught:
        ShardingPlanner(constraints={"*": Constraint(spread="s")}).plan(
            bags(*[(100, 8)] * 3), [BagSharder()], one_axis(2)
        )
    assert caught.value.table is not None
    both = {"*": Constraint(spread="s", colocate="c")}
    with pytest.raises(PlanError, match="keeps apart"):
        ShardingPlanner(constraints=both).plan(bags(*[(100, 8)] * 2), [BagSharder()], one_axis(2))


def test_pooling_factor_counts() -> None:
    module, sharder, env = bags((1000, 16)), BagSharder(only=("table_wise",)), one_axis(4)

    def step(constraint: Constraint) -> float:
        planner = ShardingPlanner(small_memory(1e9, 0.0), constraints={"t0": constraint})  # latency would hide it
        planner.plan(module, [sharder], env)
        assert planner.report is not None
        return planner.report.step_seconds

    assert step(Constraint(pooling_factor=500)) > 2 * step(Constraint())
    assert step(Constraint(pooling_factor=[50])) == step(Constraint(pooling_factor=50))
    with pytest.raises(PlanError, match="read by 1 features; got 2"):
        step(Constraint(pooling_factor=[1, 2]))


def test_patterns_and_exact_names() -> None:
    module = nn.ModuleDict({"user": bags((100, 8), (100, 8)), "item": bags((100, 8))})
    constraints = {"user.t0": Constraint(layouts=["data_parallel"]), "user.*": Constraint(layouts=["row_wise"])}
    plan = ShardingPlanner(constraints=constraints).plan(module, [BagSharder()], one_axis(2))
    assert plan["user.t0.weight"].layout == data_parallel()
    assert plan["user.t1.weight"].layout == row_wise()


def test_what_a_shape_or_a_mesh_does_not_offer_is_no_mistake_where_something_is_left() -> None:
    """One pattern for tables of any width: those of six columns cannot be cut, and a mesh of one axis has no hosts."""
    module = nn.ModuleDict({"t0": nn.EmbeddingBag(100, 6), "t1": nn.EmbeddingBag(100, 64)})
    both = {"*": Constraint(layouts=["column_wise", "table_row_wise", "table_wise"])}
    plan = ShardingPlanner(constraints=both).plan(module, default_sharders(), one_axis(2))
    assert plan["t0.weight"].layout.name == "table_wise"
    cut = {"*": Constraint(layouts=["column_wise"])}
    with pytest.raises(PlanError, match=r"'t0\.weight' asks for layout 'column_wise'; .* for shape \(100, 6\)"):
        ShardingPlanner(constraints=cut).plan(module, default_sharders(), one_axis(2))
    with pytest.raises(PlanError, match=r"asks for layout 'rowwise'"):
        ShardingPlanner(constraints={"*": Constraint(layouts=["table_wise", "rowwise"])}).plan(
            module, default_sharders(), one_axis(2)
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_rows_of_a_host_lie_on_all_of_it_however_few_they_are(rows: int) -> None:
    """A table of one row was moved as if single ranks of `table_row_wise` could: its row was on a rank left out."""
    env = hosts(2, 4)
    module = nn.ModuleDict({"t0": nn.EmbeddingBag(rows, 32)})

    def plan(ranks: list[int]) -> ShardingPlan:
        constraint = Constraint(layouts="table_row_wise", ranks=ranks)
        return ShardingPlanner(constraints={"t0": constraint}).plan(module, default_sharders(), env)

    with pytest.raises(PlanError, match=r"no layout is left for 't0\.weight'"):
        plan([1, 2, 3, 4, 5])
    assert plan([1, 4, 5, 6, 7])["t0.weight"].layout == table_row_wise(1)


def test_wrong_constraints_are_named() -> None:
    module, sharder, env = bags((100, 8)), BagSharder(), one_axis(2)
    for constraints, text in [
        ({"t9": Constraint()}, r"'t9'.*did you mean 't0'"),
        ({"zzz*": Constraint()}, r"'zzz\*'.*t0\.weight"),
        ({"t0": Constraint(layouts=["rowwise"])}, r"'rowwise'.*row_wise"),
        ({"t0": Constraint(forbid=["row-wise"])}, r"forbids 'row-wise', which is no layout.*row_wise"),
        ({"t0": Constraint(ranks=[5])}, r"rank 5.*0\.\.1"),
        ({"t0": "row_wise"}, "must be a Constraint"),
    ]:
        with pytest.raises(PlanError, match=text):
            ShardingPlanner(constraints=constraints).plan(module, [sharder], env)  # type: ignore[arg-type]
    every = Constraint(forbid=["table_wise", "row_wise", "column_wise", "data_parallel"])
    with pytest.raises(PlanError, match=r"no layout is left.*forbid"):
        ShardingPlanner(constraints={"t0": every}).plan(module, [sharder], env)
    apart = {"t0": Constraint(colocate="a", ranks=[0]), "t1": Constraint(colocate="a", ranks=[1])}
    with pytest.raises(PlanError, match=r"group 'a' has no rank .*'t0\.weight': \(0,\), 't1\.weight': \(1,\)"):
        ShardingPlanner(constraints=apart).plan(bags((100, 8), (100, 8)), [sharder], env)
    for bad in ({"ranks": []}, {"ranks": [-1]}, {"layouts": []}):
        with pytest.raises(ValueError, match=r"Constraint\."):
            Constraint(**bad)  # type: ignore[arg-type]
