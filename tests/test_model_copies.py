"""Copies of models on every kind of mesh: independent of the original, on its process groups; averages of weights.

What a copy of a plain module is, is the pattern: so is loading with `assign=True`, and pickling is refused.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn

from dmp import (
    CheckpointError,
    ChunkedTensor,
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
)
from dmp.chunked import as_chunks
from tests import state_jobs, test_dense_state
from tests.ranks import mesh, run_ranks
from tests.state_jobs import WORLDS, assert_same, whole
from tests.test_dense_state import MESHES, V
from tests.transformers_zoo import Llama

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

LR = 0.05


class Case(NamedTuple):
    """A model on a mesh: of `test_dense_state`, or tables in a layout with a kind of optimizer."""

    model: str
    mesh: str
    kind: str = ""

    @property
    def size(self) -> int:
        return math.prod((WORLDS if self.kind else MESHES)[self.mesh][0])


CASES = {
    "ddp": Case("llama", "dp2"),
    "fsdp2": Case("llama", "shard2"),
    "hsdp": Case("llama", "replicate2xshard2"),
    "tp": Case("llama", "tp2"),
    "fsdp2xtp": Case("llama", "shard2xtp2"),
    "replicatextp": Case("llama", "replicate2xtp2"),
    "mixed_ddp": Case("mixed_adagrad", "dp2"),
    "mixed_hsdp": Case("mixed_adagrad", "replicate2xshard2"),
    "mixed_fsdp2xtp": Case("mixed_adagrad", "shard2xtp2"),
    "mixed_tp": Case("mixed_adagrad", "tp2"),
    "tables": Case("mixed", "2", "none"),
    "sgd": Case("uneven", "2", "sgd"),
    "adagrad": Case("mixed", "2", "adagrad"),
    "rowwise_adagrad": Case("row_wise", "2", "rowwise_adagrad"),
    "column_blocks": Case("column_wise", "2", "rowwise_adagrad"),  # which no unsharded model trains as
    "adam": Case("mixed", "2", "adam"),
    "replicas": Case("grid", "2x2", "adam"),
    "hosts": Case("table_row_wise", "hosts", "rowwise_adagrad"),
}


def some(*fast: str, without: str = "") -> list[Any]:
    """All cases; those not named are slow ones."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in CASES if name != without]


def plain(case: Case, seed: int = 0) -> nn.Module:
    return state_jobs.make(case.kind, seed) if case.kind else test_dense_state.plain(case.model, seed)


def build(case: Case, seed: int = 0) -> DistributedModelParallel:
    if case.kind:
        made = state_jobs.build(case.model, case.kind, *WORLDS[case.mesh], seed)
    else:
        made = test_dense_state.build(case.model, case.mesh, seed)
    assert isinstance(made, DistributedModelParallel)
    return made


def output(case: Case, model: nn.Module, step: int = 0) -> torch.Tensor:
    """On the first data rank's samples: the same for all."""
    with torch.no_grad():
        if case.kind:
            scores: torch.Tensor = model(state_jobs.batch(step))
            return scores
        return test_dense_state.loss_of(model, step, 0, 1)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """SGD, which has no state: what a copy does next follows from its weights and in-backward state alone."""
    fused = model.fused_optimizer.fused if isinstance(model, DistributedModelParallel) else {}
    named = {n: p for n, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")}
    return torch.optim.SGD([p for name, p in named.items() if name not in fused], lr=LR)


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, size: int) -> None:
    optimizer.zero_grad()
    if case.kind:
        loss = model(state_jobs.batch(step, rank, size)).square().mean()
    else:
        loss = test_dense_state.loss_of(model, step, rank, size)
    loss.backward()
    optimizer.step()


def local(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Copies of every tensor that this rank holds: weights, buffers, in-backward state."""
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        held.update({f"{name}/{key}": torch.as_tensor(value) for key, value in state.items()})
    held.update(model.named_buffers())
    return {f"{n}/{i}": c.clone() for n, t in held.items() for i, c in enumerate(as_chunks(t).chunks)}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def independent(name: str, how: str) -> None:
    case = CASES[name]
    model = build(case)
    env, optimizer = model.env, optimizer_of(case, model)
    train(case, model, optimizer, 0, env.data_rank, env.data_size)
    full_state_dict(model), output(case, model)  # what makes groups when first called has been
    groups = num_groups()
    twin = copy.deepcopy(model) if how == "deepcopy" else model.copy("cpu" if how == "copy to" else None)
    assert not {id(t) for t in [*twin.parameters(), *twin.buffers()]} & {id(t) for t in model.parameters()}
    assert torch.equal(output(case, twin), output(case, model))
    of_twin = optimizer_of(case, twin)
    for m, o, other in ((twin, of_twin, model), (model, optimizer, twin)):
        before, own = local(other), local(m)
        for step in (1, 2):
            train(case, m, o, step, env.data_rank, env.data_size)
        assert_equal(local(other), before)
        assert any(not torch.equal(value, own[key]) for key, value in local(m).items())
    assert num_groups() == groups
    # Both have taken the same steps. DistributedDataParallel sums more than two ranks in another order at first.
    assert_same(whole(twin, of_twin), whole(model, optimizer), exact=env.data_size == 2)
    for refuse in (lambda: pickle.dumps(twin), lambda: torch.save(twin, io.BytesIO())):
        with pytest.raises(TypeError, match=r"process groups.*save_checkpoint.*full_state_dict.*deepcopy"):
            refuse()


@pytest.mark.parametrize("name", some("hsdp", "fsdp2xtp", "mixed_fsdp2xtp", "column_blocks", "adam"))
@pytest.mark.parametrize(
    "how", ["deepcopy", *(pytest.param(how, marks=pytest.mark.slow) for how in ("copy", "copy to"))]
)
@pytest.mark.sampled(6)
def test_copies_are_independent(name: str, how: str) -> None:
    run_ranks(CASES[name].size, independent, name, how)


def averaged(name: str) -> None:
    """Evaluated between the updates, as averages are. By `multi_avg_fn`, torch mixed DTensors and tables."""
    case = CASES[name]
    model, oracle = build(case), plain(case)
    env = model.env
    mine, theirs = optimizer_of(case, model), optimizer_of(case, oracle)
    ways: list[dict[str, Any]] = [{"avg_fn": get_swa_avg_fn()}, {"avg_fn": get_ema_avg_fn(0.8)}]
    ways += [{"multi_avg_fn": get_ema_multi_avg_fn(0.8)}]
    pairs = [tuple(AveragedModel(m, **way) for m in (model, oracle)) for way in ways]
    for step in range(3):
        train(case, model, mine, step, env.data_rank, env.data_size)
        train(case, oracle, theirs, step, 0, 1)
        for average, expected in pairs:
            average.update_parameters(model)
            expected.update_parameters(oracle)
            got, want = output(case, average.module), output(case, expected.module)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for average, expected in pairs:
        assert isinstance(average.module, DistributedModelParallel)
        values = full_state_dict(average.module)
        for key, value in expected.module.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5, msg=f"{key} differs")
        again = AveragedModel(model, avg_fn=average.avg_fn, multi_avg_fn=average.multi_avg_fn)
        again.load_state_dict(average.state_dict())
        assert_equal(full_state_dict(again.module), values)


@pytest.mark.parametrize("name", some("mixed_fsdp2xtp", "rowwise_adagrad", without="column_blocks"))
@pytest.mark.sampled(2)
def test_averages_of_weights(name: str) -> None:
    run_ranks(CASES[name].size, averaged, name)


def assigned(name: str) -> None:
    """Whole tensors, then a copy's own pieces, become the weights; training goes on from them."""
    case = CASES[name]
    model, oracle, other = build(case), plain(case), plain(case, seed=9)
    env, given = model.env, {key: value.clone() for key, value in other.state_dict().items()}
    before = local(model)
    first = next(iter(given))
    for bad, match in (
        ({k: v for k, v in given.items() if k != first}, "missing keys"),
        ({**given, "more": torch.ones(1)}, "unexpected keys"),
        ({**given, first: given[first][:-1]}, "has shape"),
        ({**given, first: given[first].double()}, "has dtype"),  # a table, or split
    ):
        with pytest.raises(CheckpointError, match=match):
            model.load_state_dict(bad, assign=True)
        assert_equal(local(model), before)
    own = copy.deepcopy(model)
    own.load_state_dict(given)
    for values in ({key: value.clone() for key, value in given.items()}, own.state_dict()):
        pieces = isinstance(next(iter(values.values())), ChunkedTensor)
        if pieces:  # and through another module
            parent, names = nn.Sequential(model), {f"0.{key}": value for key, value in values.items()}
            with pytest.raises(RuntimeError, match=r"unexpected key|Unexpected key"):
                parent.load_state_dict({**names, "0.more": torch.ones(1)}, assign=True)
            parent.load_state_dict(names, assign=True)
        else:
            model.load_state_dict(values, assign=True)
        oracle.load_state_dict(given)  # with `assign` it would lose its in-backward optimizers, which ours keeps
        assert {key: p.requires_grad for key, p in model.named_parameters()} == {
            key: p.requires_grad for key, p in oracle.named_parameters()
        }
        optimizers = [optimizer_of(case, m) for m in (model, oracle)]
        for step in range(2):
            train(case, model, optimizers[0], step, env.data_rank, env.data_size)
            train(case, oracle, optimizers[1], step, 0, 1)
        got = full_state_dict(model)
        for key, value in oracle.state_dict().items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5, msg=f"{key} differs, {pieces=}")


@pytest.mark.parametrize("name", some("mixed_fsdp2xtp", "hsdp", "adam", without="column_blocks"))
@pytest.mark.sampled(4)
def test_assigned_values(name: str) -> None:
    run_ranks(CASES[name].size, assigned, name)


def tied(mesh: str) -> None:
    """A weight in two places stays one, also when one of its names is all that is given."""
    env = test_dense_state.env_of(mesh)
    torch.manual_seed(0)
    model = DistributedModelParallel(Llama(tied=True, kv_heads=4), env)
    for names in (["tok_embeddings.weight", "output.weight"], ["tok_embeddings.weight"], ["output.weight"]):
        value = torch.randn(V, 32)
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.int64))  # after a forward weights may lie whole
        model.load_state_dict({name: value.clone() for name in names}, strict=False, assign=True)
        places = [model.module.get_submodule(path) for path in ("tok_embeddings", "output")]
        assert places[0]._parameters["weight"] is places[1]._parameters["weight"]
        got = full_state_dict(model)
        assert all(torch.equal(got[name], value) for name in ("tok_embeddings.weight", "output.weight")), names
    optimizer = torch.optim.AdamW(model.parameters())
    full_optimizer_state_dict(model, optimizer)
    model(torch.zeros(1, 2, dtype=torch.int64)).square().sum().backward()
    optimizer.step()
    assert len(full_optimizer_state_dict(model, optimizer)["state"]) == len(list(model.parameters()))
    assert not torch.equal(full_state_dict(model)["output.weight"], value)


@pytest.mark.parametrize("mesh", ["dp2", "shard2", "tp2"])
@pytest.mark.sampled(3)
def test_assigned_values_stay_tied(mesh: str) -> None:
    run_ranks(2, tied, mesh)


def from_meta(mesh: str) -> None:
    """What is wrapped without storage gets it by `assign`, as a plain module does; without, it is refused."""
    with torch.device("meta"):
        module = Llama()
    model = DistributedModelParallel(module, test_dense_state.env_of(mesh), init_parameters=False)
    given = test_dense_state.plain("llama").state_dict()
    with pytest.raises(CheckpointError, match="is on meta"):
        model.load_state_dict(given)
    model.load_state_dict(given, assign=True)
    assert_equal(full_state_dict(model), given)
    loss = test_dense_state.loss_of(model, 0, 0, 1)
    torch.testing.assert_close(loss, test_dense_state.loss_of(test_dense_state.plain("llama"), 0, 0, 1))


@pytest.mark.parametrize(
    ("mesh", "world"), [("shard2", 2), ("tp2", 2), pytest.param("shard2xtp2", 4, marks=pytest.mark.slow)]
)
def test_assigned_values_give_storage_to_meta(mesh: str, world: int) -> None:
    run_ranks(world, from_meta, mesh)


def put_together_anew(module: nn.Module) -> Any:
    """As those who train on what some steps of training come to make one with the weights after each step."""
    new = module.__new__(type(module))
    modules = {name: put_together_anew(each) for name, each in module.named_children()}
    weights = {name: p.clone() for name, p in module.named_parameters(recurse=False)}
    new.__dict__ = module.__dict__ | {"_modules": modules, "_parameters": weights}
    return new


def test_a_model_that_others_put_together_anew_is_refused() -> None:
    """It ran with the weights of the model that it was made of, in silence."""
    model = DistributedModelParallel(nn.Sequential(nn.Linear(2, 1)), ShardingEnv.single())
    with pytest.raises(ShardError, match="Parallel: modules of a wrapped model have been put together anew"):
        put_together_anew(model)(torch.ones(1, 2))
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(model, weights, torch.ones(1, 2)).any()


class DrawsApart(nn.Linear):
    """Its rule asks no generator of torch's."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0 + (dist.get_rank() if dist.is_initialized() else 0))


def copied_by_one() -> None:
    with torch.device("meta"):
        module = DrawsApart(3, 2, bias=False)
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    assert (model.weight == 1.0).all()
    average = copy.deepcopy(model) if dist.get_rank() == 0 else None
    model(torch.ones(1, 3)).sum().backward()
    assert average is None or (average.module(torch.ones(1, 3)) == 3.0).all()


def test_a_rank_copies_its_model_alone() -> None:
    """As it may under DDP; and what a rule has drawn on each rank is rank 0's."""
    run_ranks(2, copied_by_one)
