"""Odd plans: names, layouts by constructor and by hand, rectangles, JSON; the same on all ranks or on one alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import dmp
from dmp import (
    DistributedModelParallel,
    Layout,
    ParameterSharding,
    Shard,
    ShardingPlan,
    column_wise,
    colwise,
    data_parallel,
    fully_sharded,
    grid,
    rectangles,
    replicate,
    row_wise,
    rowwise,
    sequence,
    table_row_wise,
    table_wise,
)
from tests.equality import env_of, random_rectangles
from tests.fuzz.outcome import ERROR, Outcome, Wrong, outcome_of
from tests.wrapped_net import TABLES, Net, batch, loss_of, mixed

MESHES = ("dp2", "replicate2", "tp2", "single")
Plan = dict[Any, Any]


class Probe(NamedTuple):
    """One odd plan."""

    change: str
    mesh: str
    where: str  # "all", or the one rank that has it while the other has a good one
    seed: int

    def __str__(self) -> str:
        return f"plans: {self.change} on {self.mesh}, on {self.where}, seed {self.seed}"


def probes(seed: int, count: int) -> list[Probe]:
    """Each change in turn, with more seeds for those that draw at random."""
    rng = random.Random(seed)
    found = []
    names = [*CHANGES, *RANDOM * 4]
    while len(found) < count:
        rng.shuffle(names)
        found += [
            Probe(name, rng.choice(MESHES), rng.choice(("all", "all", "0", "1")), rng.randrange(10**6))
            for name in names
        ]
    return found[:count]


def run(case: Probe) -> Outcome:
    """On every rank."""
    env = env_of(case.mesh)
    good = mixed() if env.table_size > 1 else dict.fromkeys(TABLES, table_wise(0))
    is_odd = case.where == "all" or env.size == 1 or env.rank == int(case.where)
    module = Net()
    before = _state(module)

    def odd() -> Any:
        return {**CHANGES, **RANDOM_CHANGES}[case.change](dict(good), random.Random(case.seed))

    def attempt() -> None:
        odd()  # what a constructor refuses it refuses before anything is shared: on every rank here
        check_step(DistributedModelParallel(module, env=env, plan=odd() if is_odd else good))

    def after_error() -> None:
        if _state(module) != before:
            raise Wrong("the module was changed")
        check_step(DistributedModelParallel(module, env=env, plan=dict.fromkeys(TABLES, data_parallel())))

    return outcome_of(str(case), attempt, after_error, ERROR if case.change in MUST_FAIL else "")


def check_step(model: DistributedModelParallel) -> None:
    """Wrong where outputs, or the weights after a step of SGD, are not the unsharded module's."""
    env, whole = model.env, Net()
    out = model(batch(env.data_rank))
    loss_of(model, batch(env.data_rank)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = whole(batch(env.data_rank)).detach()
    for r in range(env.data_size):
        (loss_of(whole, batch(r)) / env.data_size).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    state = dmp.full_state_dict(model)
    if not torch.allclose(out, expected, atol=1e-5):
        raise Wrong(f"outputs differ by {(out - expected).abs().max():.3g}")
    for name, p in whole.named_parameters():
        if not torch.allclose(state[name], p.detach(), atol=1e-5):
            raise Wrong(f"{name} differs by {(state[name] - p).abs().max():.3g}")


def _state(module: torch.nn.Module) -> list[Any]:
    """What must not change: structure, objects, values, hooks."""
    modules = [
        (name, type(m), id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in module.named_modules()
    ]
    return [modules, [(n, id(p), p.requires_grad, p.detach().tolist()) for n, p in module.named_parameters()]]


# ---- changes ----


def _entry(make: Callable[[], Any], name: str = "items.weight") -> Callable[[Plan, random.Random], Any]:
    """One entry replaced; the layout is made when the plan is, for its constructor may refuse."""
    return lambda plan, rng: {**plan, name: make()}


def _named(name: Any) -> Callable[[Plan, random.Random], Any]:
    """An entry more."""
    return lambda plan, rng: {**plan, name: data_parallel()}


def _by_hand(name: Any, *args: Any) -> Callable[[Plan, random.Random], Any]:
    return _entry(lambda: Layout(name, *args))


def _renamed(to: Any) -> Callable[[Plan, random.Random], Any]:
    return lambda plan, rng: {to if n == "items.weight" else n: layout for n, layout in plan.items()}


def _of_json(text: Any) -> Callable[[Plan, random.Random], Any]:
    return lambda plan, rng: ShardingPlan.from_json(text)


def _of_ranks(layout: str, ranks: str) -> Callable[[Plan, random.Random], Any]:
    """JSON whose ranks are written in such a way."""
    entry = f'{{"layout": "{layout}", "ranks": {ranks}}}'

    def change(plan: Plan, rng: random.Random) -> Any:
        others = ShardingPlan({n: of for n, of in plan.items() if n != "items.weight"}).to_json()
        return ShardingPlan.from_json(
            others.replace('"parameters": {', f'"parameters": {{"items.weight": {entry}, ', 1)
        )

    return change


def _cut(*shards: Any) -> Callable[[Plan, random.Random], Any]:
    return _entry(lambda: rectangles(shards))


_WHOLE = Shard((0, 0), (7, 8), 0)
MUST_FAIL: dict[str, Callable[[Plan, random.Random], Any]] = {
    # names
    "an unknown name": _renamed("itmes.weight"),
    "a module's name": _renamed("items"),
    "a prefix before all": lambda plan, rng: {f"module.{n}": layout for n, layout in plan.items()},
    "a number as a name": _named(3),
    "None as a name": _named(None),
    "an empty name": _named(""),
    "a buffer": _named("scale"),
    "a table missing": lambda plan, rng: {n: layout for n, layout in plan.items() if n != "items.weight"},
    "an empty plan": lambda plan, rng: {},
    "a table's layout for a dense weight": lambda plan, rng: {**plan, "over.weight": row_wise()},
    # what is no plan
    "a list": lambda plan, rng: list(plan.items()),
    "a string": lambda plan, rng: "row_wise",
    "a number": lambda plan, rng: 3,
    "JSON text": lambda plan, rng: ShardingPlan(plan).to_json(),
    # what is no layout
    "None as a layout": _entry(lambda: None),
    "a layout's name": _entry(lambda: "row_wise"),
    "a layout's constructor": _entry(lambda: row_wise),
    "a layout's JSON": _entry(lambda: {"layout": "row_wise"}),
    "a list of shards": _entry(lambda: [_WHOLE]),
    "a ParameterSharding of None": _entry(lambda: ParameterSharding(None)),
    "a ParameterSharding of a name": _entry(lambda: ParameterSharding("row_wise")),
    "a ParameterSharding in another": _entry(lambda: ParameterSharding(ParameterSharding(row_wise()))),
    # ranks
    "rank -1": _entry(lambda: table_wise(-1)),
    "rank 2": _entry(lambda: table_wise(2)),
    "rank 10**30": _entry(lambda: table_wise(10**30)),
    "rank 0.5": _entry(lambda: table_wise(0.5)),
    "rank '0'": _entry(lambda: table_wise("0")),
    "rank None": _entry(lambda: table_wise(None)),
    "rank True": _entry(lambda: table_wise(True)),
    "rank nan": _entry(lambda: table_wise(float("nan"))),
    "row_wise of no ranks": _entry(lambda: row_wise([])),
    "row_wise of a number": _entry(lambda: row_wise(1)),
    "row_wise of text": _entry(lambda: row_wise("01")),
    "row_wise of rank 7": _entry(lambda: row_wise([0, 7])),
    "row_wise of None": _entry(lambda: row_wise([None])),
    "column_wise of nine": _entry(lambda: column_wise([0] * 9)),
    "column_wise of none": _entry(lambda: column_wise([])),
    "column_wise, widths too wide": _entry(lambda: column_wise([0, 0], widths=[8, 8])),
    "column_wise, a width 0": _entry(lambda: column_wise([0, 0], widths=[8, 0])),
    "column_wise, a width -4": _entry(lambda: column_wise([0, 0], widths=[12, -4])),
    "column_wise, a width 4.0": _entry(lambda: column_wise([0, 0], widths=[4.0, 4.0])),
    "column_wise, one width": _entry(lambda: column_wise([0, 0], widths=[8])),
    "table_row_wise on one axis": _entry(lambda: table_row_wise(0)),
    "table_row_wise of 'a'": _entry(lambda: table_row_wise("a")),
    "a ragged grid": _entry(lambda: grid([[0, 0], [0]])),
    "an empty grid": _entry(lambda: grid([])),
    "a grid of numbers": _entry(lambda: grid([0, 0])),
    "a grid of text": _entry(lambda: grid(["00", "00"])),
    "a grid of rank 9": _entry(lambda: grid([[0, 9]])),
    # rectangles
    "no rectangles": _cut(),
    "a hole": _cut(Shard((0, 0), (6, 8), 0)),
    "an overlap": _cut(_WHOLE, Shard((0, 0), (1, 8), 0)),
    "the whole twice on a rank": _cut(_WHOLE, _WHOLE),
    "beyond the table": _cut(Shard((0, 0), (8, 8), 0)),
    "a negative offset": _cut(Shard((-1, 0), (8, 8), 0)),
    "a negative size": _cut(Shard((7, 0), (-7, 8), 0)),
    "a hole that an overlap makes up for": _cut(Shard((0, 0), (4, 8), 0), Shard((3, 0), (3, 8), 0)),
    "a size 0": _cut(_WHOLE, Shard((0, 0), (0, 8), 0)),
    "three dims": _cut(Shard((0, 0, 0), (7, 8, 1), 0)),
    "one dim": _cut(Shard((0,), (7,), 0)),
    "sizes that are text": _entry(lambda: rectangles([Shard((0, 0), ("7", "x"), 0)])),
    "sizes that are fractions": _entry(lambda: rectangles([Shard((0, 0), (7.5, 8), 0)])),
    "a shard without a rank": _cut(((0, 0), (7, 8))),
    "a shard that is a number": _cut(3),
    "a shard that is None": _cut(None),
    "a number of rectangles": _entry(lambda: rectangles(3)),
    # by hand
    "an unknown layout by hand": _by_hand("diagonal"),
    "a layout by hand without its rank": _by_hand("table_wise"),
    "a layout by hand with another argument": _by_hand("row_wise", (("banks", (0,)),)),
    "a layout by hand of rank 5": _by_hand("table_wise", (("rank", 5),)),
    "a layout by hand of rank 'x'": _by_hand("table_wise", (("rank", "x"),)),
    "a layout by hand, args None": _by_hand("row_wise", None),
    "a layout by hand, args a number": _by_hand("row_wise", 7),
    "a layout by hand, args a dict": _by_hand("table_wise", {"rank": 5}),
    "a layout by hand, args unhashable": _by_hand("row_wise", [["ranks", [9]]]),
    "a layout by hand, rectangles of numbers": _by_hand("rectangles", (("shards", (1, 2)),)),
    "a layout by hand without a name": _by_hand(None),
    "a layout by hand with a number for a name": _by_hand(3),
    # dense layouts
    "colwise for a bag": _entry(lambda: colwise()),
    "rowwise for a bag": _entry(lambda: rowwise()),
    "sequence for a bag": _entry(lambda: sequence()),
    "fully_sharded for a bag": _entry(lambda: fully_sharded()),
    "colwise of dim 'x'": lambda plan, rng: {**plan, "over.weight": colwise("x")},
    "colwise of dim 5": lambda plan, rng: {**plan, "over.weight": colwise(5)},
    "a dense name that is not there": lambda plan, rng: {**plan, "over.wieght": replicate()},
    # JSON
    "empty JSON": _of_json(""),
    "JSON null": _of_json("null"),
    "JSON of a list": _of_json("[]"),
    "JSON nested deep": _of_json("[" * 100_000),
    "JSON objects nested deep": _of_json('{"a":' * 100_000),
    "JSON as bytes that are no text": _of_json(b"\xff\xfe\x00"),
    "JSON that is None": _of_json(None),
    "JSON of version 99": _of_json('{"version": 99, "parameters": {}}'),
    "JSON of version true": _of_json('{"version": true, "parameters": {}}'),
    "JSON of version [1]": _of_json('{"version": [1], "parameters": {}}'),
    "JSON, parameters a list": _of_json('{"version": 1, "parameters": []}'),
    "JSON, an entry null": _of_json('{"version": 1, "parameters": {"items.weight": null}}'),
    "JSON, an entry a list": _of_json('{"version": 1, "parameters": {"items.weight": []}}'),
    "JSON, a layout a list": _of_json('{"version": 1, "parameters": {"items.weight": {"layout": []}}}'),
    "JSON, a rank 1e99": _of_json(
        '{"version": 1, "parameters": {"items.weight": {"layout": "table_wise", "rank": 1e99}}}'
    ),
    "JSON, a rank Infinity": _of_json(
        '{"version": 1, "parameters": {"items.weight": {"layout": "table_wise", "rank": Infinity}}}'
    ),
    "JSON, shards nested wrong": _of_json(
        '{"version": 1, "parameters": {"items.weight": {"layout": "rectangles", "shards": [[[0]], 1]}}}'
    ),
    "JSON, a run of ranks that are not there": _of_ranks("row_wise", '{"range": [0, 7]}'),
    "JSON, a run that is very long": _of_ranks("row_wise", '{"range": [0, 1000000000000]}'),
    "JSON, a run that ends before it begins": _of_ranks("row_wise", '{"range": [2, 0]}'),
    "JSON, a run of no ranks": _of_ranks("row_wise", '{"range": [1, 1]}'),
    "JSON, a run of fractions": _of_ranks("row_wise", '{"range": [0.0, 2.0]}'),
    "JSON, a run with a step": _of_ranks("row_wise", '{"range": [0, 2, 1]}'),
    "JSON, a run and more": _of_ranks("row_wise", '{"range": [0, 1], "zip": [[0, 1]]}'),
    "JSON, a run in a list": _of_ranks("row_wise", '[{"range": [0, 1]}]'),
    "JSON, runs beside each other for one": _of_ranks("row_wise", '{"zip": [[0, 1]]}'),
    "JSON, a run for rows of ranks": _of_ranks("grid", '{"range": [0, 1]}'),
    "JSON, no runs beside each other": _of_ranks("grid", '{"zip": []}'),
    "JSON, runs of other lengths": _of_ranks("grid", '{"zip": [[0, 2], [0, 1]]}'),
    "JSON, nine runs beside each other": _of_ranks("grid", '{"zip": [' + ", ".join(["[0, 1]"] * 9) + "]}"),
    "JSON, runs that are null": _of_ranks("grid", '{"zip": null}'),
}
"""Name -> change, of plans that can only be refused."""


def _random_rectangles(plan: Plan, rng: random.Random) -> Plan:
    """A good cover, often damaged."""
    size = 2
    shards = random_rectangles((7, 8), size, rng.randrange(10**6))
    if rng.random() < 0.7:
        i = rng.randrange(len(shards))
        s = shards[i]
        new = Shard(
            tuple(o + rng.choice((-1, 0, 0, 1)) for o in s.offsets),
            tuple(n + rng.choice((-1, 0, 0, 1)) for n in s.sizes),
            s.rank + rng.choice((0, 0, 0, 1)),
        )
        shards = [*shards[:i], *([new] if rng.random() < 0.8 else []), *shards[i + 1 :]]
    return {**plan, "items.weight": rectangles(shards)}


def _random_layout(plan: Plan, rng: random.Random) -> Plan:
    def rank() -> Any:
        return rng.choice((0, 0, 1, 1, 2, -1, 3, 1.0, None, "0", True))

    def ranks() -> Any:
        return [rank() for _ in range(rng.choice((0, 1, 2, 2, 3)))]

    make = rng.choice(
        (
            lambda: table_wise(rank()),
            lambda: row_wise(ranks()),
            lambda: column_wise(ranks(), widths=rng.choice((None, None, [4, 4], [3, 5], [8], [1, 7]))),
            lambda: grid([ranks() for _ in range(rng.choice((1, 2)))]),
            lambda: table_row_wise(rank()),
            lambda: Layout(rng.choice(("table_wise", "row_wise", "grid", "")), (("ranks", tuple(ranks())),)),
        )
    )
    return {**plan, rng.choice(TABLES): make()}


def _random_json(plan: Plan, rng: random.Random) -> Any:
    """A good text with one character changed, or one value."""
    text = ShardingPlan(plan).to_json()
    if rng.random() < 0.5:
        at = rng.randrange(len(text))
        return ShardingPlan.from_json(text[:at] + rng.choice('{}[]",:0a9-') + text[at + rng.choice((0, 1)) :])
    data = json.loads(text)
    odd = rng.choice((None, [], {}, "x", -1, 1.5, True, [[]], {"layout": {}}, {"layout": "row_wise", "ranks": {}}))
    name = rng.choice(TABLES)
    if rng.random() < 0.5:
        data["parameters"][name] = odd
    else:
        data["parameters"][name][rng.choice(("layout", "rank", "ranks", "shards", "x"))] = odd
    return ShardingPlan.from_json(json.dumps(data))


def _random_runs(plan: Plan, rng: random.Random) -> Any:
    """Ranks written as runs, often damaged."""

    def bound() -> Any:
        return rng.choice((0, 0, 0, 1, 1, 2, 2, -1, 3, 10**9, 1.0, True, None, "0", [0]))

    def run() -> Any:
        return [0, 1] if rng.random() < 0.4 else [bound() for _ in range(rng.choice((1, 2, 2, 2, 2, 3)))]

    layout, key = rng.choice((("row_wise", "range"), ("column_wise", "range"), ("grid", "zip"), ("grid", "range")))
    ranks: Any = {key: run() if key == "range" else [run() for _ in range(rng.choice((0, 1, 1, 2)))]}
    if rng.random() < 0.2:
        ranks[rng.choice(("range", "zip", "x"))] = run()
    return _of_ranks(layout, json.dumps(ranks))(plan, rng)


RANDOM_CHANGES: dict[str, Callable[[Plan, random.Random], Any]] = {
    "random rectangles": _random_rectangles,
    "a random layout": _random_layout,
    "a random change of JSON": _random_json,
    "random runs of ranks": _random_runs,
}
RANDOM = list(RANDOM_CHANGES)
CHANGES: dict[str, Callable[[Plan, random.Random], Any]] = {
    **MUST_FAIL,
    "row_wise of a rank twice": _entry(lambda: row_wise([0, 0])),
    "column_wise of a rank twice": _entry(lambda: column_wise([0, 0])),
    "a plan object": lambda plan, rng: ShardingPlan(plan),
    "ParameterShardings": lambda plan, rng: {n: ParameterSharding(layout) for n, layout in plan.items()},
    "a run of ranks": _of_ranks("row_wise", '{"range": [0, 1]}'),
    "a run of columns": _of_ranks("column_wise", '{"range": [0, 1]}'),
    "runs beside each other": _of_ranks("grid", '{"zip": [[0, 1], [0, 1]]}'),
    "replicate for a table": _entry(lambda: replicate(), "users.weight"),
    "replicate for a dense weight": lambda plan, rng: {**plan, "over.weight": replicate()},
    "the planner's": lambda plan, rng: None,
}
