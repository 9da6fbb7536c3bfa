"""TorchRec's delta tracker on our wrapper: rows that were trained since the last call, whatever plan and mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import DistributedModelParallel, PlanError, ShardError, row_wise
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tests.equality import env_of, layouts_for, make_batch, make_module, unsharded
from tests.oracle import LR, attach
from tests.ranks import run_ranks
from tests.results import loss_of
from tests.torchrec_dropin import raw_ids
from tests.torchrec_dropin.scripts import IGNORED, model_of, wrapper

pytestmark = IGNORED
READ_BY = {"t0": ("a", "b"), "t1": ("c",), "t2": ("a",), "t3": ("d",), "t4": ("e",)}


def config(mode: str = "ID_ONLY", **options: Any) -> Any:
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode

    return DeltaTrackerConfig(tracking_mode=getattr(TrackingMode, mode), **options)


def read_in(kind: str, num_ranks: int, steps: range, key: str) -> set[int]:
    """Rows of a table that the batches of all ranks name."""
    found: set[int] = set()
    for batch in (make_batch(kind, rank, step) for step in steps for rank in range(num_ranks)):
        first: Any = batch[0]
        ids = [first] if isinstance(first, torch.Tensor) else [first[f].values() for f in READ_BY[key.split(".")[-1]]]
        found.update(i for of in ids for i in of.reshape(-1).tolist())
    return found


class Holder(nn.Module):
    """A model in which the module has a path."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Any) -> Any:
        return self.inner(*batch)


def _told(at: str, kind: str, layout: str, optimizer: str | None, nested: bool, **options: Any) -> None:
    env, module = env_of(at), make_module(kind)
    attach(module, optimizer)
    if kind == "ebc":
        module.get_parameter("embedding_bags.t3.weight").requires_grad_(False)  # which is not trained
    model_in = Holder(module) if nested else module
    layouts, num = layouts_for(env)[layout], env.data_size
    plan = {n: layouts(i, p.shape, env) for i, (n, p) in enumerate(model_in.named_parameters())}  # type: ignore[arg-type]
    sharders = [EmbeddingBagCollectionSharder(**options), EmbeddingCollectionSharder(**options)]
    model = DistributedModelParallel(model_in, env, plan=plan, sharders=[*sharders, *dmp.default_sharders()])
    trained = {n.removesuffix(".weight"): n for n, p in model.named_parameters() if p.requires_grad}
    tracker = model.init_torchrec_delta_tracker(config("EMBEDDING", consumers=["a", "b"]))
    assert model.get_delta_tracker() is tracker and model.model_trackers == {"DELTA_TRACKER": tracker}
    ordinary = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else None
    taken = unsharded(kind, optimizer, num, 4, None)
    first, faults = {"a": 0, "b": 0}, []
    for step in range(4):
        loss_of(model(*make_batch(kind, env.data_rank, step))).backward()
        if ordinary is not None:
            ordinary.step()
            ordinary.zero_grad()
        with torch.no_grad():
            model(*make_batch(kind, env.data_rank, step + 10))
        for consumer in ("a",) if step == 1 else ("a", "b") if step == 3 else ():
            rows = tracker.get_unique(consumer)
            everywhere: list[Any] = [None] * env.size
            dist.all_gather_object(everywhere, {k: (r.ids, r.states) for k, r in rows.items()})
            for key, name in trained.items():
                of_ranks = [of_rank[key] for of_rank in everywhere]
                times = Counter(i for ids, _ in of_ranks for i in ids.tolist())
                expected = read_in(kind, num, range(first[consumer], step + 1), key)
                if set(times) != expected:
                    faults.append(f"{consumer} {key}: {sorted(times)} and not {sorted(expected)}")
                faults += [f"{key}: {i} is told {n} times" for i, n in times.items() if n > 1]
                for ids, values in of_ranks:
                    assert values.shape == (len(ids), plan_shape(model, name)[1]), (key, values.shape)
                    for i, value in zip(ids.tolist(), values, strict=True):
                        since = next(
                            s for s in range(first[consumer], 4) if i in read_in(kind, num, range(s, s + 1), key)
                        )
                        want = taken[since].values[name.removeprefix("inner.")][i]
                        if not torch.allclose(value, want, atol=1e-5):
                            faults.append(f"{consumer} {key}[{i}]: {value} and not {want}")
            first[consumer] = step + 1
    assert all(not len(ids) for ids in tracker.get_unique_ids("a").values())
    assert not faults, faults


def plan_shape(model: DistributedModelParallel, name: str) -> tuple[int, int]:
    return tuple(model.state_dict()[name].shape)


Case = tuple[str, str, str | None, bool]  # kind, layout, optimizer, whether the module has a path


def _all_told(at: str, cases: list[Case], **options: Any) -> None:
    for case in cases:
        _told(at, *case, **options)


def test_rows_that_were_trained_are_told_whatever_the_plan() -> None:
    cases: list[Case] = [
        ("ebc", "row_wise", "sgd", True),
        ("ebc", "mixed", "sgd", True),
        ("ebc", "random", None, False),
        ("ec", "random", "sgd", False),
        ("ec", "data_parallel", None, True),
        ("embedding", "column_wise", "sgd", False),
        ("bag", "uneven", "sgd", True),
    ]
    run_ranks(2, _all_told, "dp2", cases)


@pytest.mark.parametrize("at", ["replicate2", "tp2"])
@pytest.mark.sampled(2)
def test_on_copies_and_on_a_tensor_axis(at: str) -> None:
    run_ranks(2, _all_told, at, [("ebc", "mixed", "sgd", True), ("ec", "random", "sgd", False)])


@pytest.mark.slow
@pytest.mark.parametrize("at", ["dp4", "replicate2xshard2", "host2xlocal2", "shard2xtp2", "replicate2xtp2"])
def test_on_every_mesh(at: str) -> None:
    layouts = ("mixed", "random", "uneven", "column_wise", "row_reversed", "data_parallel", "table_wise")
    cases: list[Case] = [
        (kind, layout, optimizer, layout == "mixed")
        for kind, optimizer in (("ebc", "sgd"), ("ebc_vbe", None), ("ec", "adagrad"), ("bag_mean", "sgd"))
        for layout in layouts
    ]
    run_ranks(4, _all_told, at, cases, timeout=280.0)


def _own_batches(layout: str) -> None:
    env, module = env_of("replicate2"), make_module("ec")
    attach(module, "sgd")
    plan = {n: layouts_for(env)[layout](0, (p.shape[0], p.shape[1]), env) for n, p in module.named_parameters()}
    model = DistributedModelParallel(module, env, plan=plan, sharders=[EmbeddingCollectionSharder(sync_interval=9)])
    tracker = model.init_torchrec_delta_tracker(config())
    loss_of(model(*make_batch("ec", env.rank, 1))).backward()
    (features,) = make_batch("ec", env.rank, 1)
    for key, ids in tracker.get_unique_ids().items():
        read = [features[f].values() for f in READ_BY[key.split(".")[-1]]]  # type: ignore[index]
        assert ids.tolist() == torch.cat(read).unique().tolist()


@pytest.mark.parametrize("layout", ["table_wise", "data_parallel"])
def test_copies_that_are_averaged_tell_of_their_own_batches(layout: str) -> None:
    run_ranks(2, _own_batches, layout)


def _as_theirs(which: str, mode: str) -> dict[str, Any]:
    from tests.torchrec_dropin.scripts import feed, start

    model = start(wrapper(which)(module=model_of(torch.optim.SGD, lr=LR), device=torch.device("cpu")))
    tracker = model.init_torchrec_delta_tracker(config(mode))
    for step in range(2):
        model(feed(model, step)).backward()
    found = tracker.get_unique_ids()
    assert tracker.fqn_to_feature_names() == {
        "ebc.embedding_bags.t0": ["a", "b"],
        "ebc.embedding_bags.t1": ["c"],
    }
    assert list(tracker.get_tracked_modules()) == ["ebc"]
    model(feed(model, 2)).backward()
    tracker.clear()
    return {key: ids.tolist() for key, ids in found.items() if len(ids)}


def _both() -> None:
    theirs, ours = _as_theirs("torchrec", "ID_ONLY"), _as_theirs("dmp", "ID_ONLY")
    first = 9 * dist.get_rank()  # of t0, which is cut by rows: theirs are numbers in the rank's shard
    theirs["ebc.embedding_bags.t0"] = [i + first for i in theirs["ebc.embedding_bags.t0"]]
    assert ours == theirs


def test_the_same_ids_as_torchrecs_by_rows_of_the_whole_table() -> None:
    run_ranks(2, _both)


def _goes_on() -> None:
    """A plan that changes between two reads; a copy, which nobody watches; consumers, and who clears."""
    env, module = env_of("dp2"), make_module("ec")
    attach(module, "sgd")
    plan = {name: row_wise() for name, _ in module.named_parameters()}
    model = DistributedModelParallel(module, env, plan=plan)
    tracker = model.init_torchrec_delta_tracker(config("EMBEDDING", consumers=["a", "b"], fqns_to_skip=["t1"]))
    assert model.init_torchrec_delta_tracker(config()) is tracker
    assert model.copy().get_delta_tracker() is None
    for step in range(4):
        loss_of(model(*make_batch("ec", env.data_rank, step))).backward()
        if step == 1:
            model.reshard({name: layouts_for(env)["random"](3, p.shape, env) for name, p in module.named_parameters()})  # type: ignore[arg-type]
            tracker.clear("b")
    with pytest.raises(ShardError, match="consumer 'default' is none of this tracker's: a, b"):
        tracker.get_unique()
    for consumer, steps in (("a", range(4)), ("b", range(2, 4))):
        everywhere: list[Any] = [None] * env.size
        dist.all_gather_object(everywhere, tracker.get_unique_ids(consumer))
        for key in ("embeddings.t0", "embeddings.t2"):
            told = [set(of_rank[key].tolist()) for of_rank in everywhere]
            assert set.union(*told) == read_in("ec", 2, steps, key), (consumer, key)
        assert all("embeddings.t1" not in of_rank for of_rank in everywhere)


def test_a_plan_that_changes_consumers_and_copies() -> None:
    run_ranks(2, _goes_on)


def _reset() -> None:
    """Rows that get other values because their raw id was evicted are told too."""
    env, options = env_of("dp2"), {"optimizer": "adagrad", "policy": "LRU"}
    sharder = raw_ids_sharder()
    plan = raw_ids.Pair("dp2", "mixed", **options).plan("mixed")
    model = DistributedModelParallel(raw_ids.make(**options), env=env, plan=plan, sharders=[sharder])  # type: ignore[arg-type]
    tracker, tables = model.init_torchrec_delta_tracker(config("EMBEDDING")), [n for n, _ in model.named_parameters()]
    for step in range(6):
        before = dmp.full_state_dict(model)
        raw_ids.loss_of(model(raw_ids.batch(step, env.data_rank)), 5).backward()
        after, everywhere = dmp.full_state_dict(model), [None] * env.size
        dist.all_gather_object(everywhere, tracker.get_unique())
        for name in tables:
            of_ranks: list[Any] = [of_rank[name.removesuffix(".weight")] for of_rank in everywhere]  # type: ignore[index]
            ids, states = torch.cat([of.ids for of in of_ranks]), torch.cat([of.states for of in of_ranks])
            changed = (before[name] != after[name]).any(1).nonzero().view(-1)
            assert set(changed.tolist()) <= set(ids.tolist()) and len(ids.unique()) == len(ids)
            torch.testing.assert_close(states, before[name][ids], rtol=0, atol=0)


def raw_ids_sharder() -> Any:
    from sharders import ManagedCollisionEmbeddingBagCollectionSharder

    return ManagedCollisionEmbeddingBagCollectionSharder(reset_evicted=True)


def test_rows_of_evicted_ids_are_told() -> None:
    run_ranks(2, _reset)


def test_modules_that_tell_nothing_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sharders.embedding.torchrec_form import TorchRecForm

    model = DistributedModelParallel(model_of(torch.optim.SGD, lr=LR))
    monkeypatch.setattr(TorchRecForm, "tells_rows", False)
    assert model.init_torchrec_delta_tracker(config()).get_unique_ids() == {}
    assert "rows of ebc, a sharders.embedding.collections.ShardedEmbeddingBagCollection, are not tracked" in caplog.text


def test_what_is_not_tracked_is_said() -> None:
    model = DistributedModelParallel(model_of(torch.optim.SGD, lr=LR))
    assert model.get_delta_tracker() is None and model.model_trackers == {}
    for given, words in (
        (config("MOMENTUM_DIFF"), "MOMENTUM_DIFF keeps optimizer state of rows, which is not tracked"),
        ("ID_ONLY", "expected a DeltaTrackerConfig"),
    ):
        with pytest.raises(ShardError, match=words):
            model.init_torchrec_delta_tracker(given)
    assert model.get_delta_tracker() is None
    tracker = model.init_torchrec_delta_tracker(config())
    with pytest.raises(ShardError, match="choose among the rows"):
        tracker.get_unique(top_percentage=0.5)
    with pytest.raises(ShardError, match="consumer 'c' is none"):
        tracker.clear("c")


def test_trackers_of_raw_ids_are_refused() -> None:
    from torchrec.distributed.model_tracker.types import ModelTrackerConfigs, RawIdTrackerConfig

    assert DistributedModelParallel(nn.Linear(1, 1), model_tracker_configs=ModelTrackerConfigs()).model_trackers == {}
    for given in (ModelTrackerConfigs(raw_id_tracker_config=RawIdTrackerConfig()), config()):
        with pytest.raises(ShardError, match=r"init_torchrec_delta_tracker\(DeltaTrackerConfig"):
            DistributedModelParallel(nn.Linear(1, 1), model_tracker_configs=given)


def _disagree() -> None:
    model = DistributedModelParallel(make_module("embedding"), env_of("dp2"))
    try:
        model.init_torchrec_delta_tracker(config("EMBEDDING" if dist.get_rank() else "ID_ONLY"))
    finally:
        assert model.get_delta_tracker() is None


def test_ranks_that_ask_for_different_things_are_told() -> None:
    for error in run_ranks(2, _disagree, expect=PlanError):
        assert "ranks disagree on the tracking mode" in str(error), error


def test_many_batches_take_the_memory_of_distinct_rows() -> None:
    model = DistributedModelParallel(nn.Embedding(20, 2))
    tracker = model.init_torchrec_delta_tracker(config("EMBEDDING", consumers=["a", "b"]))
    first = model.weight.detach().clone()
    for step in range(50):
        model(torch.arange(19, 19 - step % 15, -1).repeat(3)).sum().backward()
        with torch.no_grad():
            model.weight.add_(1.0)
        if step == 7:
            tracker.clear("b")
        held = tracker._pending["a"]["weight"]._parts
        assert sum(len(ids) for ids, _ in held) <= 14
    for consumer, since in (("a", 0), ("b", 8)):
        ((_, rows),) = tracker.get_unique(consumer).items()
        assert rows.ids.tolist() == list(range(6, 20))
        begun = [next(s for s in range(since, 50) if s % 15 > 19 - i) for i in range(6, 20)]
        torch.testing.assert_close(rows.states, first[6:] + torch.tensor(begun).unsqueeze(1))
