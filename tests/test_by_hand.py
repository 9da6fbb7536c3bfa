"""Layouts, shards and plans that a person wrote, in Python or in JSON, with anything in any place: ours to refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import dmp
from dmp import (
    Layout,
    ParameterSharding,
    PlanError,
    Shard,
    ShardError,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    colwise,
    grid,
    rectangles,
    row_wise,
    table_row_wise,
    table_wise,
)
from planner import Constraint, ShardingPlanner, Topology
from tests.spoiled import change_json

ENVS = [
    ShardingEnv.abstract((4,), ("dp",), "cpu"),
    ShardingEnv.abstract((2, 2), ("shard", "tp"), "cpu"),
    ShardingEnv.abstract((2, 2), ("host", "local"), "cpu"),
]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        5,
        2**70,
        10**5000,
        1.5,
        float("nan"),
        float("inf"),
        3j,
        "",
        "x",
        b"x",
        (),
        range(3),
    ),
    *([], {}, [[]], [None], {"x": 1}, [-1], ["1"], [2**70], [1.0], [True], [[0, 1], [2]], [[[0]]], {1, 2}, len),
    *(torch.tensor(1), torch.tensor([0, 1]), torch.float32, torch.Size([2, 2]), Shard((0, 0), (1, 1), 0)),
]
WITH_ARGUMENTS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "rectangles", "colwise", "rowwise")
NAMES = (*WITH_ARGUMENTS, "data_parallel", "sequence", "replicate", "fully_sharded")
PLAN = ShardingPlan(
    {
        "a": row_wise(),
        "b": column_wise([0, 1]),
        "c": grid([[0, 1], [2, 3]]),
        "d": rectangles([Shard((0, 0), (4, 4), 0)]),
        "e": table_row_wise([0, 1]),
        "f": colwise(),
        "g": table_wise(2),
    }
)


def works_or_is_ours(make: Callable[[], Any]) -> str:
    """What is said; whatever was made can be shown, compared and resolved."""
    try:
        made = make()
        for layout in [made] if isinstance(made, Layout) else [entry.layout for entry in made.values()]:
            hash(layout)
            assert ShardingPlan({"a": layout}) == ShardingPlan.from_json(ShardingPlan({"a": layout}).to_json())
            str(layout)
            for env in ENVS:
                for shape in ((8, 8), (8,), (), (3, 5), (0, 4)):
                    with suppress(ShardError):
                        layout.shards(shape, env)
    except (PlanError, ShardError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_layouts(name: str) -> None:
    said = []
    for odd in ODD:
        if name in WITH_ARGUMENTS:
            said.append(works_or_is_ours(lambda odd=odd: getattr(dmp, name)(odd)))
        for key in ("rank", "ranks", "widths", "host", "shards", "dim", "x"):
            said.append(works_or_is_ours(lambda odd=odd, key=key: Layout.from_json({"layout": name, key: odd})))
            said.append(works_or_is_ours(lambda odd=odd, key=key: Layout(name, ((key, odd),))))
        said.append(works_or_is_ours(lambda odd=odd: Layout(name, odd)))
        said.append(works_or_is_ours(lambda odd=odd: Layout(odd, (("rank", 1),))))
        said.append(works_or_is_ours(lambda odd=odd: Layout.from_json(odd)))
    assert max(map(len, said)) < 600
    assert sum(map(bool, said)) > 100


def test_shards_and_plans() -> None:
    said = []
    for odd in ODD:
        for place in range(3):
            arguments: list[Any] = [(0, 0), (8, 8), 0]
            arguments[place] = odd
            said.append(works_or_is_ours(lambda arguments=arguments: rectangles([Shard(*arguments)])))
            said.append(works_or_is_ours(lambda arguments=arguments: rectangles([arguments])))
        said.append(works_or_is_ours(lambda odd=odd: {"a": ParameterSharding(odd)}))
        said.append(works_or_is_ours(lambda odd=odd: ShardingPlan(odd)))
        said.append(works_or_is_ours(lambda odd=odd: ShardingPlan({"a": odd})))
        said.append(works_or_is_ours(lambda odd=odd: ShardingPlan.from_json(odd)))
        said.append(works_or_is_ours(lambda odd=odd: PLAN.merged(odd)))
        for layout in (row_wise(), table_wise(0), colwise()):
            try:
                layout.shards(odd, ENVS[1])
            except ShardError as error:
                said.append(str(error))
    assert max(map(len, said)) < 600
    with pytest.raises(ShardError, match="a layout resolves for a ShardingEnv; got None"):
        row_wise().shards((8, 8), None)  # type: ignore[arg-type]


def test_by_hand_is_as_by_its_constructor() -> None:
    assert Layout("column_wise", (("widths", [4, 4]), ("ranks", [0, 1]))) == column_wise([0, 1], widths=[4, 4])  # type: ignore[arg-type]
    assert Layout("row_wise") == row_wise()
    with pytest.raises(ShardError, match=r"Shard\.offsets must be a list of integers; got \(0\.5, 0\)"):
        Shard((0.5, 0), (1, 1), 0)  # type: ignore[arg-type]


TEXTS = [
    "[" * 100_000,
    '{"a":' * 100_000,
    "NaN",
    "9" * 5000,
    '{"version":1,"parameters":NaN}',
    '{"version":true,"parameters":{}}',
    '{"version":1.0,"parameters":{}}',
    '{"version":1,"version":1,"parameters":{}}',
    '{"version":1,"parameters":{"a":{"layout":"row_wise"},"a":{"layout":"table_wise","rank":0}}}',
    '{"version":1,"parameters":{"a":{"layout":"grid","ranks":' + "[" * 900 + "]" * 900 + "}}}",
    '{"version":1,"parameters":{"a":{"layout":"table_wise","rank":' + "9" * 4000 + "}}}",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts(text: str) -> None:
    said = works_or_is_ours(lambda: ShardingPlan.from_json(text))
    assert 0 < len(said) < 1000 or "table_wise" in text


def test_mutations() -> None:
    rng, refused = random.Random(0), 0
    for _ in range(500):
        value = json.loads(PLAN.to_json())
        change_json(value, rng)
        refused += bool(works_or_is_ours(lambda value=value: ShardingPlan.from_json(json.dumps(value))))
    assert refused > 200


MACHINE = dict.fromkeys(("memory_bytes", "memory_bandwidth", "flops", "link_bandwidth", "link_latency"), 1e9)
CONSTRAINTS = ("layouts", "forbid", "ranks", "colocate", "spread", "pooling_factor")
MAKERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(CONSTRAINTS, lambda key, odd: hash(Constraint(**{key: odd}))),
    **dict.fromkeys(
        (*MACHINE, "reserved_fraction"),
        lambda key, odd: Topology(**{**MACHINE, key: odd}).links(ENVS[2]),  # type: ignore[arg-type]
    ),
    **dict.fromkeys(
        ("batch_size", "time_budget_s", "effort", "constraints"), lambda key, odd: ShardingPlanner(**{key: odd})
    ),
}


@pytest.mark.parametrize("key", MAKERS)
def test_what_the_planner_is_given(key: str) -> None:
    """A figure or name, or a ValueError that names the argument and shows what came."""
    said = []
    for odd in ODD:
        try:
            MAKERS[key](key, odd)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 20
    assert [text for text in said if key not in text or not 30 < len(text) < 300] == []
