"""Optimizers that run in the backward pass: what a parameter asks for, and the update of some rows.

The numbers are torch.optim's (row-wise Adagrad's: TorchRec's) on the rows of the batch; other rows rest. So Adam is
lazy, as `torch.optim.SparseAdam` is, and options that touch every row (weight decay, momentum) are refused.

Terms:
    pointwise: a state tensor with one value per weight.
    rowwise: a state tensor with one value per row.
    step: how often a table was updated; its first update has step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dmp import ShardError

Extent = Literal["pointwise", "rowwise"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-3},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0},
    "rowwise_adagrad": {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "bias_corrected_eps": True},
}
_STATE: dict[str, dict[str, Extent]] = {
    "sgd": {},
    "adagrad": {"sum": "pointwise"},
    "rowwise_adagrad": {"sum": "rowwise"},
    "adam": {"exp_avg": "pointwise", "exp_avg_sq": "pointwise"},
}
_REFUSED: dict[str, str] = {  # option -> why a row update cannot honour it
    "momentum": "it moves rows that are not in the batch",
    "nesterov": "it moves rows that are not in the batch",
    "weight_decay": "it moves rows that are not in the batch",
    "lr_decay": "the learning rate is read from the optimizer at every step; use a torch scheduler instead",
    "amsgrad": "it keeps a third state tensor",
    "maximize": "the gradient is descended",
}
_IGNORED = {"params", "dampening", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
# TorchRec's placeholders of these names cannot step; FBGEMM runs them, with these defaults where nothing is said.
_PLACEHOLDERS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam"}
_PLACEHOLDER_DEFAULTS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8}
_ALLOWED = "torch.optim.SGD, Adagrad, Adam, SparseAdam and torchrec.optim.RowWiseAdagrad"
_ADVICE = "or leave it off this table and pass the parameter to an ordinary optimizer"


@dataclass(frozen=True)
class OptimizerSpec:
    """An in-backward optimizer, by value: tables with equal specs may share storage.

    Example:
        >>> OptimizerSpec.make("sgd", lr=0.5).param_group()
        {'lr': 0.5}
    """

    kind: str
    """"sgd", "adagrad", "rowwise_adagrad" or "adam"."""

    options: tuple[tuple[str, Any], ...]
    """Every option with its value, sorted by name; names are torch.optim's.

    `bias_corrected_eps` is Adam's alone: True adds eps to the bias-corrected root, as `torch.optim.Adam` does; False
    to the plain root, as `torch.optim.SparseAdam` does.
    """

    @classmethod
    def make(cls, kind: str, **options: Any) -> OptimizerSpec:
        """A spec with torch.optim's defaults for the options not given.

        Raises:
            ShardError: an unknown kind or option.
        """
        if kind not in _DEFAULTS:
            raise ShardError(f"expected an optimizer kind out of {sorted(_DEFAULTS)}; got {kind!r}")
        if unknown := options.keys() - _DEFAULTS[kind].keys():
            raise ShardError(f"{kind} takes the options {sorted(_DEFAULTS[kind])}; got {sorted(unknown)}")
        return cls(kind, tuple(sorted((k, _plain(v)) for k, v in (_DEFAULTS[kind] | options).items())))

    def param_group(self) -> dict[str, Any]:
        """The options as a fresh dict, to be changed by schedulers."""
        return dict(self.options)


def state_shapes(kind: str) -> dict[str, Extent]:
    """Names of the state tensors beside `step`, and how far each reaches."""
    return dict(_STATE[kind])


def counts_steps(kind: str) -> bool:
    """Whether torch.optim's state of this kind has a `step` (all but SGD's)."""
    return bool(_STATE[kind])


def optimizer_of(parameter: Tensor, name: str) -> OptimizerSpec | None:
    """The optimizer that `torch.distributed.optim._apply_optimizer_in_backward`, or TorchRec's twin, left on a table.

    Args:
        parameter: the table.
        name: its fully-qualified name, for messages.

    Returns:
        None where there is none.

    Raises:
        ShardError: an optimizer, or an option of one, for which updating the batch's rows alone is not the same as
            stepping the whole table.
    """
    optimizers = getattr(parameter, "_in_backward_optimizers", [])
    if not optimizers:
        return None
    if len(optimizers) > 1:
        classes = [_name(type(o)) for o in optimizers]
        raise ShardError(f"{name}: expected one in-backward optimizer; got {len(classes)}: {classes}. Apply one only")
    optimizer = optimizers[0]
    given: dict[str, Any] = dict(getattr(parameter, "_optimizer_kwargs", [{}])[0])
    kind, group = _kind_and_group(optimizer, given, name)
    for option, reason in _REFUSED.items():
        if group.get(option, 0):
            raise ShardError(
                f"{name}: {_name(type(optimizer))} with {option}={group[option]!r} cannot run in the backward pass of "
                f"a sharded table: {reason}. Set {option} to {False if group[option] is True else 0}, {_ADVICE}"
            )
    options = {k: v for k, v in group.items() if k not in _IGNORED and k not in _REFUSED}
    unknown = (options.keys() | given.keys()) - _DEFAULTS[kind].keys() - _IGNORED - _REFUSED.keys()
    if unknown - {"beta1", "beta2"}:
        raise ShardError(
            f"{name}: {_name(type(optimizer))} came with the options {sorted(unknown)}; a sharded table knows "
            f"{sorted(_DEFAULTS[kind].keys() - {'bias_corrected_eps'})}. Leave the others out, {_ADVICE}"
        )
    return OptimizerSpec.make(kind, **options)


def _kind_and_group(optimizer: Any, given: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Kind and options, defaults filled in; TorchRec's classes are known by name, so as not to import it."""
    cls = type(optimizer)
    if cls is torch.optim.SparseAdam:
        return "adam", optimizer.param_groups[0] | {"bias_corrected_eps": False}
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adagrad: "adagrad", torch.optim.Adam: "adam"}
    if cls in kinds:
        return kinds[cls], dict(optimizer.param_groups[0])
    if cls.__module__ == "torchrec.optim.rowwise_adagrad" and cls.__name__ == "RowWiseAdagrad":
        return "rowwise_adagrad", dict(optimizer.param_groups[0])
    if cls.__module__ == "torchrec.optim.optimizers" and cls.__name__ in _PLACEHOLDERS:
        kind = _PLACEHOLDERS[cls.__name__]
        group = {k: v for k, v in _PLACEHOLDER_DEFAULTS.items() if k in _DEFAULTS[kind]} | given
        if kind == "adam" and ("beta1" in group or "beta2" in group):
            group["betas"] = (group.pop("beta1", 0.9), group.pop("beta2", 0.999))
        return kind, group
    raise ShardError(
        f"{name}: {_name(cls)} cannot run in the backward pass of a sharded table. Use one of {_ALLOWED}, {_ADVICE}"
    )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    """A hashable option: torch.optim takes tensors for some."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    return value.item() if isinstance(value, Tensor) else value


# Updates of rows. V rows of width D, n of them distinct and updated.
RowUpdate = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], Tensor, Mapping[str, Any], Tensor], None]
"""(weights_VD, rows_n, grads_nD, state, state_rows_n, options, step) -> None, in place.

`state` has pointwise tensors as (V, D), addressed by `rows_n`, and rowwise ones as (all rows,), addressed by
`state_rows_n`. `step` is float64, 0-D on the CPU or (n, 1).
"""


def _sgd(
    weights_VD: Tensor,
    rows_n: Tensor,
    grads_nD: Tensor,
    state: Mapping[str, Tensor],
    state_rows_n: Tensor,
    options: Mapping[str, Any],
    step: Tensor,
) -> None:
    weights_VD.index_add_(0, rows_n, grads_nD, alpha=-float(options["lr"]))


def _adagrad(
    weights_VD: Tensor,
    rows_n: Tensor,
    grads_nD: Tensor,
    state: Mapping[str, Tensor],
    state_rows_n: Tensor,
    options: Mapping[str, Any],
    step: Tensor,
) -> None:
    sum_nD = state["sum"].index_select(0, rows_n).addcmul_(grads_nD, grads_nD)
    state["sum"].index_copy_(0, rows_n, sum_nD)
    weights_VD.index_add_(0, rows_n, grads_nD / sum_nD.sqrt_().add_(options["eps"]), alpha=-float(options["lr"]))


def _rowwise_adagrad(
    weights_VD: Tensor,
    rows_n: Tensor,
    grads_nD: Tensor,
    state: Mapping[str, Tensor],
    state_rows_n: Tensor,
    options: Mapping[str, Any],
    step: Tensor,
) -> None:
    sum_n = state["sum"].index_select(0, state_rows_n).add_(grads_nD.square().mean(1))
    state["sum"].index_copy_(0, state_rows_n, sum_n)
    root_n1 = sum_n.sqrt_().add_(options["eps"]).unsqueeze_(1)
    weights_VD.index_add_(0, rows_n, grads_nD / root_n1, alpha=-float(options["lr"]))


def _adam(
    weights_VD: Tensor,
    rows_n: Tensor,
    grads_nD: Tensor,
    state: Mapping[str, Tensor],
    state_rows_n: Tensor,
    options: Mapping[str, Any],
    step: Tensor,
) -> None:
    beta1, beta2 = (float(b) for b in options["betas"])
    mean_nD = state["exp_avg"].index_select(0, rows_n).lerp_(grads_nD, 1 - beta1)
    state["exp_avg"].index_copy_(0, rows_n, mean_nD)
    square_nD = state["exp_avg_sq"].index_select(0, rows_n).mul_(beta2).addcmul_(grads_nD, grads_nD, value=1 - beta2)
    state["exp_avg_sq"].index_copy_(0, rows_n, square_nD)
    root_correction = (1 - torch.pow(beta2, step)).sqrt()
    scale = (root_correction / (1 - torch.pow(beta1, step))).to(weights_VD.dtype)
    eps = options["eps"] * (root_correction if options.get("bias_corrected_eps", True) else 1.0)
    root_nD = square_nD.sqrt_().add_(eps)
    weights_VD.index_add_(0, rows_n, mean_nD.div_(root_nD).mul_(scale), alpha=-float(options["lr"]))


ROW_UPDATES: dict[str, RowUpdate] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
}
