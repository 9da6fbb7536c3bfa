"""Optimizers that run in the backward pass: what a parameter asks for, and the update of some rows.

The numbers are torch.optim's (row-wise Adagrad's: TorchRec's) on the rows of the batch; other rows rest. So Adam is
lazy, as `torch.optim.SparseAdam` is, and options that touch every row (weight decay, momentum) are refused.

Everything that is known of an optimizer is one `RowOptimizer`, and `register_optimizer` makes another known: to the
kernels, to `model.fused_optimizer` and checkpoints, and, by the bytes of its state, to the planner.

Terms:
    pointwise: a state tensor with one value per weight.
    row-wise: a state tensor with one value per row.
    step: how often a table was updated; its first update has step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmp import ShardError

_MOVES_OTHER_ROWS = "it moves rows that are not in the batch"
NOT_OF_ROWS: Mapping[str, str] = {
    "momentum": _MOVES_OTHER_ROWS,
    "nesterov": _MOVES_OTHER_ROWS,
    "weight_decay": _MOVES_OTHER_ROWS,
    "lr_decay": "the learning rate is read from the optimizer at every step; use a torch scheduler instead",
    "amsgrad": "it keeps a third state tensor",
    "maximize": "the gradient is descended",
}
"""Option -> why an update of rows cannot honour it."""

# Options that say how a step of torch.optim is computed, not what it gives.
_IGNORED = {"params", "dampening", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_ADVICE = "or leave it off this table and pass the parameter to an ordinary optimizer"


@dataclass(frozen=True)
class StateTensor:
    """A state tensor of a table, beside `step`.

    Args:
        is_row_wise: one value per row, rather than per weight.
        dtype: of its values; None for the weights'.
        start: the option that says what it begins with; None for 0.
    """

    is_row_wise: bool = False
    dtype: torch.dtype | None = None
    start: str | None = None

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Of a rectangle's state."""
        return (rows,) if self.is_row_wise else (rows, width)


class Rows(NamedTuple):  # and no dataclass: it is made for every update
    """What an update is given: n distinct rows, out of V rows of width D.

    Args:
        weights_VD: changed in place.
        rows_n: which are updated.
        grads_nD: their gradients.
        state: pointwise tensors (V, D), addressed by `rows_n`; row-wise ones (all rows,), by `state_rows_n`.
        state_rows_n: see `state`.
        options: the live param group.
        step: float64, 0-D on the CPU or (n, 1).
    """

    weights_VD: Tensor
    rows_n: Tensor
    grads_nD: Tensor
    state: Mapping[str, Tensor]
    state_rows_n: Tensor
    options: Mapping[str, Any]
    step: Tensor

    def read(self, name: str) -> Tensor:
        """A copy of the rows' state: (n, D), or (n,) if it is row-wise."""
        return self.state[name].index_select(0, self._places(name))

    def write(self, name: str, values: Tensor) -> None:
        """Set the rows' state, shaped as `read` gives it."""
        self.state[name].index_copy_(0, self._places(name), values)

    def descend(self, direction_nD: Tensor) -> None:
        """Move the weights against a direction, by the learning rate."""
        self.weights_VD.index_add_(0, self.rows_n, direction_nD, alpha=-float(self.options["lr"]))

    def _places(self, name: str) -> Tensor:
        return self.state_rows_n if self.state[name].dim() == 1 else self.rows_n


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer that updates the rows of a batch.

    Args:
        name: by which specs, plans' infos and messages call it.
        defaults: every option with its default; names are torch.optim's.
        update: changes some rows, in torch's operations, on any device and in any dtype.
        state: tensors beside `step`, by torch.optim's names; one without any has no `step` either, as SGD.
        classes: qualified names of the optimizer classes that it stands for -> options that these have beside those of
            their param groups, and defaults that only they have.
        fbgemm: what FBGEMM's update on the CPU calls it, and the options that are passed after state and learning
            rate; None where FBGEMM has none.
        refused: options that a user may have given -> why they cannot be honoured.

    Example:
        >>> def update(rows: Rows) -> None:
        ...     rows.descend(rows.grads_nD.sign())
        >>> signs = RowOptimizer("sign_sgd", {"lr": 1e-3}, update, classes={"mine.optim.SignSGD": {}})
    """

    name: str
    defaults: Mapping[str, Any]
    update: Callable[[Rows], None]
    state: Mapping[str, StateTensor] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fbgemm: tuple[str, tuple[str, ...]] | None = None
    refused: Mapping[str, str] = field(default_factory=lambda: NOT_OF_ROWS)

    def state_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the state of a table of this dtype: for each weight, and for each row."""
        sizes = {False: 0, True: 0}
        for tensor in self.state.values():
            sizes[tensor.is_row_wise] += (tensor.dtype or dtype).itemsize
        return sizes[False], sizes[True]


OPTIMIZERS: dict[str, RowOptimizer] = {}
"""Every optimizer that is known, by name."""


def register_optimizer(optimizer: RowOptimizer) -> RowOptimizer:
    """Make an optimizer known to this process; to be called on every rank. The last of a name wins."""
    OPTIMIZERS[optimizer.name] = optimizer
    return optimizer


def state_bytes(name: str, dtype: torch.dtype) -> tuple[int, int] | None:
    """`RowOptimizer.state_bytes` by name, for a sharder that says no more; None where nobody registered that name."""
    return OPTIMIZERS[name].state_bytes(dtype) if name in OPTIMIZERS else None


@dataclass(frozen=True)
class OptimizerSpec:
    """An in-backward optimizer and its options, by value: tables with equal specs may share storage.

    Example:
        >>> OptimizerSpec.make("sgd", lr=0.5).param_group()
        {'lr': 0.5}
    """

    kind: str
    """Name of a registered optimizer."""

    options: tuple[tuple[str, Any], ...]
    """Every option with its value, sorted by name."""

    @classmethod
    def make(cls, kind: str, **options: Any) -> OptimizerSpec:
        """A spec with the optimizer's defaults for the options not given.

        Raises:
            ShardError: an unknown kind or option.
        """
        if kind not in OPTIMIZERS:
            raise ShardError(f"expected an optimizer kind out of {sorted(OPTIMIZERS)}; got {kind!r}")
        defaults = OPTIMIZERS[kind].defaults
        if unknown := options.keys() - defaults.keys():
            raise ShardError(f"{kind} takes the options {sorted(defaults)}; got {sorted(unknown)}")
        return cls(kind, tuple(sorted((k, _plain(v)) for k, v in {**defaults, **options}.items())))

    @property
    def optimizer(self) -> RowOptimizer:
        """What is known of it."""
        return OPTIMIZERS[self.kind]

    def param_group(self) -> dict[str, Any]:
        """The options as a fresh dict, to be changed by schedulers."""
        return dict(self.options)


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
    classes = [f"{type(o).__module__}.{type(o).__qualname__}" for o in optimizers]
    if len(classes) > 1:
        raise ShardError(f"{name}: expected one in-backward optimizer; got {len(classes)}: {classes}. Apply one only")
    optimizer = next((o for o in OPTIMIZERS.values() if classes[0] in o.classes), None)
    if optimizer is None:
        allowed = ", ".join(known for o in OPTIMIZERS.values() for known in o.classes)
        raise ShardError(
            f"{name}: {classes[0]} cannot run in the backward pass of a sharded table. Use one of {allowed}, {_ADVICE}"
        )
    given: Mapping[str, Any] = getattr(parameter, "_optimizer_kwargs", [{}])[0]
    # TorchRec's placeholders, which only FBGEMM could run, have no param groups.
    live: Mapping[str, Any] = getattr(optimizers[0], "param_groups", [{}])[0]
    group = {**optimizer.classes[classes[0]], **given, **live}
    if "beta1" in group or "beta2" in group:  # FBGEMM's words for betas
        group["betas"] = (group.pop("beta1", 0.9), group.pop("beta2", 0.999))
    for option, reason in optimizer.refused.items():
        if group.get(option, 0):
            raise ShardError(
                f"{name}: {classes[0]} with {option}={group[option]!r} cannot run in the backward pass of a sharded "
                f"table: {reason}. Set {option} to {False if group[option] is True else 0}, {_ADVICE}"
            )
    options = {k: v for k, v in group.items() if k not in _IGNORED and k not in optimizer.refused}
    if unknown := options.keys() - optimizer.defaults.keys():
        raise ShardError(
            f"{name}: {classes[0]} came with the options {sorted(unknown)}; a sharded table knows "
            f"{sorted(optimizer.defaults)}. Leave the others out, {_ADVICE}"
        )
    return OptimizerSpec.make(optimizer.name, **options)


def _plain(value: Any) -> Any:
    """A hashable option: torch.optim takes tensors for some."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    return value.item() if isinstance(value, Tensor) else value


def _sgd(rows: Rows) -> None:
    rows.descend(rows.grads_nD)


def _adagrad(rows: Rows) -> None:
    sum_nD = rows.read("sum").addcmul_(rows.grads_nD, rows.grads_nD)
    rows.write("sum", sum_nD)
    rows.descend(rows.grads_nD / sum_nD.sqrt_().add_(rows.options["eps"]))


def _rowwise_adagrad(rows: Rows) -> None:
    sum_n = rows.read("sum").add_(rows.grads_nD.square().mean(1))
    rows.write("sum", sum_n)
    rows.descend(rows.grads_nD / sum_n.sqrt_().add_(rows.options["eps"]).unsqueeze_(1))


def _adam(rows: Rows) -> None:
    beta1, beta2 = (float(b) for b in rows.options["betas"])
    mean_nD = rows.read("exp_avg").lerp_(rows.grads_nD, 1 - beta1)
    rows.write("exp_avg", mean_nD)
    square_nD = rows.read("exp_avg_sq").mul_(beta2).addcmul_(rows.grads_nD, rows.grads_nD, value=1 - beta2)
    rows.write("exp_avg_sq", square_nD)
    # Both corrections of the bias are one scale of the step: (n, 1), or 0-D, so that no (n, D) pass is spent on them.
    root_correction = (1 - torch.pow(beta2, rows.step)).sqrt()
    scale = (root_correction / (1 - torch.pow(beta1, rows.step))).to(rows.weights_VD.dtype)
    eps = rows.options["eps"] * (root_correction if rows.options["bias_corrected_eps"] else 1.0)
    root_nD = square_nD.sqrt_().add_(eps)
    rows.descend(mean_nD.div_(root_nD).mul_(scale))


# TorchRec's classes of its `optimizers` are placeholders that FBGEMM runs, with FBGEMM's defaults.
_PLACEHOLDER = "torchrec.optim.optimizers."
_ADAGRAD = {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0}

for _optimizer in (
    RowOptimizer(
        "sgd",
        {"lr": 1e-3},
        _sgd,
        classes={"torch.optim.sgd.SGD": {}, _PLACEHOLDER + "SGD": {"lr": 1e-2}},
        fbgemm=("sgd", ()),
    ),
    RowOptimizer(
        "adagrad",
        _ADAGRAD,
        _adagrad,
        state={"sum": StateTensor(start="initial_accumulator_value")},
        classes={"torch.optim.adagrad.Adagrad": {}, _PLACEHOLDER + "Adagrad": {"eps": 1e-8}},
        fbgemm=("adagrad", ("eps",)),
    ),
    RowOptimizer(
        "rowwise_adagrad",
        _ADAGRAD,
        _rowwise_adagrad,
        state={"sum": StateTensor(is_row_wise=True, start="initial_accumulator_value")},
        classes={"torchrec.optim.rowwise_adagrad.RowWiseAdagrad": {}},
        fbgemm=("rowwise_adagrad", ("eps",)),
    ),
    RowOptimizer(
        "adam",
        # With bias_corrected_eps, eps is added to the corrected root, as by `torch.optim.Adam`; else to the plain root.
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "bias_corrected_eps": True},
        _adam,
        state={"exp_avg": StateTensor(), "exp_avg_sq": StateTensor()},
        classes={
            "torch.optim.adam.Adam": {},
            "torch.optim.sparse_adam.SparseAdam": {"bias_corrected_eps": False},
            _PLACEHOLDER + "Adam": {"lr": 1e-2},
        },
    ),
):
    register_optimizer(_optimizer)
