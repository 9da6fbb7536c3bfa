"""The habits and mistakes of `misuse`: functions that each rank runs, and how each must end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, ShardingEnv, data_parallel, replicate
from tests.equality import attach
from tests.fuzz.file_habits import FILE_HABITS
from tests.fuzz.outcome import ERROR, RIGHT, Wrong
from tests.fuzz.stepped import check, plan_of, same, sgd, step_of, trained, wrapped
from tests.wrapped_net import TABLES, Net, batch, loss_of


def _optimizer_first(env: ShardingEnv) -> None:
    module = Net()
    optimizer = sgd(module.parameters())
    model = wrapped(env, module)
    for step in range(2):
        step_of(model, optimizer, env, step)
    same(model, trained(env, 2))


def _torch_clip(env: ShardingEnv) -> None:
    model = wrapped(env)
    optimizer = sgd(model.parameters())
    for step in range(2):
        loss_of(model, batch(env.data_rank, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    same(model, trained(env, 2, clip=0.05))


def _our_clip(env: ShardingEnv) -> None:
    model = wrapped(env)
    optimizer = sgd(model.parameters())
    loss_of(model, batch(env.data_rank)).backward()
    dmp.clip_grad_norm_(model, 0.05)
    optimizer.step()
    same(model, trained(env, 1, clip=0.05))


def _wrap_twice(env: ShardingEnv) -> None:
    model = wrapped(env)
    DistributedModelParallel(model, env=env)


def _wrap_inner(env: ShardingEnv) -> None:
    DistributedModelParallel(wrapped(env).module, env=env)


def _wrap_parent(env: ShardingEnv) -> None:
    DistributedModelParallel(nn.Sequential(wrapped(env)), env=env)


def _ddp_around(env: ShardingEnv) -> None:
    model = wrapped(env)
    around = nn.parallel.DistributedDataParallel(nn.Sequential(model), process_group=env.group())
    optimizer = sgd(around.parameters())
    step_of(around, optimizer, env)
    same(model, trained(env, 1))


def _double(env: ShardingEnv) -> None:
    model = wrapped(env).double()
    optimizer = sgd(model.parameters())
    loss_of(model, batch(env.data_rank)).backward()
    optimizer.step()
    whole = Net().double()
    for r in range(env.data_size):
        (loss_of(whole, batch(r)) / env.data_size).backward()
    sgd(whole.parameters()).step()
    same(model, whole)


def _bfloat16(env: ShardingEnv) -> None:
    model = wrapped(env).bfloat16()
    loss_of(model, batch(env.data_rank)).backward()
    sgd(model.parameters()).step()
    same(model, trained(env, 1), tolerance=0.02)


def _table_data(env: ShardingEnv) -> None:
    model = wrapped(env)
    for name, p in model.named_parameters():
        if name in TABLES:
            p.data = torch.zeros_like(p)
    out = model(batch(env.data_rank))
    whole = Net()
    for name, p in whole.named_parameters():
        if name in TABLES:
            p.data = torch.zeros_like(p)
    if not torch.allclose(out, whole(batch(env.data_rank)), atol=1e-5):
        raise Wrong("the data that was put in has no effect")


def _table_replaced(env: ShardingEnv) -> None:
    model = wrapped(env)
    model.module.more.weight = nn.Parameter(torch.zeros(30, 4))
    out = model(batch(env.data_rank))
    whole = Net()
    whole.more.weight = nn.Parameter(torch.zeros(30, 4))
    if not torch.allclose(out, whole(batch(env.data_rank)), atol=1e-5):
        raise Wrong("the parameter that was put in has no effect")


def _option(**options: Any) -> Callable[[ShardingEnv], None]:
    """An argument of the wrapper that is none."""
    return lambda env: check(wrapped(env, **options))


def _planner_raises(where: tuple[int, ...]) -> Callable[[ShardingEnv], None]:
    """A stranger's error is shown as itself where it was raised; no rank goes on without the others."""

    def habit(env: ShardingEnv) -> None:
        def plan(*_: Any, **__: Any) -> Any:
            if env.rank in where:
                raise KeyError("a stranger's")
            return plan_of(env)

        try:
            _planner(plan)(env)
        except KeyError as error:
            raise dmp.PlanError(f"as it should be: {error}") from error

    return habit


def _planner(plan: Callable[..., Any]) -> Callable[[ShardingEnv], None]:
    def habit(env: ShardingEnv) -> None:
        planner = type("Planner", (), {"collective_plan": plan})()
        check(DistributedModelParallel(Net(), env=env, planner=planner))

    return habit


def _freeze_table(env: ShardingEnv) -> None:
    model = wrapped(env)
    model.module.items.weight.requires_grad_(False)
    step_of(model, sgd([p for p in model.parameters() if p.requires_grad]), env)
    whole = Net()
    whole.items.weight.requires_grad_(False)
    for r in range(env.data_size):
        (loss_of(whole, batch(r)) / env.data_size).backward()
    sgd([p for p in whole.parameters() if p.requires_grad]).step()
    same(model, whole)


def _unreached(env: ShardingEnv) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.dummy = nn.Parameter(torch.ones(3))
            self.branch = nn.Linear(6, 1)

    model, whole = wrapped(env, Odd()), Odd()
    for step in range(3):
        step_of(model, sgd(model.parameters()), env, step)
        for r in range(env.data_size):
            (loss_of(whole, batch(r, step)) / env.data_size).backward()
        sgd(whole.parameters()).step()
        whole.zero_grad()
    same(model, whole)


class _Tied(Net):
    """Reads a table's weight in its loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.users.weight.mean()


def _weight_read(env: ShardingEnv) -> None:
    model, whole = DistributedModelParallel(_Tied(), env=env), _Tied()
    step_of(model, sgd(model.parameters()), env)
    for r in range(env.data_size):
        (loss_of(whole, batch(r)) / env.data_size).backward()
    sgd(whole.parameters()).step()
    same(model, whole)


def _optimizer(make: Callable[..., torch.optim.Optimizer]) -> Callable[[ShardingEnv], None]:
    """One that is wrong on pieces: refused, or the step of the unsharded model."""

    def habit(env: ShardingEnv) -> None:
        model, whole = wrapped(env), Net()
        ours, theirs = make(model.parameters()), make(whole.parameters())

        def loss() -> torch.Tensor:
            ours.zero_grad()
            value = loss_of(model, batch(env.data_rank))
            value.backward()
            return value

        def whole_loss() -> torch.Tensor:
            theirs.zero_grad()
            value = torch.stack([loss_of(whole, batch(r)) for r in range(env.data_size)]).mean()
            value.backward()
            return value

        ours.step(loss)
        theirs.step(whole_loss)
        same(model, whole)

    return habit


def _deepcopy(env: ShardingEnv) -> None:
    model = wrapped(env)
    other = copy.deepcopy(model)
    step_of(model, sgd(model.parameters()), env)
    same(other, Net())
    same(model, trained(env, 1))


def _two_forwards(env: ShardingEnv) -> None:
    model, whole = wrapped(env), Net()
    optimizer = sgd(model.parameters())
    (loss_of(model, batch(env.data_rank)) + loss_of(model, batch(env.data_rank, 1))).backward()
    optimizer.step()
    for r in range(env.data_size):
        ((loss_of(whole, batch(r)) + loss_of(whole, batch(r, 1))) / env.data_size).backward()
    sgd(whole.parameters()).step()
    same(model, whole)


def _accumulate(env: ShardingEnv) -> None:
    model, whole = wrapped(env), Net()
    optimizer = sgd(model.parameters())
    for step in range(2):
        loss_of(model, batch(env.data_rank, step)).backward()
        for r in range(env.data_size):
            (loss_of(whole, batch(r, step)) / env.data_size).backward()
    optimizer.step()
    sgd(whole.parameters()).step()
    same(model, whole)


def _no_sync(env: ShardingEnv) -> None:
    model, whole = wrapped(env), Net()
    optimizer = sgd(model.parameters())
    with model.no_sync():
        loss_of(model, batch(env.data_rank)).backward()
    loss_of(model, batch(env.data_rank, 1)).backward()
    for step in range(2):
        for r in range(env.data_size):
            (loss_of(whole, batch(r, step)) / env.data_size).backward()
    optimizer.step()
    sgd(whole.parameters()).step()
    same(model, whole)


def _eval_verify(env: ShardingEnv) -> None:
    model = wrapped(env).eval()
    dmp.verify(model, Net().eval(), (batch(env.data_rank),))


def _eval_first(env: ShardingEnv) -> None:
    model = wrapped(env)
    with torch.no_grad():
        model(batch(env.data_rank))
    check(model)


def _scaler_with_fused(env: ShardingEnv) -> None:
    module = Net()
    for name in TABLES:
        attach(module.get_submodule(name.removesuffix(".weight")), "sgd")
    model = wrapped(env, module)
    scaler = dmp.GradScaler(model)
    optimizer = sgd([p for n, p in model.named_parameters() if n not in TABLES])
    scaler.scale(loss_of(model, batch(env.data_rank))).backward()
    scaler.step(optimizer)


def _filter(env: ShardingEnv) -> None:
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    module = Net()
    for name in TABLES:
        attach(module.get_submodule(name.removesuffix(".weight")), "sgd")
    model = wrapped(env, module)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    if set(dense) & set(TABLES):
        raise Wrong(f"{sorted(set(dense) & set(TABLES))} came through")
    step_of(model, sgd(dense.values()), env)
    same(model, trained(env, 1))


def _managed_collision(env: ShardingEnv) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    tables = [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["f"])]
    inner = MCHManagedCollisionModule(20, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1, 1000)
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables), ManagedCollisionCollection({"t": inner}, tables)
    )
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([999, 7, 999]), lengths=torch.tensor([2, 1]))
    got = DistributedModelParallel(copy.deepcopy(module), env=env)(features)[0].values()
    if not torch.equal(got, module(features)[0].values()):  # the same ids on all ranks: they only come more often
        raise Wrong(f"results are {got}")


def _children(env: ShardingEnv) -> None:
    model = wrapped(env)
    names, expected = [n for n, _ in model.named_children()], [n for n, _ in Net().named_children()]
    if names != expected or [n for n, _ in model.named_parameters()] != [n for n, _ in Net().named_parameters()]:
        raise Wrong(f"names are {names}, expected {expected}")


def _signature(env: ShardingEnv) -> None:
    import inspect

    if "ids" not in inspect.signature(wrapped(env).forward).parameters:
        raise Wrong("forward has another signature")


def _replicate_dense(env: ShardingEnv) -> None:
    check(DistributedModelParallel(Net(), env=env, plan={**plan_of(env), "over.weight": replicate()}))


def _lazy(env: ShardingEnv) -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.LazyLinear(6)

    check(wrapped(env, Lazy()))


def _on_meta(env: ShardingEnv) -> None:
    with torch.device("meta"):
        module = Net()
    model = wrapped(env, module)
    values = dmp.full_state_dict(model)
    if any(not bool(torch.isfinite(v).all()) for v in values.values()):
        raise Wrong("values that are not finite")
    # A buffer that is made in __init__ has no rule by which it could be filled: refused, above.


def _clip_by(value: Any) -> Callable[[ShardingEnv], None]:
    def habit(env: ShardingEnv) -> None:
        model = wrapped(env)
        loss_of(model, batch(env.data_rank)).backward()
        dmp.clip_grad_norm_(model, value)

    return habit


def _not_a_module(value: Any) -> Callable[[ShardingEnv], None]:
    return lambda env: DistributedModelParallel(value, env=env) and None


HABITS: dict[str, tuple[str, Callable[[ShardingEnv], None]]] = {
    "an optimizer from before": ("", _optimizer_first),
    "torch's clip_grad_norm_": ("", _torch_clip),
    "our clip_grad_norm_": (RIGHT, _our_clip),
    "wrapped twice": (ERROR, _wrap_twice),
    "its module wrapped again": (ERROR, _wrap_inner),
    "its parent wrapped again": (ERROR, _wrap_parent),
    "DDP around a parent": ("", _ddp_around),
    "double() afterwards": ("", _double),
    "bfloat16() afterwards": ("", _bfloat16),
    "a table's data replaced": ("", _table_data),
    "a table's parameter replaced": ("", _table_replaced),
    "device meta": (ERROR, _option(device="meta")),
    "a device that is not there": (ERROR, _option(device="cuda")),
    "a device that is none": (ERROR, _option(device="fridge")),
    "a wrapper without wrap": (ERROR, _option(data_parallel_wrapper=object())),
    "sharders that are None": (ERROR, _option(sharders=[None])),
    "sharders that are text": (ERROR, _option(sharders="all")),
    "no sharders for a plan of tables": (ERROR, _option(sharders=[])),
    "a plan and a planner": (ERROR, _option(planner=object())),
    "a planner that raises": (ERROR, _planner_raises((0, 1))),
    "a planner that raises on rank 0": (ERROR, _planner_raises((0,))),
    "a planner that raises on rank 1": (ERROR, _planner_raises((1,))),
    "a planner that gives nothing": (ERROR, _planner(lambda *_, **__: None)),
    "a planner that gives a list": (ERROR, _planner(lambda *_, **__: [1])),
    "a planner that gives unknown names": (ERROR, _planner(lambda *_, **__: {"x": data_parallel()})),
    "None for a module": (ERROR, _not_a_module(None)),
    "a class for a module": (ERROR, _not_a_module(Net)),
    "a list for a module": (ERROR, _not_a_module([nn.Linear(1, 1)])),
    "a function for a module": (ERROR, _not_a_module(torch.relu)),
    "a table frozen afterwards": ("", _freeze_table),
    "a loss that does not reach all": (RIGHT, _unreached),
    "a table's weight read in the forward": ("", _weight_read),
    "Muon": ("", _optimizer(lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1))),
    "LBFGS": ("", _optimizer(lambda p: torch.optim.LBFGS(p))),
    "Adafactor": ("", _optimizer(lambda p: torch.optim.Adafactor(p))),
    "a deep copy": (RIGHT, _deepcopy),
    "two forwards, one backward": (RIGHT, _two_forwards),
    "gradients accumulated": (RIGHT, _accumulate),
    "no_sync": (RIGHT, _no_sync),
    "verify in eval mode": (RIGHT, _eval_verify),
    "an evaluation first": (RIGHT, _eval_first),
    "a scaler with tables updated in backward": (ERROR, _scaler_with_fused),
    "in_backward_optimizer_filter": (RIGHT, _filter),
    "managed collision": (RIGHT, _managed_collision),
    "named_children": (RIGHT, _children),
    "forward's signature": (RIGHT, _signature),
    "replicate for a dense weight": ("", _replicate_dense),
    "a lazy module": ("", _lazy),
    "a model on meta": ("", _on_meta),
    "clipping to nan": (ERROR, _clip_by(float("nan"))),
    "clipping to -1": (ERROR, _clip_by(-1.0)),
    "clipping to text": (ERROR, _clip_by("1")),
    **FILE_HABITS,
}
"""Name -> how it must end (either way when empty), and the habit."""
