"""What optimizers in the backward pass do to a row, written from the formulas and row by row: an oracle for tests.

A case is a class of TorchRec's with options; its oracle changes the weights of one row of one rectangle, given its
gradient, its state and the step. Row-wise state is a tensor of one value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharders.embedding.lookup.given_optimizers import optimizer_of
from sharders.embedding.lookup.optimizers import OptimizerSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript, FBGEMM's CPU build of what only GPUs have
    import torchrec.optim
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

RowState = dict[str, Tensor]
RowStep = Callable[[Tensor, Tensor, RowState, Mapping[str, Any], int], None]

LR, EPS, BETA1, BETA2 = 0.1, 1e-6, 0.8, 0.95


def _lr(o: Mapping[str, Any]) -> float:
    rate: float = o.get("lr", LR)
    return rate


def _sgd(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    w -= _lr(o) * g


def _adagrad(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    total = state.setdefault("sum", torch.zeros_like(w))
    total += g**2
    w -= _lr(o) * g / (total.sqrt() + EPS)


def _rowwise_adagrad(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    decay, mode, max_norm = o.get("weight_decay", 0.0), o.get("weight_decay_mode", 0), o.get("max_norm", 0.0)
    coupled = g + decay * w if mode == 1 else g
    state.setdefault("sum", torch.zeros_like(w[:1])).add_((coupled**2).sum() / len(w))
    multiplier = _lr(o) / (state["sum"].sqrt() + EPS)
    correction = {0: 1.0, 1: 1.0 - multiplier * decay, 2: 1.0 - _lr(o) * decay}[mode]
    w.copy_(correction * w - multiplier * g)
    norm = (w**2).sum().sqrt()
    if 0 < max_norm < norm:
        w.mul_(max_norm / norm)


def _adam_step(w: Tensor, g: Tensor, state: RowState, t: int, by_row: bool) -> Tensor:
    m = state.setdefault("exp_avg", torch.zeros_like(w))
    v = state.setdefault("exp_avg_sq", torch.zeros_like(w[:1] if by_row else w))
    m.copy_(BETA1 * m + (1 - BETA1) * g)
    v.copy_(BETA2 * v + (1 - BETA2) * ((g**2).mean() if by_row else g**2))
    return m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)


def _adam(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int, by_row: bool = False) -> None:
    w -= _lr(o) * (_adam_step(w, g, state, t, by_row) + o.get("weight_decay", 0.0) * w)


def _partial_rowwise_adam(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    _adam(w, g, state, o, t, by_row=True)


def _lamb(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int, by_row: bool = False) -> None:
    update = _adam_step(w, g, state, t, by_row) + o.get("weight_decay", 0.0) * w
    if update.any():
        w -= _lr(o) * ((w**2).sum().sqrt() / (update**2).sum().sqrt()) * update


def _partial_rowwise_lamb(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    _lamb(w, g, state, o, t, by_row=True)


def _lars_sgd(w: Tensor, g: Tensor, state: RowState, o: Mapping[str, Any], t: int) -> None:
    decay = o.get("weight_decay", 0.0)
    w_norm, g_norm = (w**2).sum().sqrt(), (g**2).sum().sqrt()
    under = g_norm + decay * w_norm
    rate = _lr(o) * o["eta"] * w_norm / under if under > 0 else 0.0
    m = state.setdefault("momentum_buffer", torch.zeros_like(w))
    m.copy_(o["momentum"] * m + rate * (g + decay * w))
    w -= m


class Case(NamedTuple):
    """An optimizer with options.

    Args:
        cls: TorchRec's class of it.
        options: beside `lr`, `eps` and the betas, in FBGEMM's words.
        step: its oracle.
        state: what it keeps: name -> one value per row.
    """

    cls: type
    options: Mapping[str, Any]
    step: RowStep
    state: Mapping[str, bool]

    @property
    def bound(self) -> float:
        """Of the elements of a lookup's gradient."""
        return self.options["max_gradient"] if "max_gradient" in self.options else float("inf")

    @property
    def given(self) -> dict[str, Any]:
        """All options, as a user gives them."""
        adam = {"beta1": BETA1, "beta2": BETA2} if "exp_avg" in self.state else {}
        return {"lr": LR, **({"eps": EPS} if self.state.keys() & {"sum", "exp_avg"} else {}), **adam, **self.options}

    @property
    def spec(self) -> OptimizerSpec:
        """What is read from a parameter that it was applied to."""
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        self.attach([parameter])
        spec = optimizer_of(parameter, "t")
        assert spec is not None
        return spec

    def attach(self, parameters: list[torch.nn.Parameter]) -> None:
        """Apply it in the backward pass of some tables."""
        _apply_optimizer_in_backward(self.cls, parameters, self.given)


_BOTH, _PARTIAL = {"exp_avg": False, "exp_avg_sq": False}, {"exp_avg": False, "exp_avg_sq": True}
_LARS = {"eta": 0.5, "momentum": 0.7}
_DECAY = {"weight_decay": 0.2}
_SUM = {"sum": True}
_CLIPPED = {"gradient_clipping": True, "max_gradient": 0.3}
CASES = {
    "sgd_clipped": Case(torchrec.optim.SGD, _CLIPPED, _sgd, {}),
    "adagrad_clipped": Case(torchrec.optim.Adagrad, _CLIPPED, _adagrad, {"sum": False}),
    "rowwise_clipped": Case(torchrec.optim.RowWiseAdagrad, _CLIPPED, _rowwise_adagrad, _SUM),
    "lamb_clipped": Case(torchrec.optim.LAMB, _CLIPPED, _lamb, _BOTH),
    "rowwise_l2": Case(torchrec.optim.RowWiseAdagrad, {**_DECAY, "weight_decay_mode": 1}, _rowwise_adagrad, _SUM),
    "rowwise_decouple": Case(torchrec.optim.RowWiseAdagrad, {**_DECAY, "weight_decay_mode": 2}, _rowwise_adagrad, _SUM),
    "rowwise_max_norm": Case(torchrec.optim.RowWiseAdagrad, {"max_norm": 0.7}, _rowwise_adagrad, _SUM),
    "adam_decay": Case(torchrec.optim.Adam, _DECAY, _adam, _BOTH),
    "partial_adam": Case(torchrec.optim.PartialRowWiseAdam, {}, _partial_rowwise_adam, _PARTIAL),
    "partial_adam_decay": Case(torchrec.optim.PartialRowWiseAdam, _DECAY, _partial_rowwise_adam, _PARTIAL),
    "lamb": Case(torchrec.optim.LAMB, {}, _lamb, _BOTH),
    "lamb_decay": Case(torchrec.optim.LAMB, _DECAY, _lamb, _BOTH),
    "partial_lamb": Case(torchrec.optim.PartialRowWiseLAMB, {}, _partial_rowwise_lamb, _PARTIAL),
    "partial_lamb_decay": Case(torchrec.optim.PartialRowWiseLAMB, _DECAY, _partial_rowwise_lamb, _PARTIAL),
    "lars": Case(torchrec.optim.LarsSGD, _LARS, _lars_sgd, {"momentum_buffer": False}),
    "lars_decay": Case(torchrec.optim.LarsSGD, {**_LARS, **_DECAY}, _lars_sgd, {"momentum_buffer": False}),
}
