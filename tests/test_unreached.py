"""Dense parameters that the loss does not reach, on all ranks or on some: gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import (
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    colwise,
    data_parallel,
    full_optimizer_state_dict,
    full_state_dict,
    rowwise,
)
from sharders import DDPWrapper
from tests.oracle import in_backward
from tests.ranks import mesh, run_ranks

Loss = Callable[[nn.Module, int, int], torch.Tensor]


class Net(nn.Module):
    """Takes a branch or not; one of its parameters is for nothing."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(8, 4, mode="sum")
        self.first, self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.dummy, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.0))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, takes_branch: bool, form: str = "tensor") -> Any:
        looked_up = self.table((x[:, :2] * 10).long() % 8)
        part = (
            self._part
            if self.checkpoints is None
            else lambda *a: checkpoint(self._part, *a, use_reentrant=self.checkpoints)
        )
        y = part(x + looked_up, takes_branch)
        if form == "tables":
            return looked_up
        if form == "view":
            return self.head(y).view(-1).view(-1, 2)
        return SimpleNamespace(logits=[self.head(y)]) if form == "object" else self.head(y)

    def _part(self, x: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        x = self.first(x)
        return self.down(self.up(self.branch(x) * self.scale)) if takes_branch else x


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def branches(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Both, neither, one of the ranks, the other, then from the start."""
    takes = ((True, True), (False, False), (True, False), (False, True))[step % 4][rank]
    return (model(batch(rank, step), takes) ** 2).mean()


def nothing_dense_on_one_rank(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (model(batch(rank, step), True, "tables" if rank == step % 2 else "tensor") ** 2).mean()


def in_an_object(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (model(batch(rank, step), step % 2 == 0, "object").logits[0] ** 2).mean()


def a_view_changed_in_place(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (model(batch(rank, step), False, "view").mul_(2) ** 2).mean()


def called_twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    one, other = (model(batch(rank, step + i), i == rank) for i in (0, 5))
    return (one * other).mean()


def past_the_wrapper(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """DDP's forward is not called: it left each rank its own gradients, in silence."""
    return branches(getattr(model, "module", model), rank, step)


LOSSES: dict[str, tuple[Loss, bool | None]] = {
    "branches": (branches, None),
    "checkpoint": (branches, False),
    "reentrant checkpoint": (branches, True),
    "tables alone": (nothing_dense_on_one_rank, None),
    "object": (in_an_object, None),
    "view": (a_view_changed_in_place, None),
    "twice": (called_twice, None),
    "past": (past_the_wrapper, None),
    "past, reentrant": (past_the_wrapper, True),
}


def differences(model: nn.Module, plain: nn.Module) -> Iterator[str]:
    wanted = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        got, expected = p.grad, wanted[name].grad
        if name.startswith("table"):
            continue  # a table's gradient is never None; tests of tables compare it
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        if (got is None) != (expected is None):
            yield f"{name}: {got} for {expected}"
        elif got is not None and expected is not None and not torch.allclose(got, expected, atol=1e-6):
            yield f"{name} differs by {(got - expected).abs().max()}"


def made(axis: str, checkpoints: bool | None = None, **options: Any) -> tuple[DistributedModelParallel, Net]:
    env = ShardingEnv.from_mesh(mesh((2, 2), (axis, "tp")) if "tp" in options else mesh((2,), (axis,)))
    if options.pop("tp", False):
        options["plan"] = {"table.weight": data_parallel(), "down.weight": rowwise()}
        options["plan"].update({f"up.{name}": colwise() for name in ("weight", "bias")})
    return DistributedModelParallel(Net(checkpoints), env, **options), Net(checkpoints)


def steps_of(axis: str, name: str, **options: Any) -> list[str]:
    loss, checkpoints = {**LOSSES, **LOSSES_OF_COPIES}[name]
    model, plain = made(axis, checkpoints, **options)
    rank, found = model.env.data_rank, []
    for step in range(6):
        for m in (model, plain):
            m.zero_grad()
        loss(model, rank, step).backward()
        for other in range(2):
            (loss(plain, other, step) / 2).backward()
        found += [f"step {step}: {text}" for text in differences(model, plain)]
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("axis", ["dp", "shard"])
@pytest.mark.sampled(12)
def test_gradients_are_those_of_one_process(axis: str, name: str) -> None:
    assert run_ranks(2, steps_of, axis, name) == [[], []]


def penalized(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss and the norm of its gradient by a weight, which a first pass gives."""
    loss = branches(model, rank, step)
    module = model.module if isinstance(model, DistributedModelParallel) else model
    (gradient,) = torch.autograd.grad(loss, [module.head.weight], create_graph=True)  # type: ignore[union-attr, list-item]
    return loss + gradient.square().sum()


def past_after_a_forward_alone(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """One with no backward pass of its own, as for logging, which DDP awaited: it left each rank its own gradients."""
    if isinstance(model, DistributedModelParallel):
        model(batch(rank, step), True)
    return past_the_wrapper(model, rank, step)


def without_average_after_a_forward_alone(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """DDP awaited the pass inside `no_sync`, and raised at the forward after it."""
    if not isinstance(model, DistributedModelParallel):
        return branches(model, rank, step) + branches(model, rank, step + 1)
    model(batch(rank, step), True)
    with model.no_sync():
        branches(model, rank, step).backward()
    return branches(model, rank, step + 1)


def a_weight_by_itself_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Between forward and backward: DDP took the second gradient of that weight for an error."""
    loss, decay = branches(model, rank, step), getattr(model, "module", model).head.weight.square().sum()
    if not isinstance(model, DistributedModelParallel):
        return loss + decay
    decay.backward()
    return loss


LOSSES_OF_COPIES: dict[str, tuple[Loss, bool | None]] = {
    "penalty": (penalized, None),
    "past, a forward alone": (past_after_a_forward_alone, None),
    "no_sync, a forward alone": (without_average_after_a_forward_alone, None),
    "a weight first": (a_weight_by_itself_first, None),
}
"""FSDP2's weights are no leaves of the forward's graph, and it averages in each backward pass by itself."""


@pytest.mark.parametrize("name", LOSSES_OF_COPIES)
@pytest.mark.sampled(2)
def test_gradients_of_copies_are_those_of_one_process(name: str) -> None:
    assert run_ranks(2, steps_of, "dp", name) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_beside_split_weights_too(axis: str) -> None:
    assert run_ranks(4, steps_of, axis, "branches", tp=True) == [[]] * 4


def accumulated(axis: str) -> list[str]:
    """Three micro-batches, averaged in the last, where neither rank takes the branch that one took before."""
    model, plain = made(axis)
    rank, found = model.env.rank, []
    takes = ((rank == 0, False, False), (True, False, False))
    for step in range(2):
        for m in (model, plain):
            m.zero_grad()
        with model.no_sync():
            for micro in range(2):
                model(batch(rank, micro), takes[step][micro]).mean().backward()
        model(batch(rank, 2), takes[step][2]).mean().backward()
        for other in range(2):
            for micro in range(3):
                is_taken = micro == 0 and (step == 1 or other == 0)
                (plain(batch(other, micro), is_taken).mean() / 2).backward()
        found += [f"step {step}: {text}" for text in differences(model, plain)]
    return found


def test_what_was_accumulated_before_is_averaged_too() -> None:
    assert run_ranks(2, accumulated, "dp") == [[], []]


def misused(axis: str) -> list[str]:
    """Two forwards then two backwards; a gradient on one rank alone; backward of some; frozen and thawed; a copy."""
    model, plain = made(axis)
    rank, found = model.env.rank, []

    def compare(what: str) -> None:
        found.extend(f"{what}: {text}" for text in differences(model, plain))
        for m in (model, plain):
            m.zero_grad()

    losses = [model(batch(rank, i), i == rank).mean() for i in range(2)]
    for loss in losses:
        loss.backward()
    for other in range(2):
        for i in range(2):
            (plain(batch(other, i), i == other).mean() / 2).backward()
    compare("two backwards")

    only_dense = DistributedModelParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), model.env)
    if rank == 0:  # a saliency map: nothing is averaged, so nobody waits
        x = batch(rank, 0).requires_grad_()
        torch.autograd.grad(only_dense(x).sum(), x)
    only_dense(batch(rank, 0)).sum().backward()

    for takes in ((True, True), (False, False)):
        model.module.first.weight.requires_grad_(takes[0])
        plain.first.weight.requires_grad_(takes[0])
        model(batch(rank, 0), takes[rank]).mean().backward()
        for other in range(2):
            (plain(batch(other, 0), takes[other]).mean() / 2).backward()
        compare(f"trains {takes[0]}")
    for m in (model.module, plain):
        m.first.weight.requires_grad_(True)

    model = copy.deepcopy(model)
    for step in range(2):
        branches(model, rank, step + 1).backward()
        for other in range(2):
            (branches(plain, other, step + 1) / 2).backward()
        compare(f"copy, step {step}")
    return found


def test_uses_of_the_model_that_ddp_does_not_foresee() -> None:
    assert run_ranks(2, misused, "dp") == [[], []]


def stepped_by_hooks(axis: str) -> list[str]:
    """An optimizer of each parameter's own steps when its gradient is there, and lets go of it."""
    models, found = made(axis), []
    steps = {p: torch.optim.SGD([p], lr=0.1) for m in models for p in m.parameters()}

    def hook(p: Any) -> None:
        steps[p].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in steps]
    for step in range(5):
        if step == 4:
            handles = [handle.remove() for handle in handles]  # type: ignore[func-returns-value]
        branches(models[0], models[0].env.rank, step).backward()
        ((branches(models[1], 0, step) + branches(models[1], 1, step)) / 2).backward()
        whole = full_state_dict(models[0])
        found += [f"{step}: {k}" for k, v in models[1].state_dict().items() if not torch.allclose(v, whole[k])]
        found += [
            f"{step}: {k} has one" for m in models for k, p in m.named_parameters() if step < 4 and p.grad is not None
        ]
    return found


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_steps_that_hooks_make_are_those_of_the_average(axis: str) -> None:
    assert run_ranks(2, stepped_by_hooks, axis) == [[], []]


def updated_in_backward() -> list[str]:
    """Some parameters have an optimizer in the backward pass, with momentum; the second step is of two batches."""
    plain, module, found = Net(), Net(), []
    updated = [*module.first.parameters(), *module.branch.parameters(), module.dummy]
    in_backward(torch.optim.SGD, updated, lr=0.1, momentum=0.9)
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    same = [*plain.first.parameters(), *plain.branch.parameters(), plain.dummy]
    optimizer, rank = torch.optim.SGD(same, lr=0.1, momentum=0.9), model.env.rank
    for step in range(5):
        if step == 1:
            with model.no_sync():
                branches(model, rank, 2).backward()
            ((branches(plain, 0, 2) + branches(plain, 1, 2)) / 2).backward()
        branches(model, rank, step).backward()
        ((branches(plain, 0, step) + branches(plain, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = full_state_dict(model)
        found += [f"{step}: {k}" for k, v in plain.state_dict().items() if not torch.allclose(v, whole[k])]
    return found + [f"{k} has one" for k, p in model.named_parameters() if p.grad is not None and "first" in k]


def test_optimizers_in_backward_step_with_the_average() -> None:
    assert run_ranks(2, updated_in_backward) == [[], []]


def updated_by_none() -> list[bool]:
    """A list of no optimizers, as a wrapper leaves one on tables, says nothing of who updates a parameter."""
    module = nn.Linear(4, 2)
    module.weight._in_backward_optimizers = []  # type: ignore[attr-defined]
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    saved = full_optimizer_state_dict(model, optimizer)["state"]
    return [p.grad is not None and "momentum_buffer" in saved[name] for name, p in model.named_parameters()]


def test_no_optimizer_in_backward_is_none() -> None:
    assert run_ranks(2, updated_by_none) == [[True, True]] * 2


def updated_where_split(axis: str, **options: Any) -> None:
    module = nn.Linear(4, 2)
    in_backward(torch.optim.SGD, module.parameters(), lr=0.1)
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    DistributedModelParallel(module, env, **options)


@pytest.mark.parametrize(("axis", "options"), [("shard", {}), ("dp", {"static_graph": True})])
def test_optimizers_in_backward_that_would_be_lost_are_refused(axis: str, options: dict[str, Any]) -> None:
    given = {"data_parallel_wrapper": DDPWrapper(**options)} if options else {}
    for error in run_ranks(2, updated_where_split, axis, **given, expect=ShardError):
        assert "'weight', 'bias': an optimizer in the backward pass" in str(error)
        assert ("leave it out" if options else "splits dense weights") in str(error)


def asked() -> tuple[str, str, bool]:
    models = [made("dp", data_parallel_wrapper=w)[0] for w in (DDPWrapper(), DDPWrapper(static_graph=True))]
    hooks = models[0].module.dummy._post_accumulate_grad_hooks
    del models[0]
    import gc

    gc.collect()
    return "", type(models[-1].running).__name__, not hooks


def test_torchs_own_ways_are_there_where_asked_for() -> None:
    assert run_ranks(2, asked) == [("", "StaticGraphDDP", True)] * 2


class Heads(nn.Module):
    """Two, of one row each: one of two ranks has nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.body(x)
        return [head(h).sum() for head in self.heads]


def a_pass_for_each_loss() -> list[float]:
    model = DistributedModelParallel(Heads(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        first, second = model(torch.ones(2, 4))
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    return [float(state["step"]) for state in optimizer.state.values()]


def test_each_weight_steps_where_a_rank_has_nothing_of_it() -> None:
    assert run_ranks(2, a_pass_for_each_loss) == [[3.0] * 6] * 2


def stepped_where_whole() -> list[str]:
    """A scalar, which FSDP2 leaves whole, after each of several passes, with the model's output in them or without."""
    models, rank = made("shard"), torch.distributed.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    def alone(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        scale: torch.Tensor = getattr(model, "module", model).scale
        return (scale * (rank + step + 1)).exp()

    for step, loss in enumerate((alone, branches, branches, alone, branches)):
        loss(models[0], rank, step).backward()
        ((loss(models[1], 0, step) + loss(models[1], 1, step)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(models[0])
    return [k for k, v in models[1].state_dict().items() if not torch.allclose(v, whole[k], atol=1e-6)]


def test_what_is_whole_steps_after_each_pass() -> None:
    assert run_ranks(2, stepped_where_whole) == [[], []]
