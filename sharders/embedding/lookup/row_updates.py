"""Updates of the rows of a batch, in torch's operations: the formulas.

[Note: FBGEMM's numbers] SGD, Adagrad and Adam are torch.optim's, row-wise Adagrad is TorchRec's. For all else the
formulas are those of FBGEMM's kernels (`fbgemm_gpu/codegen/genscript/optimizers.py`, their GPU form, 1.8.0; its CPU has
none but SGD, Adagrad and row-wise Adagrad, the latter without max-norm and, for most tables, without weight decay).
Only rows of the batch move: weight decay and momentum too are theirs alone. eps is added to the root. Below g is a
row's gradient, w its weights as they are before the update, D its width, t the step.

- adam, decay: u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w; w -= lr * u: decoupled.
- partial row-wise adam: the same with one v for each row, of mean(g^2).
- lamb, partial row-wise lamb: u as by the two; w -= lr * (|w| / |u|) * u, norms over the row.
- lars_sgd: a = lr * eta * |w| / (|g| + weight_decay * |w|); m = momentum * m + a * (g + weight_decay * w); w -= m.
- row-wise adagrad, decay "l2": weight_decay * w is added to g before anything else; "decouple": to u.
- row-wise adagrad, max_norm: a row whose norm is more after the update is scaled down to it.

Where a norm that is divided by is zero (a row that no gradient moves) the row rests; FBGEMM gives NaN there.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dmp import ShardError, shown
from sharders.embedding.lookup.row_optimizer import Rows

_DECAY_MODES = ("none", "l2", "decouple")  # by FBGEMM's numbers


def decay_mode(value: Any) -> str:
    """FBGEMM's `WeightDecayMode`, its name or its number, as one of the words "none", "l2" and "decouple".

    Raises:
        ShardError: another.
    """
    if value in _DECAY_MODES:
        return str(value)
    word = str(value.name if isinstance(value, Enum) else value).lower()
    for number, mode in enumerate(_DECAY_MODES):
        if word in (mode, str(number)):
            return mode
    raise ShardError(f"expected weight_decay_mode NONE, L2 or DECOUPLE; got {shown(value)}")


def sgd(rows: Rows) -> None:
    """w -= lr * g."""
    rows.descend(rows.grads_nD)


def adagrad(rows: Rows) -> None:
    """One sum of squares for each weight."""
    sum_nD = rows.read("sum").addcmul_(rows.grads_nD, rows.grads_nD)
    rows.write("sum", sum_nD)
    rows.descend(rows.grads_nD / sum_nD.sqrt_().add_(rows.options["eps"]))


def rowwise_adagrad(rows: Rows) -> None:
    """One sum of mean squares for each row."""
    options = rows.options
    mode = decay_mode(options["weight_decay_mode"])
    decay = float(options["weight_decay"]) if mode != "none" else 0.0
    grads_nD = rows.grads_nD
    if decay and mode == "l2":
        grads_nD = grads_nD.add(rows.weights(), alpha=decay)
    sum_n = rows.read("sum").add_(grads_nD.square().mean(1))
    rows.write("sum", sum_n)
    direction_nD = grads_nD / sum_n.sqrt_().add_(options["eps"]).unsqueeze_(1)
    if decay and mode == "decouple":
        direction_nD.add_(rows.weights(), alpha=decay)
    rows.descend(direction_nD)
    if options["max_norm"] > 0:
        weights_nD = rows.weights()
        norm_n1 = weights_nD.norm(dim=1, keepdim=True)
        rows.replace(
            torch.where(norm_n1 > options["max_norm"], weights_nD * (options["max_norm"] / norm_n1), weights_nD)
        )


def adam(rows: Rows) -> None:
    """Lazy Adam, with decoupled weight decay."""
    rows.descend(_with_decay(rows, _adam_direction(rows)))


def partial_rowwise_adam(rows: Rows) -> None:
    """Adam with one second moment for each row, see [Note: FBGEMM's numbers]."""
    rows.descend(_with_decay(rows, _partial_rowwise_direction(rows)))


def lamb(rows: Rows) -> None:
    """Adam's direction scaled by each row's trust ratio, see [Note: FBGEMM's numbers]."""
    _descend_by_trust(rows, _adam_direction(rows))


def partial_rowwise_lamb(rows: Rows) -> None:
    """The same with one second moment for each row."""
    _descend_by_trust(rows, _partial_rowwise_direction(rows))


def lars_sgd(rows: Rows) -> None:
    """Momentum of steps as long as the row's own rate, see [Note: FBGEMM's numbers]; it holds the learning rates."""
    options = rows.options
    decay = float(options["weight_decay"])
    weights_nD = rows.weights()
    norm_n1 = weights_nD.norm(dim=1, keepdim=True)
    against_n1 = rows.grads_nD.norm(dim=1, keepdim=True).add_(norm_n1, alpha=decay)
    rate_n1 = _ratio(norm_n1, against_n1).mul_(float(options["lr"]) * float(options["eta"]))
    step_nD = rows.grads_nD.add(weights_nD, alpha=decay).mul_(rate_n1)
    momentum_nD = rows.read("momentum_buffer").mul_(float(options["momentum"])).add_(step_nD)
    rows.write("momentum_buffer", momentum_nD)
    rows.move(momentum_nD, -1.0)


def _adam_direction(rows: Rows) -> Tensor:
    beta1, beta2 = (float(b) for b in rows.options["betas"])
    mean_nD = _first_moment(rows, beta1)
    square_nD = rows.read("exp_avg_sq").mul_(beta2).addcmul_(rows.grads_nD, rows.grads_nD, value=1 - beta2)
    rows.write("exp_avg_sq", square_nD)
    return _corrected(rows, mean_nD, square_nD, beta1, beta2)


def _partial_rowwise_direction(rows: Rows) -> Tensor:
    beta1, beta2 = (float(b) for b in rows.options["betas"])
    mean_nD = _first_moment(rows, beta1)
    square_n = rows.read("exp_avg_sq").mul_(beta2).add_(rows.grads_nD.square().mean(1), alpha=1 - beta2)
    rows.write("exp_avg_sq", square_n)
    return _corrected(rows, mean_nD, square_n.unsqueeze(1), beta1, beta2)


def _first_moment(rows: Rows, beta1: float) -> Tensor:
    mean_nD = rows.read("exp_avg").lerp_(rows.grads_nD, 1 - beta1)
    rows.write("exp_avg", mean_nD)
    return mean_nD


def _corrected(rows: Rows, mean_nD: Tensor, square: Tensor, beta1: float, beta2: float) -> Tensor:
    """Adam's direction out of both moments, which it overwrites; `square` is (n, D) or (n, 1)."""
    # Both corrections of the bias are one scale of the step: (n, 1), or 0-D, so that no (n, D) pass is spent on them.
    root_correction = (1 - torch.pow(beta2, rows.step)).sqrt()
    scale = (root_correction / (1 - torch.pow(beta1, rows.step))).to(rows.grads_nD.dtype)
    eps = rows.options["eps"] * (root_correction if rows.options.get("bias_corrected_eps", True) else 1.0)
    return mean_nD.div_(square.sqrt_().add_(eps)).mul_(scale)


def _with_decay(rows: Rows, direction_nD: Tensor) -> Tensor:
    decay = float(rows.options["weight_decay"])
    return direction_nD.add_(rows.weights(), alpha=decay) if decay else direction_nD


def _descend_by_trust(rows: Rows, direction_nD: Tensor) -> None:
    weights_nD = rows.weights()
    direction_nD.add_(weights_nD, alpha=float(rows.options["weight_decay"]))
    trust_n1 = _ratio(weights_nD.norm(dim=1, keepdim=True), direction_nD.norm(dim=1, keepdim=True))
    rows.descend(direction_nD.mul_(trust_n1))


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """Zero where it is divided by zero."""
    return torch.where(under > 0, over / under, torch.zeros_like(over))
