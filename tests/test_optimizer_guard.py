"""Optimizers that are wrong on chunks of parameters are refused, where they hold a wrapped model's, by the instance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import optimizer as torch_optimizer

from dmp import DistributedModelParallel, ShardError, ShardingEnv, row_wise
from dmp.wrap.optimizers.keyed import parts
from dmp.wrap.optimizers.optimizer_guard import NEEDS_WHOLE, guard_optimizers
from tests.ranks import mesh, run_ranks
from tests.test_asked import Said


class Shampoo(torch.optim.SGD):
    """One of another package, known by its name."""


class OurMuon(torch.optim.Muon):
    """A subclass."""


class ElementwiseShampoo(Shampoo):
    """Its author knows better."""

    works_on_chunks = True


ALLOWED = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD")
REFUSED = (torch.optim.Muon, OurMuon, torch.optim.Adafactor, torch.optim.LBFGS, Shampoo)


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step with a closure that sets the gradient, as LBFGS wants it."""
    (p,) = optimizer.param_groups[0]["params"]

    def closure() -> torch.Tensor:
        p.grad = torch.ones_like(p)
        return torch.ones(())

    optimizer.step(closure)


def wrapped(world: int) -> list[DistributedModelParallel]:
    """A table that is cut by rows, and a weight that FSDP2 splits."""
    table = nn.EmbeddingBag(8, 6, mode="sum")
    env = ShardingEnv.from_mesh(mesh((world,), ("shard",)))
    return [
        DistributedModelParallel(table, env, plan={"weight": row_wise()}),
        DistributedModelParallel(nn.Linear(6, 8, bias=False), env),
    ]


def local_of(p: torch.Tensor) -> torch.Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def changes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves every element."""
    (p,) = optimizer.param_groups[0]["params"]
    before = local_of(p).clone()
    step(optimizer)
    return bool(local_of(p).ne(before).all())


def refuses_chunks() -> None:
    for model in wrapped(2):
        (p,) = model.parameters()
        before = local_of(p).clone()
        for kind in REFUSED:
            reason = next(NEEDS_WHOLE[c.__name__] for c in kind.__mro__ if c.__name__ in NEEDS_WHOLE)
            said = rf"{kind.__name__} cannot train parameter 0 .*{reason}.*such as AdamW.*works_on_chunks = True"
            with pytest.raises(ShardError, match=said):
                step(kind([p], lr=0.1))
            assert torch.equal(local_of(p), before)
        for name in ALLOWED:
            assert changes(getattr(torch.optim, name)([p], lr=0.1)), name


def test_chunks_are_refused() -> None:
    run_ranks(2, refuses_chunks)


def believes_its_author() -> None:
    for model in wrapped(2):
        (p,) = model.parameters()
        assert changes(ElementwiseShampoo([p], lr=0.1))
        said, other = Shampoo([p], lr=0.1), Shampoo([p], lr=0.1)
        said.works_on_chunks = True  # type: ignore[attr-defined]
        assert changes(said)
        with pytest.raises(ShardError, match="Shampoo cannot train"):
            step(other)


def test_an_optimizer_that_is_said_to_be_right_is_left_alone() -> None:
    run_ranks(2, believes_its_author)


def takes_both_kinds(option: str) -> None:
    """As in two groups; by torch's lists of tensors of all kinds, which take one at a time."""
    models = wrapped(2), wrapped(2)  # kept: a model that is garbage on one rank alone has turns of its own there
    together, apart = ([next(model.parameters()) for model in each] for each in models)
    with torch.no_grad():
        for p, q in zip(together, apart, strict=True):
            local_of(q).copy_(local_of(p))
    optimizers = [
        torch.optim.AdamW(together, **{option: True}),  # type: ignore[arg-type]
        torch.optim.AdamW([{"params": [p]} for p in apart]),
    ]
    for _ in range(2):
        for optimizer, parameters in zip(optimizers, (together, apart), strict=True):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(local_of(p), local_of(q))
        assert p.grad is not None
        assert not local_of(p.grad).any()


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_tables_beside_dtensors_in_one_group(option: str) -> None:
    run_ranks(2, takes_both_kinds, option)


def leaves_strangers_alone(world: int) -> None:
    models = wrapped(world)
    for kind in REFUSED:
        assert changes(kind([nn.Parameter(torch.rand(4, 6))], lr=0.1)), kind
    split = distribute_tensor(torch.rand(4, 6), mesh((world,), ("shard",)), [Shard(0)], src_data_rank=None)
    stranger = Shampoo([nn.Parameter(split)], lr=0.1)  # a DTensor of nobody's that we know
    assert changes(stranger)
    assert type(stranger.state_dict()) is dict
    if world == 1:  # its chunk is the whole
        for model in models:
            assert changes(torch.optim.Muon([*model.parameters()], lr=0.1))


@pytest.mark.parametrize("world", [1, 2])
def test_what_no_wrapped_model_holds_in_chunks_is_not_our_business(world: int) -> None:
    run_ranks(world, leaves_strangers_alone, world)


def guards_once() -> int:
    guard_optimizers()
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    guard_optimizers()
    return len(torch_optimizer._global_optimizer_pre_hooks) - before


def test_guarding_twice_is_guarding_once() -> None:
    assert run_ranks(1, guards_once) == [0]


def says_nothing_of_lightnings() -> None:
    """Its wrapper is of a class made of its own and of the optimizer's, and hands steps on to that."""
    (p,) = wrapped(2)[0].parameters()
    inner = torch.optim.AdamW([p], lr=0.1)
    for name in ("LightningOptimizer", "_FabricOptimizer"):
        kind = type(name, (), {"__module__": "lightning.wrappers", "step": lambda self, *args: inner.step(*args)})
        outer = object.__new__(type("LightningAdamW", (kind, torch.optim.AdamW), {}))
        outer.__dict__.update({**vars(inner), "_optimizer": inner})
        with Said() as said:
            outer.zero_grad()
            before = local_of(p).clone()
            step(outer)
        assert not said.texts
        assert local_of(p).ne(before).all()
        assert parts(outer) == [inner]


def test_a_wrapper_of_lightnings_is_no_optimizer_to_try() -> None:
    run_ranks(2, says_nothing_of_lightnings)
