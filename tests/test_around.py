"""A wrapped model inside what others wrap again, look into, or write: left alone, covered whole, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    DmpError,
    ShardError,
    ShardingEnv,
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
    table_wise,
    to_unsharded,
    verify,
)
from tests.equality import attach
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import TABLES, Net, batch, loss_of, mixed, wrap


class Parent(nn.Module):
    """A model, wrapped or plain, with layers of its own behind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.inner, self.head, self.norm = inner, nn.Linear(1, 1), nn.BatchNorm1d(1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.head(self.inner(ids).unsqueeze(1))).squeeze(1)
        return out


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def around(shape: tuple[int, ...], names: tuple[str, ...], kind: str | None, folder: str) -> Any:
    module = Net()
    for name in TABLES:
        attach(module.get_submodule(name.removesuffix(".weight")), kind)
    env = ShardingEnv.from_mesh(mesh(shape, names))
    parent = Parent(DistributedModelParallel(module, env, plan=mixed()))
    parent.norm.eval()
    before = full_state_dict(parent)
    if env.rank:
        with torch.no_grad():
            parent.head.weight.zero_()
    outer = DistributedDataParallel(parent)
    same(full_state_dict(outer), {f"module.{name}": value for name, value in before.items()})
    optimizer = torch.optim.Adagrad(outer.parameters(), lr=0.1)
    assert set(dict(outer.named_parameters())) == {f"module.{n}" for n, _ in Parent(Net()).named_parameters()}
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(outer, batch(env.data_rank, step)).backward()
        norms.append(float(clip_grad_norm_(outer, 0.5)))
        optimizer.step()
    whole = full_state_dict(outer)
    plain = to_unsharded(outer)
    assert isinstance(plain, Parent) and isinstance(plain.inner, Net)
    same(plain.state_dict(), {name.removeprefix("module."): value for name, value in whole.items()})
    save_checkpoint(folder, outer, optimizer)
    state = full_optimizer_state_dict(outer, optimizer)["state"]
    again = Parent(wrap(env, optimizer=kind))
    load_checkpoint(folder, again)
    same(full_state_dict(again), plain.state_dict())
    if kind is None:
        again.eval()
        with pytest.raises(
            DmpError, match=r": gradient of head\.weight differs by \S*; gradient of norm\.weight differs"
        ):
            verify(again, plain, batch(env.data_rank))  # nobody averages those: this parent is in no DDP
    return norms, plain.state_dict(), sorted(state)


@pytest.mark.parametrize(
    ("shape", "names", "kind"),
    [
        ((2,), ("dp",), None),
        ((2,), ("dp",), "adagrad"),
        ((2,), ("shard",), None),
        ((2, 2), ("replicate", "shard"), None),
    ],
)
@pytest.mark.sampled(4)
def test_ddp_around_a_parent_trains_what_one_process_does(
    shape: Any, names: Any, kind: str | None, tmp_path: Path
) -> None:
    world = 4 if len(shape) > 1 else 2
    plain = Parent(Net())
    plain.norm.eval()
    dense = [p for name, p in plain.named_parameters() if kind is None or name.removeprefix("inner.") not in TABLES]
    tables = [p for name, p in plain.named_parameters() if kind and name.removeprefix("inner.") in TABLES]
    optimizers = [torch.optim.Adagrad(dense, lr=0.1), *([torch.optim.Adagrad(tables, lr=0.1)] if tables else [])]
    norms = []
    for step in range(2):
        plain.zero_grad()
        for rank in range(world):
            (loss_of(plain, batch(rank, step)) / world).backward()
        norms.append(float(nn.utils.clip_grad_norm_(dense, 0.5)))
        for optimizer in optimizers:
            optimizer.step()
    for got_norms, got, state in run_ranks(world, around, shape, names, kind, str(tmp_path / "it")):
        assert got_norms == pytest.approx(norms)
        assert state == sorted(f"module.{name}" for name, _ in plain.named_parameters())
        if kind is None:  # tables' own optimizer has a rate of its own
            same(got, plain.state_dict())


def fully_sharded_parent() -> dict[str, torch.Tensor]:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    inner = DistributedModelParallel(Net(), env, plan=mixed())
    parent = Parent(inner)
    parent.norm.eval()
    fully_shard(parent, mesh=env.mesh)
    loss_of(parent, batch(env.data_rank)).backward()
    torch.optim.SGD(parent.parameters(), lr=0.1, foreach=False).step()
    outer = {n: p.full_tensor() for n, p in parent.named_parameters() if isinstance(p, DTensor)}
    assert outer and not any(name.startswith("inner.") for name in outer)
    return {**{f"inner.{n}": v for n, v in full_state_dict(inner).items()}, **{n: v.detach() for n, v in outer.items()}}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_fully_shard_of_a_parent_leaves_it_alone() -> None:
    plain = Parent(Net())
    plain.norm.eval()
    for rank in range(2):
        (loss_of(plain, batch(rank)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for got in run_ranks(2, fully_sharded_parent):
        assert set(got) >= {name for name, _ in plain.named_parameters()}
        same({name: got[name] for name, _ in plain.named_parameters()}, dict(plain.named_parameters()))


class Beside(nn.Module):
    """What trainers have their users write: a wrapped model in a module that trains nothing of its own."""

    def __init__(self, inner: nn.Module, weight: float) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("weight", torch.tensor(weight))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(ids) * self.weight
        return out


def passed(names: tuple[str, ...]) -> Any:
    """Two steps of two batches each, the first without averages; under DDP, and in one process."""
    env = ShardingEnv.from_mesh(mesh((2,), names))
    model = wrap(env)
    outer = DistributedDataParallel(Beside(model, 1.0 + env.rank), find_unused_parameters=True)
    assert isinstance(outer, DistributedDataParallel) and type(outer.module) is Beside
    optimizer = torch.optim.Adagrad(outer.parameters(), lr=0.1)
    for step in range(2):
        with outer.no_sync():
            loss_of(outer, batch(env.data_rank, 2 * step)).backward()
        loss_of(outer, batch(env.data_rank, 2 * step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.module.weight += env.rank
    outer(batch(0, 0))
    assert float(outer.module.weight) == 1
    with pytest.raises(ShardError, match="drop_last"):
        outer.join()
    with pytest.raises(ShardError, match=r"leaves averages to the wrapped model.*DDPWrapper"):
        outer.register_comm_hook(None, None)
    with pytest.raises(ShardError, match="mixed_precision"):
        DistributedDataParallel(model, mixed_precision=object())  # type: ignore[arg-type]
    copied = copy.deepcopy(outer)
    assert copied.module.inner is not model and torch.equal(copied(batch(0, 0)), outer(batch(0, 0)))
    assert type(DistributedDataParallel(model).module) is DistributedModelParallel
    if names == ("shard",):  # as by Trainer(model=model.module)
        table = nn.Sequential(nn.EmbeddingBag(4, 2))
        cut = DistributedModelParallel(table, env, plan={"0.weight": table_wise(0)})
        for split in (DistributedModelParallel(nn.Linear(2, 1), env), cut):
            with pytest.raises(ShardError, match=r"takes the wrapped model itself, as do .*Trainer\(model=model\)"):
                DistributedDataParallel(split.module)
    assert type(DistributedDataParallel(nn.Linear(2, 1))) is DistributedDataParallel
    assert next(iter(inspect.signature(DistributedDataParallel).parameters)) == "module"
    return full_state_dict(outer)


def passed_plain() -> Any:
    model = Beside(Net(), 1.0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(2):
        for each in (2 * step, 2 * step + 1):
            (sum(loss_of(model, batch(rank, each)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"module.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("names", [("dp",), ("shard",)])
def test_ddp_with_nothing_to_average_passes_calls_on(names: tuple[str, ...]) -> None:
    """Trainers put it around all they are given, and go by its class."""
    wanted = passed_plain()
    for got in run_ranks(2, passed, names):
        same(got, wanted)


def wrapped_again() -> None:
    env, line = ShardingEnv.from_mesh(mesh((2,), ("shard",))), mesh((2,))
    tensor_parallel = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    before: dict[str, Callable[[nn.Module], nn.Module]] = {
        r"'0.weight' as a DTensor.*FSDPWrapper.*TensorParallelSharder": lambda m: fully_shard(m, mesh=line),
        "has '0.weight' as a DTensor": lambda m: parallelize_module(m, line, tensor_parallel),
        r"holds torch's DistributedDataParallel \(at ''\)": DistributedDataParallel,
        r"holds torch's DistributedDataParallel \(at '0'\)": lambda m: nn.Sequential(DistributedDataParallel(m)),
    }
    for text, put in before.items():
        with pytest.raises(ShardError, match=text):
            DistributedModelParallel(put(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), env)


def test_what_others_have_split_is_not_wrapped_again() -> None:
    """Ranks looked at the bits of DTensors, for ever."""
    run_ranks(2, wrapped_again)


# ---- writers of other formats ----

WRITERS: dict[str, Callable[..., Any]] = {
    "torch.save of what is in no state": lambda model, optimizer, path: torch.save(ChunkedTensor((2, 2), [], []), path),
    "of the parameters": lambda model, optimizer, path: torch.save(dict(model.named_parameters()), path),
    "safetensors.save_file": lambda model, optimizer, path: safetensors().save_file(dict(model.state_dict()), path),
    "safetensors.save_model": lambda model, optimizer, path: safetensors().save_model(model, path),
    "numpy": lambda model, optimizer, path: model.state_dict()["users.weight"].numpy(),
}


def safetensors() -> Any:
    import safetensors.torch

    return safetensors.torch


def written(folder: str) -> None:
    model = wrap()
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, batch(model.env.rank)).backward()
    optimizer.step()
    for what, write in WRITERS.items():
        with pytest.raises(
            ShardError, match=r"rank's chunks alone.*save_checkpoint\(path, model, optimizer\)"
        ) as error:
            write(model, optimizer, f"{folder}/{model.env.rank}")
        assert "full_state_dict(model)" in str(error.value), what
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(kept)
    optimizer.step()
    torch.save(full_state_dict(model), io.BytesIO())
    torch.save(full_optimizer_state_dict(model, optimizer), io.BytesIO())


def test_pieces_are_not_written_as_if_they_were_all(tmp_path: Path) -> None:
    run_ranks(2, written, str(tmp_path))
    model = wrap(ShardingEnv.single())  # one process has no pieces
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, batch(0)).backward()
    optimizer.step()
    torch.save([model.state_dict(), optimizer.state_dict(), dict(model.named_parameters())], tmp_path / "it")
    safetensors().save_file(dict(model.state_dict()), tmp_path / "it")


# ---- names and signatures ----


def looked_at() -> None:
    model, module = wrap(), Net()
    for kind in ("named_children", "named_parameters", "named_buffers"):
        assert [name for name, _ in getattr(model, kind)()] == [name for name, _ in getattr(module, kind)()], kind
    assert [name for name, _ in model.named_modules()][1:] == [name for name, _ in module.named_modules()]
    assert list(model._modules) == list(module._modules) and model.get_submodule("over") is model.module.over
    assert model.get_parameter("over.weight") is model.module.over.weight
    assert "_wrapped" not in repr(model) and "(over): Linear" in repr(model)
    assert inspect.signature(model.forward) == inspect.signature(module.forward)
    assert list(inspect.signature(DistributedModelParallel.forward).parameters) == ["model", "args", "kwargs"]
    assert torch.equal(model.forward(batch(0)), model(batch(0)))
    seen: list[Any] = []
    model.apply(seen.append)
    assert seen[-2:] == [model.module, model] and len(seen) == len(list(model.modules()))
    assert not any(m.training for m in model.eval().running.modules()) and not model.training
    assert all(m.training for m in model.train().running.modules()) and model.training
    root = DistributedModelParallel(nn.Linear(2, 1))
    parent = nn.Sequential(root)
    parent.load_state_dict({"0.weight": torch.ones(1, 2), "0.bias": torch.ones(1)})
    assert torch.equal(root.weight, torch.ones(1, 2))
    with pytest.raises(RuntimeError, match=r"Missing.*0\.bias[\s\S]*Unexpected.*0\.other"):
        parent.load_state_dict({"0.weight": torch.ones(1, 2), "0.other": torch.ones(1)})


def test_names_and_signature_are_the_modules_own() -> None:
    run_ranks(2, looked_at)


def accumulated(shape: tuple[int, ...], names: tuple[str, ...], by: str) -> dict[str, Any]:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model = wrap(env)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if by == "attribute":  # as a script that had DDP
            model.require_backward_grad_sync = syncs = step % 2 == 1
            assert getattr(model.running, "require_backward_grad_sync", syncs) == syncs
        with model.no_sync() if by == "no_sync" and not step % 2 else contextlib.nullcontext():
            loss_of(model, batch(env.data_rank, step)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return full_state_dict(model)


@pytest.mark.parametrize(
    ("shape", "names", "by"),
    [((2,), ("dp",), "attribute"), ((2,), ("shard",), "attribute"), ((2, 2), ("shard", "tp"), "no_sync")],
)
@pytest.mark.sampled(4)
def test_no_sync_comes_to_the_same(shape: Any, names: Any, by: str) -> None:
    """DDP's attribute was set in silence, and did nothing."""
    world = 4 if len(shape) > 1 else 2
    same(run_ranks(world, accumulated, shape, names, by)[0], run_ranks(world, accumulated, shape, names, "all")[0])


def asked_as_fsdp2(names: tuple[str, ...], has: bool) -> None:
    model = wrap(ShardingEnv.from_mesh(mesh((2,), names)))
    for name, advice in (("set_requires_gradient_sync", r"model.no_sync\(\)"), ("unshard", "hasattr")):
        assert hasattr(model, name) == has
        if not has:
            with pytest.raises(AttributeError, match=f"no '{name}', which is FSDP2's.*{advice}"):
                getattr(model, name)


@pytest.mark.parametrize(("names", "has"), [(("dp",), False), (("tp",), False), (("shard",), True)], ids=str)
def test_what_fsdp2_has_is_refused_where_nothing_is_split(names: tuple[str, ...], has: bool) -> None:
    """The error named the user's class."""
    run_ranks(2, asked_as_fsdp2, names, has)


def _named_as_the_model() -> None:
    for axes in (("dp",), ("shard",)):
        model = DistributedModelParallel(nn.Linear(4, 4), ShardingEnv.from_mesh(mesh((2,), axes)))
        assert model._get_name() == "Linear" and repr(model).startswith("DistributedModelParallel(")
    around = nn.Sequential(nn.Linear(4, 4))
    around.get_base_model = lambda: around[0]  # type: ignore[assignment]
    assert DistributedModelParallel(around, ShardingEnv.from_mesh(mesh((2,), ("shard",))))._get_name() == "Linear"


def test_a_trainer_knows_the_model_by_its_name() -> None:
    """Transformers' shifts labels that it smooths for models of known names alone: others trained on the word that
    they were given, in silence."""
    run_ranks(2, _named_as_the_model)
