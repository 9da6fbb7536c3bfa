"""Pins beside constraints: both are kept, or the two that contradict each other are named."""

from __future__ import annotations

import pytest
from torch import nn

from dmp import Layout, ParameterSharding, PlanError, column_wise, row_wise, table_wise
from planner import Constraint, ShardingPlanner
from sharders import default_sharders
from tests.planner_bags import BagSharder, bags, one_axis


@pytest.mark.parametrize(
    ("constraint", "layout", "said"),
    [
        (Constraint(min_columns=64), column_wise([0, 1]), "says min_columns=64: pin another"),
        (Constraint(kernel="dense"), ParameterSharding(table_wise(0), "fused"), "says kernel='dense': leave out one"),
        (Constraint(ranks=[0, 9]), table_wise(0), "names rank 9; the mesh has table ranks 0..3"),
    ],
    ids=["columns", "kernel", "rank"],
)
def test_a_constraint_that_a_pin_cannot_keep_is_not_passed_over(
    constraint: Constraint, layout: Layout | ParameterSharding, said: str
) -> None:
    module = bags((100, 64))
    with pytest.raises(PlanError, match=rf"'t0\.weight' .*{said}") as error:
        ShardingPlanner(constraints={"t0": constraint}).plan(
            module, default_sharders(), one_axis(4), pinned={"t0.weight": layout}
        )
    assert error.value.table == "t0.weight"


def test_a_pinned_kernel_is_kept_under_any_name_and_costed() -> None:
    shared = bags((100, 8))["t0"]
    module = nn.ModuleDict({"a": shared, "b": shared})
    pinned = {"b.weight": ParameterSharding(table_wise(3), "dense")}
    plan = ShardingPlanner().plan(module, [BagSharder()], one_axis(4), pinned=pinned)
    assert dict(plan) == {"a.weight": ParameterSharding(table_wise(3), "dense")}


@pytest.mark.parametrize("layout", [table_wise(2), row_wise([1, 2]), row_wise(), column_wise([3, 0])], ids=str)
def test_what_lies_with_a_pinned_table_is_cut_like_it_on_its_ranks(layout: Layout) -> None:
    """Of a colocate group no more was kept than a rank that the pin is on: beside rows a table was cut by columns."""
    module = bags((1000, 64), (2000, 64), (3000, 64))
    planner = ShardingPlanner(constraints={"t[01]": Constraint(colocate="a")})
    plan = planner.plan(module, default_sharders(), one_axis(4), pinned={"t0.weight": layout})
    assert plan["t0.weight"].layout == plan["t1.weight"].layout == layout
    other = {"t0": Constraint(colocate="a"), "t1": Constraint(colocate="a", layouts=["grid"])}
    with pytest.raises(PlanError, match=r"'t1\.weight' is pinned as .*allows layouts=\['grid'\]"):
        ShardingPlanner(constraints=other).plan(module, default_sharders(), one_axis(4), pinned={"t0.weight": layout})


def test_two_pins_of_a_colocate_group_are_alike() -> None:
    """The group was on the same ranks, cut in two ways, and nothing said so."""
    planner, module = ShardingPlanner(constraints={"t*": Constraint(colocate="a")}), bags((1000, 64), (2000, 64))
    alike = {"t0.weight": row_wise(), "t1.weight": row_wise([0, 1, 2, 3])}
    assert dict(planner.plan(module, default_sharders(), one_axis(4), pinned=alike)) == {
        name: ParameterSharding(layout) for name, layout in alike.items()
    }
    cut_otherwise = {**alike, "t1.weight": column_wise([0, 1, 2, 3])}
    with pytest.raises(PlanError, match=r"'t0\.weight' is pinned as row_wise.* 't1\.weight' as column_wise.*'a'"):
        planner.plan(module, default_sharders(), one_axis(4), pinned=cut_otherwise)
