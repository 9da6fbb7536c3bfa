"""`planner.observe`: what batches of any form tell of pooling factors, sizes and skew, and that plans use it."""

from __future__ import annotations

import logging
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dmp import Layout, ParameterInfo, ShardingEnv, data_parallel, default_sharders, row_wise
from planner import Constraint, CostModel, Observation, ShardingPlanner, Topology, observe
from planner.candidates.candidates import Candidates
from planner.candidates.costed import CostSetting
from planner.costs.cost_model import distinct
from planner.observed.distinct_rows import equally_likely, growth_of
from planner.observed.row_curve import RowCurve
from sharders import EmbeddingBagCollectionSharder
from tests.bench import observed as observed_bench
from tests.planner_bags import MEASURED

sys.path.append(str(observed_bench.EXAMPLE))
from generate import generate

Pair = namedtuple("Pair", ["users", "labels"])


@dataclass
class Clicks:
    sparse: KeyedJaggedTensor
    label: Tensor


def keyed(samples: int = 4) -> KeyedJaggedTensor:
    """`a` has 2 ids a sample, `b` one in every second."""
    lengths = torch.tensor([2] * samples + [i % 2 for i in range(samples)])
    return KeyedJaggedTensor(["a", "b"], torch.arange(int(lengths.sum())) % 7, lengths=lengths)


IDS = torch.arange(12).view(4, 3)
FORMS: dict[str, tuple[Any, dict[str, float]]] = {
    "keyed": (keyed(), {"a": 2, "b": 0.5}),
    "in a tuple": ((torch.rand(4, 2), (keyed(), torch.ones(4))), {"a": 2, "b": 0.5}),
    "in a dict": ({"sparse": keyed(), "dense": torch.rand(4)}, {"a": 2, "b": 0.5}),
    "in a dataclass": (Clicks(keyed(), torch.zeros(4)), {"a": 2, "b": 0.5}),
    "TorchRec's batch": (Batch(torch.rand(4, 2), keyed(), torch.zeros(4)), {"a": 2, "b": 0.5}),
    "jagged": ({"a": JaggedTensor(torch.arange(6), lengths=torch.tensor([1, 2, 3, 0]))}, {"a": 1.5}),
    "rows of ids": ({"users": IDS, "dense": torch.rand(4)}, {"users": 3}),
    "one id each": ({"users": torch.arange(4)}, {"users": 1}),
    "with offsets": ({"users": (torch.arange(6), torch.tensor([0, 2, 2, 5]))}, {"users": 1.5}),
    "offsets beside": ({"users": torch.arange(6), "users_offsets": torch.tensor([0, 2, 4, 6])}, {"users": 2}),
    "a named tuple": (Pair(IDS, torch.rand(4)), {"users": 3}),
    "nested": ({"users": nested_tensor([torch.arange(n) for n in (1, 2, 3, 0)], layout=torch.jagged)}, {"users": 1.5}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_batches(form: str) -> None:
    batch, factors = FORMS[form]
    found = observe([batch, batch])
    assert found.batches == 2
    assert found.batch_size == (3 if form == "offsets beside" else 4)
    assert {name: seen.pooling_factor for name, seen in found.features.items()} == factors


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(100_000, 16, mode="sum")
        self.items = nn.EmbeddingBag(50_000, 16, mode="sum")

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.users(users) + self.items(items)


def test_a_module_names_the_elements_of_a_tuple() -> None:
    planner = ShardingPlanner()
    found = planner.observe([(torch.randint(9, (8, 3)), torch.randint(9, (8, 5)))], module=Plain())
    assert {name: seen.pooling_factor for name, seen in found.features.items()} == {"users": 3, "items": 5}
    assert planner.observed is found and planner.batch_size == 8
    assert ShardingPlanner(batch_size=9, observed=found).batch_size == 9


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (7, {}, "expected a loader, which gives batches; got int"),
        (keyed(), {}, "a single batch goes in a list"),
        (lambda: iter([keyed()]), {}, "got function: call it"),
        ([], {}, "gives no batch"),
        ([torch.rand(3)], {}, r"no ids with a name .* torch.float32 \(3,\)"),
        ([(torch.arange(3), torch.rand(3))], {}, r"of tuple: \(torch.int64 \(3,\), torch.float32"),
        (
            [KeyedJaggedTensor(["a"], torch.rand(2), torch.tensor([1, 1]))],
            {},
            r"no ids .*Tensor of torch.float32 \(2,\)",
        ),
        ([keyed().to(torch.device("meta"))], {}, r"no ids with a name .* of torch.int64 \(\d+,\) on meta"),
        ([{"a": torch.ones(4, 2, dtype=torch.int16)}], {}, r"'a': torch.int16 \(4, 2\)}; expected .* int64 or int32"),
        ([{"a": torch.eye(4, dtype=torch.int64).to_sparse()}], {}, "no ids with a name"),
        ([keyed()], {"module": Plain}, "expected module to be an nn.Module; .*: call it"),
        ([keyed()], {"batches": 0}, "batches must be a whole number >= 1; got 0"),
        ([keyed()], {"module": Plain()}, r"the features \['a', 'b'\]; none of them reads a table of .*Plain"),
    ],
)
def test_what_is_no_loader(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        observe(loader, **options)


def test_training_sees_what_it_would_have_seen() -> None:
    """An order that is drawn from torch's own numbers, or from a generator, is the same as if nobody had looked."""
    rows = [{"a": torch.tensor([i, i])} for i in range(64)]
    for generator in (None, torch.Generator().manual_seed(3)):
        loader = DataLoader(rows, batch_size=8, shuffle=True, generator=generator)  # type: ignore[arg-type]
        before = torch.get_rng_state(), None if generator is None else generator.get_state()
        seen = [batch["a"] for batch in loader]
        torch.set_rng_state(before[0])
        if generator is not None:
            generator.set_state(before[1])
        observe(loader)
        assert all(map(torch.equal, seen, [batch["a"] for batch in loader]))
    given: list[int] = []

    def stream() -> Iterator[dict[str, Tensor]]:
        while True:
            given.append(int(torch.randint(1 << 40, ())))
            yield {"a": torch.full((4, 2), given[-1])}

    endless = stream()
    observe(endless, batches=2)
    next(endless)
    assert len(set(given)) == 3


def test_an_iterator_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    batches = iter([keyed()] * 5)
    with caplog.at_level(logging.WARNING, "dmp"):
        assert observe(batches, batches=2).batches == 2
    assert "2 batches" in caplog.text and "they are gone" in caplog.text
    assert len(list(batches)) == 3


def one_each(keys: list[str], ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, ids, lengths=torch.ones_like(ids))


class Read:
    """A loader that cannot be read twice."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches: list[Any] | None = batches

    def __iter__(self) -> Iterator[Any]:
        assert self.batches is not None, "read twice"
        batches, self.batches = self.batches, None
        return iter(batches)


def test_a_loader_is_read_once() -> None:
    assert observe(Read([keyed()] * 3)).batches == 3


def test_what_a_batch_holds_twice_is_read_once() -> None:
    """Else all ids would seem to come again: growth 0.36 in place of 1."""

    def batches(names: str) -> list[Any]:
        each = [
            KeyedJaggedTensor(["a"], ids, lengths=torch.ones(4, dtype=torch.long)) for ids in torch.arange(16).split(4)
        ]
        found: list[Any] = [dict.fromkeys(names, batch) for batch in each]
        for batch in found:
            batch["self"] = batch
        return found

    assert observe(batches("xy")).features == observe(batches("x")).features
    assert observe(batches("xy")).features["a"].growth == 1


def test_features_that_batches_lack(caplog: pytest.LogCaptureFixture) -> None:
    both, one = {"users": IDS, "items": torch.arange(4)}, {"users": IDS}
    with caplog.at_level(logging.WARNING, logger="dmp"):
        found = observe([both, one, one, one])
        assert {name: seen.pooling_factor for name, seen in found.features.items()} == {"users": 3, "items": 0.25}
        assert not caplog.records
        assert observe([both, {"dense": torch.rand(4)}]).batch_size == 4
        assert "1 of 2 batches have no ids with a name" in caplog.text
        observe([{"users": torch.arange(20), "lengths": torch.full((4,), 5)}])
        assert "{'lengths': 4, 'users': 20} samples" in caplog.text
    module = collection()
    with pytest.raises(ValueError, match=r"the features \['a', 'c'\]; \['b'\] are not among them, .* 'b' reads"):
        observe(
            [KeyedJaggedTensor(["a", "c"], torch.arange(4), lengths=torch.ones(4, dtype=torch.long))], module=module
        )
    planner = ShardingPlanner(observed=observe([{"a": torch.arange(4)}]))
    plan = planner.plan(module, default_sharders(), ShardingEnv.abstract((2,), ("dp",), "cpu"))
    assert any("observed for 1 tables, ['embedding_bags.t2.weight']" in note for note in plan.report.notes)


def test_ids_of_one_column_are_not_taken_for_all() -> None:
    """A large batch's ids are sampled: at even distances a row of each bag had 0.125 of the ids, and not 1 / 64."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 1000, (4096, 64)))
    ids[:, 0] = 0
    curve = observe([{"users": ids}] * 40, batches=100).features["users"].curve
    assert curve is not None and curve.share(0, 1) == pytest.approx(1 / 64, rel=0.1)


def test_growth_of_large_batches_is_of_whole_ones() -> None:
    """Of some ids of each more would be distinct: all 3,000 rows are named in every batch, growth 0.48 was told."""
    generator = np.random.default_rng(0)
    batches = [{"users": torch.from_numpy(generator.integers(0, 3000, (1024, 64)))} for _ in range(8)]
    assert observe(batches, batches=100).features["users"].growth == pytest.approx(0, abs=1e-3)


def test_which_rows_ids_name() -> None:
    generator = np.random.default_rng(0)
    curve = RowCurve.of(generator.integers(0, 10_000, 100_000))
    assert curve is not None
    assert [curve.share(k * 2500, (k + 1) * 2500) for k in range(4)] == pytest.approx([0.25] * 4, abs=0.01)
    assert curve.share(777, 778) < 3e-4, "chance is no skew"
    hot = np.concatenate([np.full(50_000, 42), generator.integers(0, 10_000, 50_000)])
    curve = RowCurve.of(hot)
    assert curve is not None
    assert curve.share(42, 43) == pytest.approx(0.5, abs=0.01)
    assert curve.share(0, 42) + curve.share(43, 10_000) == pytest.approx(0.5, abs=0.01)
    assert curve.share(10_000, 20_000) == 0
    assert RowCurve.of(np.arange(300)) is None, "too few to tell"
    mixed = RowCurve.mixed([curve, RowCurve((0, 100), (0.0, 1.0))], [1.0, 3.0])
    assert mixed.share(0, 100) == pytest.approx(0.75 + 0.25 * curve.share(0, 100), abs=1e-3)


@pytest.mark.parametrize("batches", [2, 16])
@pytest.mark.parametrize("skew", [0.0, 1.05, 1.4])
def test_distinct_rows_of_several_ranks(skew: float, batches: int) -> None:
    """From one rank's batches, how many rows those of all together name."""
    generator, rows, size = np.random.default_rng(0), 20_000, 512
    shares = np.arange(1, rows + 1) ** -skew
    ids = generator.choice(rows, 40 * size, p=shares / shares.sum())
    found = observe(
        [
            KeyedJaggedTensor(["a"], b, lengths=torch.ones(size, dtype=torch.int64))
            for b in torch.from_numpy(ids).split(size)
        ]
    )
    info = ParameterInfo((rows, 8), torch.float32, "table", features=("a",))
    named = found.named_rows("t", info, batches * size)
    count = batches * size
    true = rows * -np.expm1(-count / rows) if skew == 0 else len(np.unique(ids[:count]))
    assert -named * np.expm1(-count / named) == pytest.approx(true, rel=0.15)
    assert found.named_rows("u", replace(info, features=("b",)), count) == 0, "not seen"


def test_plans_know_how_many_rows_one_rank_names_and_all() -> None:
    """Of few rows with most of the ids; a copy of a table sends the former and updates the latter."""
    generator, rows, size = np.random.default_rng(0), 50_000, 1024
    shares = np.arange(1, rows + 1) ** -1.2
    batches = torch.from_numpy(generator.choice(rows, 30 * size, p=shares / shares.sum())).split(size)
    seen = observe([KeyedJaggedTensor(["a"], b, lengths=torch.ones(size, dtype=torch.int64)) for b in batches])
    info = ParameterInfo((rows, 8), torch.float32, "table", "sgd", features=("a",), state_bytes=(0.0, 0.0))
    setting = CostSetting(CostModel(), ShardingEnv.abstract((8,), ("dp",)), MEASURED, size, seen)
    sharder = EmbeddingBagCollectionSharder()
    (of_table,) = Candidates.of({"a": (sharder, info)}, {"a": Constraint()}, {}, setting).classes
    true = [len(np.unique(torch.cat(batches[:n]))) for n in (1, 8)]
    said = [
        distinct(np.array(named), np.array(float(n * size))).item()
        for named, n in zip((of_table.named_rows_of_rank, of_table.named_rows), (1, 8), strict=True)
    ]
    assert said == pytest.approx(true, rel=0.1)


def test_how_distinct_ids_grow() -> None:
    every = np.arange(1000)
    assert growth_of([every] * 5) == 0 and growth_of(np.split(every, 5)) == 1
    assert growth_of([every % 500]) == 0 and growth_of([every]) == growth_of([]) == growth_of([every[:1]]) == 1
    assert equally_likely(100, 100) == equally_likely(0, 10) == 0, "nobody knows"
    for rows in (1.0, 50.0, 7000.0):
        assert equally_likely(float(-rows * np.expm1(-1000 / rows)), 1000) == pytest.approx(rows)


def test_saved_and_read(tmp_path: Path) -> None:
    found = observe([KeyedJaggedTensor(["a"], torch.arange(2000) % 90, lengths=torch.full((500,), 4))])
    found.save(tmp_path / "o.json")
    assert Observation.load(tmp_path / "o.json") == found
    assert "a" in str(found) and "4" in str(found) and "of the ids in rows" in str(found)
    for text, message in {
        "[1]": "is no observation",
        "{": "is no JSON",
        '{"format": "dmp observation", "version": 2}': "has version 2",
        '{"format": "dmp observation", "version": 1, "batches": 1, "batch_size": 1}': "KeyError: 'features'",
        '{"format": "dmp observation", "version": 1, "batches": -1, "batch_size": 1, "features": {}}': "got -1",
    }.items():
        (tmp_path / "o.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Observation.load(tmp_path / "o.json")
    (tmp_path / "o.json").write_text(
        '{"format": "dmp observation", "version": 1, "batches": 1, "batch_size": 1, '
        '"features": {"a": {"pooling_factor": 2, "distinct": 0.5, "curve": null}}}'
    )
    assert Observation.load(tmp_path / "o.json").features["a"].growth == 1, "written before it was measured"


def collection() -> EmbeddingBagCollection:
    names = {"t1": ["a"], "t2": ["b"]}
    configs = [EmbeddingBagConfig(1_000, 64, name=n, feature_names=f) for n, f in names.items()]
    return EmbeddingBagCollection(configs, device=torch.device("meta"))


OF_MEMORY = replace(Topology.load("cpu"), speeds=None)
"""In which rows that are read are most of a step, whatever a machine's other parts take."""


def loads(**options: Any) -> dict[str, float]:
    """Mean ids of a table's samples, as the planner's costs tell: milliseconds of the rank that it loads most."""
    env = ShardingEnv.abstract((4,), ("dp",), "cpu")
    report = ShardingPlanner(topology=OF_MEMORY, **options).plan(collection(), default_sharders(), env).report
    return {p.name.split(".")[1]: p.busiest_seconds for p in report.parameters}


def test_plans_use_it_and_constraints_win() -> None:
    lengths = torch.tensor([30] * 2048 + [1] * 2048)
    found = observe([KeyedJaggedTensor(["a", "b"], torch.randint(1000, (2048 * 31,)), lengths=lengths)])
    guessed, seen = loads(batch_size=2048), loads(observed=found)
    assert guessed["t1"] == guessed["t2"]
    assert seen["t1"] > 2 * seen["t2"]
    whole_rows = Constraint(forbid=["row_wise"])  # which rows ids name makes no difference then
    given = loads(observed=found, constraints={"*": whole_rows, "t1": Constraint(pooling_factor=1.0)})
    assert given["t1"] == pytest.approx(given["t2"])


def seen_rows(ids: Tensor) -> Observation:
    """One feature `a` of 8 ids a sample, 2,048 samples a batch."""
    lengths = torch.cat([torch.full((2048,), 8), torch.zeros(2048, dtype=torch.long)])
    return observe([KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)])


def lookup_of_ranks(observed: Observation, layout: Layout) -> list[float]:
    """Modelled forward lookup of each of four ranks, table t1 pinned."""
    env = ShardingEnv.abstract((4,), ("dp",), "cpu")
    plan = {"embedding_bags.t1.weight": layout, "embedding_bags.t2.weight": data_parallel()}
    planner = ShardingPlanner(observed=observed, topology=OF_MEMORY)
    report = planner.plan(collection(), default_sharders(), env, plan).report
    at = report.phases.index("lookup fwd")
    return [seconds[at] for seconds in report.rank_seconds]


def test_a_block_of_hot_rows_is_costed_by_what_it_gets() -> None:
    generator = torch.Generator().manual_seed(0)
    even = seen_rows(torch.randint(1000, (2048 * 8,), generator=generator))
    hot = seen_rows((torch.rand(2048 * 8, generator=generator) ** 4 * 1000).long())  # 70 % in the first quarter
    for layout, first in ((row_wise([3, 1, 0, 2]), 3), (row_wise(), 0)):
        alike, skewed = lookup_of_ranks(even, layout), lookup_of_ranks(hot, layout)
        assert max(alike) == pytest.approx(min(alike), rel=0.1)
        assert skewed[first] == max(skewed) > 1.8 * alike[first]
        assert skewed[2 if first else 3] < 0.7 * alike[2], "the coldest block"


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("only", ["row_wise", "grid"])
@pytest.mark.sampled(2)
def test_hot_rows_cost_as_much_planned_as_pinned(shape: tuple[int, ...], only: str) -> None:
    """A rank of cold rows has room for others: not all row blocks are taken for the hottest one."""
    generator = torch.Generator().manual_seed(0)
    hot = seen_rows((torch.rand(2048 * 8, generator=generator) ** 4 * 1000).long())
    env = ShardingEnv.abstract(shape, ("host", "local")[-len(shape) :], "cpu", shard=("host", "local")[-len(shape) :])
    planner = ShardingPlanner(None, {"t1": Constraint(layouts=[only], min_columns=4)}, observed=hot)
    module = collection()
    plan = planner.plan(module, default_sharders(), env)
    planned, loads = planner.report.step_seconds, planner.report.rank_seconds.sum(1)  # type: ignore[union-attr]
    assert loads.max() > 1.2 * loads.min() or only == "grid"
    pinned = planner.plan(module, default_sharders(), env, plan).report
    assert planned == pytest.approx(pinned.step_seconds, rel=1e-9)
    assert pinned.rank_seconds.sum(1) == pytest.approx(loads, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", observed_bench.FORMS)
def test_a_measured_plan_is_better_on_the_demos_clicks(form: str, tmp_path: Path) -> None:
    """By the model, both plans costed with what the clicks tell; `make bench BENCH=observed` times them too."""
    file = str(tmp_path / "clicks.tsv")
    generate(file, 5000)
    batches = observed_bench.batches_of(file, form)
    seen = observe(batches, batches=5)
    guessed, measured, guessed_s, measured_s = observed_bench.plans_of(seen, batches[0].keys())
    assert measured_s <= guessed_s * 1.0001
    assert guessed != measured


def test_ids_that_are_no_rows_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Padding, or ids of another table: the plan was made with them without a word."""
    module = nn.ModuleDict({"users": nn.EmbeddingBag(12, 4), "seen": nn.EmbeddingBag(11, 4)})
    with caplog.at_level(logging.WARNING, logger="dmp"):
        observe([{"users": IDS}], module=module)
        assert not caplog.records
        observe([{"users": IDS - 1, "seen": IDS}], module=module)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("feature 'users' has ids from -1 to 10, and 'users.weight' 12 rows")
    assert said[1].startswith("feature 'seen' has ids from 0 to 11, and 'seen.weight' 11 rows: unless the model")
