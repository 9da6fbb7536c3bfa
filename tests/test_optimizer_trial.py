"""Optimizers that nobody here knows: those that take more than each element by itself are found by a trial."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from dmp import (
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_state_dict,
    row_wise,
    table_wise,
)
from dmp.ranks import say_once
from dmp.wrap.optimizers.optimizer_trial import Untried, cut_of, wrong_cut
from tests.equality import attach
from tests.ranks import mesh, run_ranks

ROWS, COLUMNS, BOTH, NOTHING = "by rows", "by columns", "by rows and columns", "of which a rank has nothing"


class Stranger(Optimizer):
    """p -= lr * step_of(p, all gradients)."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        steps = [(p, g, self.direction(p)) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for p, group, direction in steps:
            p.sub_(direction, alpha=group["lr"] * group["scale"])


class Lion(Stranger):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        sign = (0.9 * mean + 0.1 * p.grad).sign()  # type: ignore[operator]
        mean.lerp_(p.grad, 0.01)
        return sign


class Lamb(Stranger):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * (p.norm() / p.grad.norm())  # type: ignore[union-attr]


class ByRow(Stranger):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad - p.grad.mean(-1, keepdim=True)  # type: ignore[union-attr]


class WithState(Stranger):
    """Right on rows, with one value for each, as Adam-mini."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        square = (p.grad**2).mean(-1, keepdim=True)
        return p.grad / self.state[p].setdefault("square", square).lerp_(square, 0.5).sqrt()


class Clipped(Stranger):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return p.grad / torch.nn.utils.get_total_norm(grads).clamp(min=100)  # type: ignore[operator]


class Calmed(Stranger):
    """By the root of what all elements' squares are beside what they have been in the mean, as StableAdamW."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        mean = self.state[p].setdefault("mean", p.grad**2).lerp_(p.grad**2, 0.5)
        return p.grad / mean.sqrt() / (p.grad**2 / mean).mean().sqrt().clamp(min=1.0)


class Growing(Stranger):
    """By how far all have come along their gradients, once that is more than a millionth, as Prodigy."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        held = [q for g in self.param_groups for q in g["params"] if q.grad is not None]
        come, summed = 0.0, 0.0
        for q in held:
            state = self.state[q]
            come += float(((state.setdefault("first", q.clone()) - q) * q.grad).sum())
            state["sum"] = state.get("sum", 0) + q.grad
            summed += float(state["sum"].abs().sum())
        self.so_far = max(getattr(self, "so_far", 1e-6), come / max(summed, 1e-9))
        return self.so_far * p.grad.sign() / self.param_groups[0]["lr"]  # type: ignore[union-attr]


class Late(Lamb):
    """Makes no step before the sixth, as RAdam."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
        return super().direction(p) * float(step >= 6)


class InFloat32(Lamb):
    """As those do that mix in tensors of torch's default dtype."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p).lerp(torch.zeros(p.shape), 0.5)


class Noisy(Stranger):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad + torch.randn_like(p)  # type: ignore[operator]


class Picky(Lion):
    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params)
        self.model = model


class Seldom(Lion):
    """Looks at a norm that hardly ever matters, as what projects where two directions are alike."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p) * float(p.norm() < 1e6)


class LowRank(Lion):
    """Keeps more of the directions of a gradient than a small one has, as GaLore."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        kept = torch.linalg.svd(super().direction(p), full_matrices=False)[0][:, :8]
        return kept @ (kept.mT @ super().direction(p))


class Wanting(Lamb):
    """Does not keep what it was made with."""

    def __init__(self, params: Any, num_steps: int) -> None:
        super().__init__(params)


class NotEmpty(ByRow):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p) + 0 * p.amax(0)


class Centred(Stranger):
    """Around another, as what projects gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.sub_(p.grad.mean())
        self.optimizer.step()


class Sharp(Stranger):
    """Looks for the gradient a step ahead, as SAM: by a closure, or by hand."""

    def __init__(self, params: Any, base_optimizer: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.base_optimizer = base_optimizer(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held])  # type: ignore[misc]
        for p in held:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.1 / float(norm))  # type: ignore[arg-type]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        closure()
        self.second_step()


class Summed(Stranger):
    """What a rank has of a DTensor's sum is what torch gives as a number, and it says nothing."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad / (p.grad**2).sum().item()  # type: ignore[operator]


class Largest(Stranger):
    """Right on the rank that has the largest number, and on it alone."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        largest = self.state[p].setdefault("largest", p.abs().max().item() if p.dim() == 2 else 1.0)
        return p.grad * largest  # type: ignore[operator,no-any-return]


class Unready(Stranger):
    """Of DTensors torch has not all operations."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad.norm().clamp_(1) * p.grad  # type: ignore[union-attr,operator,no-any-return]


class InOneCall(Stranger):
    """One operation for all tensors of a kind, by torch's own sorting."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        for (params, grads), _ in _group_tensors_by_device_and_dtype([held, [p.grad for p in held]]).values():  # type: ignore[list-item]
            torch._foreach_add_(params, grads, alpha=-0.1)


def around(params: Any) -> Optimizer:
    return Centred(torch.optim.SGD(params, lr=0.1))


def sharp(params: Any, lr: float = 0.1) -> Optimizer:
    return Sharp(params, torch.optim.SGD, lr=lr)


def wanting(params: Any) -> Optimizer:
    return Wanting(params, 8)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(Lion, set()), (Lamb, {ROWS, COLUMNS, BOTH}), (ByRow, {COLUMNS, BOTH}), (Clipped, {ROWS, COLUMNS, BOTH, NOTHING})]
    + [(Calmed, {ROWS, COLUMNS, BOTH}), (Growing, {ROWS, COLUMNS, BOTH, NOTHING}), (Late, {ROWS, COLUMNS, BOTH})],
)
@pytest.mark.parametrize("options", [{}, {"lr": 0.0}, {"lr": 1e-9, "scale": 2.0}], ids=str)
@pytest.mark.sampled(4)
def test_which_cuts_an_optimizer_is_wrong_on(kind: Callable[..., Optimizer], wrong: set[str], options: Any) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], **options)
    before = torch.get_rng_state()
    found = {
        cut
        for cut in (ROWS, COLUMNS, BOTH, NOTHING)
        if wrong_cut(optimizer, optimizer.param_groups[0], [cut], torch.device("cpu")) is not None
    }
    assert found == wrong
    assert torch.equal(torch.get_rng_state(), before)


def test_what_steps_in_float32_alone_is_tried_in_it() -> None:
    optimizer = InFloat32([nn.Parameter(torch.ones(2, 2))])
    assert wrong_cut(optimizer, optimizer.param_groups[0], [ROWS], torch.device("cpu"))[0] == ROWS  # type: ignore[index]
    assert wrong_cut(optimizer, optimizer.param_groups[0], [NOTHING], torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("kind", "cuts", "why"),
    [
        (Seldom, {ROWS, COLUMNS, BOTH}, "one number of a whole parameter's .*norm"),
        (LowRank, {ROWS, COLUMNS, BOTH}, "matrix apart .*svd"),
        (wanting, {ROWS, COLUMNS, BOTH}, "one number"),
        (around, {ROWS, COLUMNS, BOTH}, "one number"),
        (sharp, {ROWS, COLUMNS, BOTH, NOTHING}, "one number"),
        (NotEmpty, {COLUMNS, BOTH, NOTHING}, ""),
    ],
)
def test_how_it_is_seen(kind: Callable[..., Optimizer], cuts: set[str], why: str) -> None:
    """Where a number matters or not; around another optimizer; with steps ahead; where a rank has nothing."""
    optimizer, said = kind([nn.Parameter(torch.ones(2, 2))]), {}
    for cut in (ROWS, COLUMNS, BOTH, NOTHING):
        if found := wrong_cut(optimizer, optimizer.param_groups[0], [cut], torch.device("cpu")):
            said[found[0]] = found[1]
    assert said.keys() == cuts
    assert all(re.search(why, text) for text in said.values())
    assert kind is not NotEmpty or "it raised IndexError" in said[NOTHING]


@pytest.mark.parametrize(
    ("kind", "more", "why"), [(Noisy, (), "random"), (Picky, (nn.Linear(2, 2),), "TypeError.*model")]
)
def test_what_cannot_be_tried(kind: Callable[..., Optimizer], more: tuple[Any, ...], why: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], *more)
    with pytest.raises(Untried, match=why):
        wrong_cut(optimizer, optimizer.param_groups[0], [ROWS], torch.device("cpu"))


def test_cuts_of_layouts() -> None:
    env = ShardingEnv.abstract((2,), ("dp",), "cpu")
    layouts = {row_wise(): {ROWS}, column_wise([0, 1]): {COLUMNS}, table_wise(1): {NOTHING}, data_parallel(): set()}
    for layout, cuts in layouts.items():
        assert cut_of(layout.shards((8, 8), env), (8, 8), env.table_size) == cuts


def trains(kind: Callable[..., Optimizer] | None, layout: Any, in_backward: str | None = None) -> list[str]:
    """What is said of the optimizer, or of that in the backward pass; an error is raised again by the next step, and
    nothing has changed."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    say_once.cache_clear()
    try:
        module = nn.Sequential(nn.EmbeddingBag(8, 8, mode="sum"), nn.Linear(8, 2))
        attach(module[0], in_backward)
        env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
        model = DistributedModelParallel(module, env, plan={"0.weight": layout})
        optimizer = model.fused_optimizer if kind is None else kind(model.parameters())
        model(torch.arange(8).view(4, 2).roll(env.rank)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            optimizer.step()
        except ShardError:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            optimizer.step()
        else:
            optimizer.step()
        return [text for text in said if "compiled" not in text]  # which kernels are, once on a machine
    finally:
        logging.getLogger("dmp").removeHandler(handler)


def zero(parameters: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)  # type: ignore[no-any-return]


def of_model(parameters: Any) -> Optimizer:
    return Picky(parameters, nn.Linear(2, 2))


def test_tables_in_chunks_are_guarded() -> None:
    """An error where it is wrong, on every rank; a word where nobody knows; neither where it is right."""
    for kind, layout, text in (
        (Lamb, row_wise(), "Lamb cannot train parameter 0 .*by rows, it takes one number of .*norm.*works_on_chunks"),
        (ByRow, column_wise([0, 1]), "ByRow cannot train parameter 0"),
        (Clipped, table_wise(0), "of which a rank has nothing"),
        (zero, row_wise(), "ZeroRedundancyOptimizer cannot train .*sends its values"),
    ):
        for error in run_ranks(2, trains, kind, layout, expect=ShardError):
            assert re.search(text, str(error)), error
    for kind, layout in ((Lion, row_wise()), (ByRow, row_wise()), (Lamb, data_parallel()), (Lamb, table_wise(1))):
        assert run_ranks(2, trains, kind, layout) == [[], []]
    assert run_ranks(2, trains, Lamb, row_wise(), "sgd") == [[], []]  # the table is updated in the backward pass
    assert run_ranks(2, trains, None, row_wise(), "rowwise_adagrad") == [[], []]  # whose state is cut with the rows
    for (text,) in run_ranks(2, trains, of_model, row_wise()):
        assert "Picky steps on this rank's chunks" in text and "works_on_chunks" in text
    for (text,) in run_ranks(2, trains, WithState, row_wise()):
        assert "WithState keeps state 'square' of shape (4, 1) for parameter 0 of group 0" in text


def looked_at_before(how: str) -> None:
    """A step of an optimizer that something else has looked at since the model was wrapped, or that holds more now."""
    torch.manual_seed(0)
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    module = nn.Sequential(nn.EmbeddingBag(8, 8, mode="sum"), nn.Linear(8, 2))
    layout = data_parallel() if how == "resharded" else row_wise()
    model = DistributedModelParallel(module, env, plan={"0.weight": layout})
    optimizer = Lamb(model.module[1].parameters() if how == "more parameters" else model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "scaled")
    if how != "scaled":
        model(torch.arange(8).view(4, 2)).sum().backward()
        optimizer.step()
    if how == "more parameters":
        optimizer.add_param_group({"params": [*model.module[0].parameters()]})
    if how == "resharded":
        model.reshard({"0.weight": row_wise()}, optimizer)
    scaler.scale(model(torch.arange(8).view(4, 2)).sum()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("how", ["scaled", "resharded", "more parameters"])
def test_what_else_looked_at_an_optimizer_does_not_pass_it(how: str) -> None:
    for error in run_ranks(2, looked_at_before, how, expect=ShardError):
        assert "Lamb cannot train parameter 0" in str(error) and "by rows" in str(error)


def by_hand() -> None:
    """The step of torch's is of an optimizer that is right; what is around it is met where it clears gradients."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    module = nn.Sequential(nn.EmbeddingBag(8, 8, mode="sum"), nn.Linear(8, 2))
    model = DistributedModelParallel(module, env, plan={"0.weight": row_wise()})
    optimizer: Any = sharp(model.parameters())
    model(torch.arange(8).view(4, 2)).sum().backward()
    optimizer.first_step()


def on_dtensors(kind: Callable[..., Optimizer]) -> None:
    """A table in chunks beside weights that FSDP2 splits; an optimizer for each, or one for both."""
    torch.manual_seed(0)
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    module = nn.Sequential(nn.EmbeddingBag(8, 8, mode="sum"), nn.Linear(8, 4))
    whole = copy.deepcopy(module)
    model = DistributedModelParallel(module, env, plan={"0.weight": row_wise()})
    ids, rank = torch.arange(8).view(4, 2), torch.distributed.get_rank()
    whole(ids).square().mean().backward()
    model(ids[2 * rank : 2 * rank + 2]).square().mean().backward()
    before = full_state_dict(model)
    try:
        optimizer = kind(model.parameters() if kind in (InOneCall, Lion) else model.module[1].parameters())
        optimizer.step()
        kind(whole.parameters()).step()
    finally:
        expected = whole.state_dict() if kind in (InOneCall, Lion) else before
        torch.testing.assert_close(full_state_dict(model), dict(expected))


def test_dtensors_are_guarded() -> None:
    for error in run_ranks(2, by_hand, expect=ShardError):
        assert "Sharp cannot train parameter 0" in str(error)
    other = "split as this one, it made other steps"
    cases: list[tuple[Any, str]] = [(Summed, other), (Largest, other), (Unready, "it raised RuntimeError.*clamp_")]
    for kind, text in [*cases, (torch.optim.Rprop, "it raised RuntimeError.*index_put_")]:
        for error in run_ranks(2, on_dtensors, kind, expect=ShardError):
            assert re.search(text, str(error)), error
    run_ranks(2, on_dtensors, InOneCall)
    run_ranks(2, on_dtensors, Lion)
