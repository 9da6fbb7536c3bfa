"""A teacher's tables, frozen copies that follow the model's by means of the two, are planned where those are."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ShardingEnv,
    data_parallel,
    full_state_dict,
    row_wise,
    table_wise,
)
from dmp.plans.remarks import are_cut_otherwise
from planner import Constraint, ShardingPlanner, Topology
from sharders import default_sharders
from tests.ranks import mesh, run_ranks
from tests.test_asked import Said

ROWS = 4001
MACHINE = Topology(2e6, 1e12, 1e13, (5e10,), 1e-5, reserved_fraction=0.0)
"""With no room for copies of all."""


class Taught(nn.Module):
    """A student and its teacher, who follows in a method of the model, as in BYOL and MoCo."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.ModuleList([nn.Embedding(rows, 16), nn.EmbeddingBag(rows // 2, 16)])
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        students, teachers = ([net[0](ids).sum(1), net[1](ids // 2)] for net in (self.student, self.teacher))
        return sum(((s - t - 1).square().mean() for s, t in zip(students, teachers, strict=True)), torch.zeros(()))

    @torch.no_grad()
    def follow(self) -> None:
        for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            p.data = p.data * 0.5 + q.data * 0.5


def planned(module: nn.Module, constraints: dict[str, Constraint] | None = None) -> dict[str, str]:
    planner = ShardingPlanner(MACHINE, constraints=constraints)
    plan = planner.plan(module, default_sharders(), ShardingEnv.abstract((4,), ("dp",)))
    return {name: str(entry.layout) for name, entry in plan.items()}


def test_copies_are_cut_as_what_they_follow() -> None:
    plan = planned(Taught())
    for name in ("0.weight", "1.weight"):
        assert plan[f"teacher.{name}"] == plan[f"student.{name}"]


def test_frozen_tables_of_other_values_are_planned_apart() -> None:
    module, alone = Taught(), Taught()
    with torch.no_grad():
        for p in alone.teacher.parameters():
            p[-1, 0] += 1
    plan, apart = planned(module), planned(alone)
    assert plan["teacher.0.weight"] != apart["teacher.0.weight"]
    given = {"teacher.*.weight": Constraint(layouts="column_wise")}
    assert planned(module, given)["teacher.0.weight"].startswith("column_wise")


def followed(axis: str) -> None:
    env, whole = ShardingEnv.from_mesh(mesh((2,), (axis,))), Taught()
    model = DistributedModelParallel(Taught(), env)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=5.0) for m in (model, whole)]
    for step in range(3):
        ids = torch.randint(0, ROWS, (2, 2, 3), generator=torch.Generator().manual_seed(step))
        model(ids[env.data_rank]).backward()
        torch.stack([whole(each) for each in ids]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.follow()
        whole.follow()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("axis", ["dp", "replicate"])
def test_a_teacher_follows(axis: str) -> None:
    run_ranks(2, followed, axis)


def said_later(how: str) -> list[str]:
    """Of two that are cut alike at first, and of those on meshes of different forms."""
    cuts, copies = (ShardingEnv.from_mesh(mesh((2,), (axis,))) for axis in ("dp", "replicate"))
    module, names = Taught(16), ("0.weight", "1.weight")
    module.teacher.requires_grad_(False)
    rows, whole = (dict.fromkeys(names, each) for each in (row_wise(), data_parallel()))
    with Said() as said:
        if how == "in one":
            plan = {f"{net}.{name}": each for net in ("student", "teacher") for name, each in rows.items()}
            model = DistributedModelParallel(module, cuts, plan=plan)
            model.copy()
            model.reshard({"teacher.0.weight": row_wise([1, 0])})
        else:
            student = DistributedModelParallel(module.student, cuts, plan=whole if how == "whole on both" else rows)
            teacher = DistributedModelParallel(module.teacher, cuts if how == "in two" else copies, plan=rows)
            if how == "in two":
                student.reshard({"0.weight": table_wise(1)})
            assert teacher.env.size == 2
    return [text for text in said.texts if "takes other rows" in text]


@pytest.mark.parametrize("how", ["in one", "in two", "on another mesh", "whole on both"])
def test_one_that_is_cut_otherwise_later_or_on_another_mesh_is_named(how: str) -> None:
    """Plans were compared at the wrap alone, and on equal meshes."""
    first, others = run_ranks(2, said_later, how)
    assert not others and len(first) == (how != "whole on both")


def test_what_a_rank_has_is_compared_on_meshes_of_any_form() -> None:
    flat, hosts, copies = (
        ShardingEnv.abstract(shape, names)
        for shape, names in (((4,), ("dp",)), ((2, 2), ("host", "local")), ((2, 2), ("replicate", "shard")))
    )
    for layout, of, is_other in (
        (row_wise(), hosts, False),
        (row_wise(), copies, True),
        (table_wise(1), hosts, False),
        (table_wise(1), copies, True),
        (data_parallel(), copies, False),
    ):
        assert are_cut_otherwise((8, 4), layout, flat, layout, of) is is_other, (str(layout), of)
    halves = row_wise([0, 1])
    assert are_cut_otherwise((8, 4), halves, copies, row_wise(), copies) is False
    assert are_cut_otherwise((8, 4), halves, flat, row_wise(), copies) is True  # the other copy has half, too
    assert are_cut_otherwise((8, 4), data_parallel(), flat, row_wise(), flat) is True


def said_of(layout: Layout, is_apart: bool, is_frozen: bool, is_copy: bool, rows_more: int = 0) -> list[str]:
    """Of row-wise tables, and others that are cut by `layout`, in a model of their own or in the same."""
    env, said, module = ShardingEnv.from_mesh(mesh((2,), ("dp",))), list[str](), Taught(16)
    if rows_more:
        module.teacher = Taught(16 + rows_more).teacher
    module.teacher.requires_grad_(not is_frozen)
    if not is_copy:
        nn.init.normal_(module.teacher[0].weight)  # type: ignore[arg-type]
        nn.init.normal_(module.teacher[1].weight)  # type: ignore[arg-type]
    rows, others = (dict.fromkeys(("0.weight", "1.weight"), each) for each in (row_wise(), layout))
    keep = logging.Handler()
    keep.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(keep)
    try:
        if is_apart:
            models = [DistributedModelParallel(module.student, env, plan=rows)]
            models.append(DistributedModelParallel(module.teacher, env, plan=others))
        else:
            named = {"student": rows, "teacher": others}
            plan = {f"{net}.{name}": each for net, of in named.items() for name, each in of.items()}
            DistributedModelParallel(module, env, plan=plan)
    finally:
        logging.getLogger("dmp").removeHandler(keep)
    return [text for text in said if "takes other rows" in text]


@pytest.mark.parametrize("is_apart", [False, True], ids=["in one model", "in two"])
def test_a_copy_that_a_plan_cuts_otherwise_is_named(is_apart: bool) -> None:
    """Means of the two ended in sizes that do not match, or were of other rows, and nothing said why."""
    for layout in (data_parallel(), table_wise(1), row_wise([1, 0])):
        (text,), others = run_ranks(2, said_of, layout, is_apart, True, True)
        assert not others and f"is frozen and {layout}" in text and "is row_wise(): what takes the two" in text
    for case in ((row_wise([0, 1]), is_apart, True, True), (table_wise(1), is_apart, False, True)):
        assert run_ranks(2, said_of, *case) == [[], []]
    # Neither of other values, nor, in models of their own, of another shape under the same name.
    assert run_ranks(2, said_of, table_wise(1), is_apart, True, is_apart, 2 * is_apart) == [[], []]
