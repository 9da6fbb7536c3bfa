"""`TorchRecSharder`: TorchRec's sharded modules, and a user's own, in our wrapper, against the unsharded module."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dmp
from dmp import (
    DistributedModelParallel,
    InputError,
    PlanError,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from planner import ShardingPlanner
from sharders import EmbeddingBagCollectionSharder, TorchRecSharder
from sharders.testing import check_sharder
from sharders.torchrec.sharding_types import parameter_sharding
from tests.equality import attach, env_of
from tests.ranks import run_ranks
from tests.results import loss_of, same_result
from tests.torchrec_dropin.their_modules import make_batch, make_module, their_sharder

pytestmark = pytest.mark.filterwarnings(
    # FBGEMM's, of the kernel that theirs runs where no optimizer is in the backward pass.
    "ignore:fbgemm.*an autograd kernel was not registered:UserWarning",
    # Calls of TorchRec 1.8.0 that torch 2.13 deprecates.
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
)


def _fused_params(name: str) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {"optimizer": EmbOptimType(name), "learning_rate": 0.1, "eps": 1e-10}


def _battery(kind: str, optimizer: str | None = None) -> None:
    def made() -> Any:
        module = make_module(kind)
        attach(module, optimizer)
        return module

    theirs = their_sharder(kind, **({"fused_params": _fused_params("exact_sgd")} if optimizer else {}))
    check_sharder(TorchRecSharder(theirs), made, lambda rank, step: make_batch(kind, rank, step))


def test_the_battery_of_a_users_own() -> None:
    run_ranks(2, _battery, "codebook")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ebc", "fp", "fp_collection", "towers"])
def test_the_battery_on_more(kind: str, size: int) -> None:
    run_ranks(size, _battery, kind, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_the_battery_with_an_optimizer_in_backward(kind: str) -> None:
    run_ranks(2, _battery, kind, "sgd", timeout=300)


PLANS = {
    "tables": lambda i: table_wise(i % 2),
    "rows": lambda i: row_wise(),
    "columns": lambda i: column_wise([1, 0] if i else [1, 1]),
}


def _wrapped(kind: str, plan: str, optimizer: str | None, *, ours: bool = False) -> DistributedModelParallel:
    module = make_module(kind)
    attach(module, optimizer)
    sharder: Any = EmbeddingBagCollectionSharder() if ours else TorchRecSharder(their_sharder(kind))
    layouts = {name: PLANS[plan](i) for i, name in enumerate(sharder.parameters(module))}
    return DistributedModelParallel(module, plan=layouts, sharders=[sharder])


def _trained(model: Any, optimizer: torch.optim.Optimizer | None, kind: str, steps: range) -> None:
    for step in steps:
        if optimizer is not None:
            optimizer.zero_grad()
        loss_of(model(*make_batch(kind, dist.get_rank(), step))).backward()
        if optimizer is not None:
            optimizer.step()


def _moved(path: str, kind: str, optimizer: str, before: str, after: str, ours: bool) -> None:
    """Saved under one plan, trained on under another, by another sharder: as if nothing had happened."""
    first = _wrapped(kind, before, optimizer)
    dense = [p for n, p in first.named_parameters() if n not in first.fused_optimizer.fused]
    _trained(first, None, kind, range(2))
    dmp.save_checkpoint(path, first)
    twin = copy.deepcopy(first)
    _trained(first, None, kind, range(2, 4))
    second = _wrapped(kind, after, optimizer, ours=ours)
    dmp.load_checkpoint(path, second)
    for other in (twin, second):
        _trained(other, None, kind, range(2, 4))
        for name, value in dmp.full_state_dict(first).items():
            torch.testing.assert_close(dmp.full_state_dict(other)[name], value, msg=name)
        states = [dmp.full_optimizer_state_dict(model)["state"] for model in (first, other)]
        torch.testing.assert_close(*states)
    assert not dense


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "ours"),
    [("adagrad", "tables", "columns", False), ("rowwise_adagrad", "rows", "tables", True)],
)
def test_a_checkpoint_goes_on_under_another_plan_and_in_our_own_sharder(
    tmp_path: Path, optimizer: str, before: str, after: str, ours: bool
) -> None:
    run_ranks(2, _moved, str(tmp_path / "saved"), "ebc", optimizer, before, after, ours)


def _rate() -> None:
    model, plain = _wrapped("ebc", "tables", "sgd"), make_module("ebc")
    batches = [make_batch("ebc", rank, 0) for rank in range(2)]
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.7
    loss_of(model(*batches[dist.get_rank()])).backward()
    (sum(loss_of(plain(*batch)) for batch in batches) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.7).step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(dmp.full_state_dict(model)[name], value, msg=name)


def test_a_new_rate_is_that_of_the_next_step() -> None:
    run_ranks(2, _rate)


def _scanned() -> list[int]:
    from torchrec.distributed.types import ShardedModule

    model = _wrapped("ebc", "columns", "rowwise_adagrad")
    (found,) = [m for m in model.modules() if isinstance(m, ShardedModule)]
    assert sorted(found.sharded_parameter_names("x")) == [f"x.embedding_bags.t{i}.weight" for i in range(3)]
    assert found.unsharded_module_type.__name__ == "EmbeddingBagCollection"
    with pytest.raises(ShardError, match="import the pipeline of the same name from dmp"):
        found.input_dist(None)
    value = model.state_dict()["embedding_bags.t1.weight"]
    assert [shard.tensor.shape for shard in value.local_shards()] == [(9, 4)]
    return [shard.placement.rank() for shard in value.metadata().shards_metadata]


def test_code_that_scans_for_sharded_modules_finds_it() -> None:
    assert run_ranks(2, _scanned) == [[1, 0], [1, 0]]


def _bad_batch(fault: str) -> None:
    from torchrec import KeyedJaggedTensor

    model = _wrapped("ebc", "rows" if fault == "size" else "tables", None)
    (good,) = make_batch("ebc", dist.get_rank(), 0)
    values, lengths, keys = good.values().clone(), good.lengths().clone(), good.keys()
    if dist.get_rank() == 1:
        if fault == "id":
            values[-1] = 1000
        elif fault == "key":
            keys = ["z", *keys[1:]]
        else:
            lengths = lengths.view(4, 3)[:, :2].reshape(-1)
            values = values[: int(lengths.sum())] * 0
    model(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))


@pytest.mark.parametrize(("fault", "words"), [("id", "has id 1000"), ("key", "'a' is missing"), ("size", r"\[3, 2\]")])
def test_what_theirs_would_hang_on_is_an_error_on_every_rank(fault: str, words: str) -> None:
    for error in run_ranks(2, _bad_batch, fault, expect=InputError):
        assert __import__("re").search(words, str(error)), error


def _refused(what: str) -> None:
    kind, layout, optimizer, env = "ebc", row_wise(), None, env_of("dp2")
    if what == "mean":
        kind = "ebc_mean"
    elif what == "drift":
        layout, optimizer = data_parallel(), "sgd"
    elif what == "crash":
        kind, layout = "ec", table_wise(0)
    elif what == "replicas":
        env = env_of("replicate2")
        layout = table_wise(0)
    elif what == "uneven":
        layout = dmp.rectangles([((0, 0), (1, 8), 0), ((1, 0), (12, 8), 1)])
    module = make_module(kind)
    attach(module, optimizer)
    sharder = TorchRecSharder(their_sharder(kind))
    plan = {
        name: layout if "t0" in name or what == "replicas" else table_wise(0) for name in sharder.parameters(module)
    }
    if what == "mean":
        plan["embedding_bags.t1.weight"] = row_wise()
    if what == "frozen":
        module.requires_grad_(False)
    DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mean", "gives wrong means for table 't1'"),
        ("drift", "data-parallel table with an in-backward optimizer drifts"),
        ("crash", "crashes on a CPU for an unpooled table"),
        ("replicas", "knows no replicate axis"),
        ("uneven", "has no sharding type that cuts it so"),
        ("frozen", "trains every table"),
    ],
)
def test_what_theirs_gets_wrong_is_refused_in_words(what: str, words: str) -> None:
    for error in run_ranks(2, _refused, what, expect=(PlanError, ShardError)):
        assert words in str(error) and "torchrec.distributed." in str(error)


def test_a_planner_says_why_theirs_offers_nothing() -> None:
    """On a CPU theirs runs no unpooled table as it is, however it is cut."""
    sharder, env = TorchRecSharder(their_sharder("ec")), ShardingEnv.abstract((2,), ("dp",), device_type="cpu")
    with pytest.raises(PlanError, match=r"offers no layout for .*; table_wise and row_wise and column_wise: .*crashes"):
        ShardingPlanner().plan(make_module("ec"), [sharder], env)


def _pruned() -> None:
    from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
    from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
    from torchrec.modules.itep_modules import GenericITEPModule

    module = ITEPEmbeddingBagCollection(make_module("ebc"), GenericITEPModule({"t0": 40}, enable_pruning=False))
    sharder = TorchRecSharder(ITEPEmbeddingBagCollectionSharder())
    plan = {name: row_wise() for name in sharder.parameters(module)}
    DistributedModelParallel(module, env=env_of("dp2"), plan=plan, sharders=[sharder])


def test_what_theirs_cannot_make_on_a_cpu_is_said() -> None:
    for error in run_ranks(2, _pruned, expect=ShardError):
        assert "ITEPEmbeddingBagCollectionSharder fails to shard a ITEPEmbeddingBagCollection on cpu" in str(error)


def _devices_of_placements(kind: str) -> list[str]:
    env = replace(env_of("dp2"), device_type=kind)
    with mock.patch("torch.accelerator.device_count", return_value=2):
        entry = parameter_sharding("row_wise", "fused", row_wise().shards((8, 4), env), env)
    return [str(each.placement.device()) for each in entry.sharding_spec.shards]


@pytest.mark.parametrize(("kind", "devices"), [("cuda", ["cuda:0", "cuda:1"]), ("cpu", ["cpu", "cpu"])])
def test_theirs_is_told_which_device_of_a_host_a_rank_has(kind: str, devices: list[str]) -> None:
    assert run_ranks(2, _devices_of_placements, kind) == [devices] * 2


def test_what_is_no_sharder_is_named() -> None:
    with pytest.raises(ShardError, match=r"takes a ModuleSharder of TorchRec's; got torch.nn.modules.linear.Linear"):
        TorchRecSharder(torch.nn.Linear(1, 1))


def _alone() -> None:
    """One process without a group: the plain module, with the sharder's optimizer."""
    theirs = their_sharder("ebc", fused_params=_fused_params("exact_adagrad"))
    model = DistributedModelParallel(
        make_module("ebc"), env=dmp.ShardingEnv.single(), sharders=[TorchRecSharder(theirs)]
    )
    plain, batch = make_module("ebc"), make_batch("ebc", 0, 0)
    same_result(model(*batch), plain(*batch))
    for each in (model, plain):
        loss_of(each(*batch)).backward()
    torch.optim.Adagrad(plain.parameters(), lr=0.1).step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


def test_one_process_without_a_group() -> None:
    run_ranks(1, _alone)


def _lists_only_what_it_has() -> list[int]:
    """As a user's own sharded module, whose parameters are those of this rank."""
    theirs = their_sharder("ebc")
    shard = theirs.shard

    def shard_and_leave_out(*args: Any, **options: Any) -> Any:
        made = shard(*args, **options)
        listed = [(name, p) for name, p in made.named_parameters() if p.numel()]
        made.named_parameters = lambda *_, **__: iter(listed)
        return made

    plan = {f"embedding_bags.t{i}.weight": table_wise(i % 2) for i in range(3)}
    with mock.patch.object(type(theirs), "shard", side_effect=shard_and_leave_out) as patched:
        patched.__signature__ = inspect.signature(shard)
        model = DistributedModelParallel(make_module("ebc"), plan=plan, sharders=[TorchRecSharder(theirs)])
    return [p.numel() for p in model.parameters()]


def test_a_table_that_is_elsewhere_has_an_empty_parameter() -> None:
    first, second = run_ranks(2, _lists_only_what_it_has)
    assert [size > 0 for size in first] == [True, False, True] and [size > 0 for size in second] == [False, True, False]
