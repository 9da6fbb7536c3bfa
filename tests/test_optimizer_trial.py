"""Optimizers that nobody here knows: those that take more than each element by itself are found by a trial."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dmp import DistributedModelParallel, ShardError, ShardingEnv, column_wise, data_parallel, row_wise, table_wise
from dmp.wrap.optimizer_guard import _say_once
from dmp.wrap.optimizer_trial import Untried, cut_of, wrong_cut
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


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(Lion, set()), (Lamb, {ROWS, COLUMNS, BOTH}), (ByRow, {COLUMNS, BOTH}), (Clipped, {ROWS, COLUMNS, BOTH, NOTHING})]
    + [(Calmed, {ROWS, COLUMNS, BOTH}), (Growing, {ROWS, COLUMNS, BOTH, NOTHING}), (Late, {ROWS, COLUMNS, BOTH})],
)
@pytest.mark.parametrize("options", [{}, {"lr": 0.0}, {"lr": 1e-9, "scale": 2.0}], ids=str)
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
    assert wrong_cut(optimizer, optimizer.param_groups[0], [ROWS], torch.device("cpu")).startswith(ROWS)
    assert wrong_cut(optimizer, optimizer.param_groups[0], [NOTHING], torch.device("cpu")) is None


@pytest.mark.parametrize(("kind", "more", "why"), [(Noisy, (), "random"), (Picky, (None,), "TypeError.*model")])
def test_what_cannot_be_tried(kind: Callable[..., Optimizer], more: tuple[Any, ...], why: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], *more)
    with pytest.raises(Untried, match=why):
        wrong_cut(optimizer, optimizer.param_groups[0], [ROWS], torch.device("cpu"))


def test_cuts_of_layouts() -> None:
    env = ShardingEnv.abstract((2,), ("dp",), "cpu")
    layouts = {row_wise(): {ROWS}, column_wise([0, 1]): {COLUMNS}, table_wise(1): {NOTHING}, data_parallel(): set()}
    for layout, cuts in layouts.items():
        assert cut_of(layout.shards((8, 8), env), (8, 8), env.table_size) == cuts


def trains(kind: Callable[..., Optimizer], layout: Any, in_backward: bool = False) -> list[str]:
    """What is said of the optimizer; each error is raised again by the next step, and nothing has changed."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    _say_once.cache_clear()
    try:
        module = nn.Sequential(nn.EmbeddingBag(8, 8, mode="sum"), nn.Linear(8, 2))
        attach(module[0], "sgd" if in_backward else None)
        env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
        model = DistributedModelParallel(module, env, plan={"0.weight": layout})
        optimizer = kind(model.parameters())
        model(torch.arange(8).view(4, 2)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            optimizer.step()
        except ShardError:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            optimizer.step()
        return [text for text in said if "compiled" not in text]  # which kernels are, once on a machine
    finally:
        logging.getLogger("dmp").removeHandler(handler)


def zero(parameters: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)  # type: ignore[no-any-return]


def of_model(parameters: Any) -> Optimizer:
    return Picky(parameters, None)


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
    assert run_ranks(2, trains, Lamb, row_wise(), True) == [[], []]  # the table is updated in the backward pass
    for (text,) in run_ranks(2, trains, of_model, row_wise()):
        assert "Picky steps on this rank's chunks" in text and "works_on_chunks" in text


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
