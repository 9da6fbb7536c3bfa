"""Optimizers that run in the backward pass: which there are, and one with its options.

Their numbers are torch.optim's, or FBGEMM's where torch has none (see `row_updates`), on the rows of the batch; other
rows rest. So Adam is lazy, as `torch.optim.SparseAdam` is. `given_optimizers` reads what users give.

Everything that is known of an optimizer is one `RowOptimizer`, and `register_optimizer` makes another known: to the
kernels, to `model.fused_optimizer` and checkpoints, and, by the bytes of its state, to the planner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dmp import ShardError
from sharders.embedding.lookup import row_updates
from sharders.embedding.lookup.row_optimizer import RowOptimizer, StateTensor

OPTIMIZERS: dict[str, RowOptimizer] = {}
"""Every optimizer that is known, by name."""


def register_optimizer(optimizer: RowOptimizer) -> RowOptimizer:
    """Make an optimizer known to this process; to be called on every rank. The last of a name wins."""
    OPTIMIZERS[optimizer.name] = optimizer
    return optimizer


def facts(name: str, dtype: torch.dtype) -> tuple[tuple[int, int], bool] | None:
    """(`state_bytes`, `mixes_columns`) of a name, for a sharder that says no more; None where nobody registered it."""
    optimizer = OPTIMIZERS.get(name)
    return None if optimizer is None else (optimizer.state_bytes(dtype), optimizer.mixes_columns)


@dataclass(frozen=True, repr=False)
class OptimizerSpec:
    """An in-backward optimizer and its options, by value: tables with equal specs may share storage.

    Example:
        >>> OptimizerSpec.make("sgd", lr=0.5).param_group()["lr"]
        0.5
    """

    kind: str
    """Name of a registered optimizer."""

    options: tuple[tuple[str, Any], ...]
    """Every option with its value, sorted by name."""

    given: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """Options that a user has given, rather than left as they are by default; of other optimizers too."""

    @cached_property
    def _text(self) -> str:
        return f"OptimizerSpec(kind={self.kind!r}, options={self.options!r}, given={self.given!r})"

    def __repr__(self) -> str:
        return self._text  # of which a thousand tables, that have one spec, are told apart

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

    def over(self, other: OptimizerSpec) -> OptimizerSpec:
        """The same with options that are given to `other` and not here: as TorchRec merges a sharder's, a table's."""
        own = dict(self.given)
        more = {k: v for k, v in other.given if k not in own and k in self.optimizer.defaults}
        merged = OptimizerSpec.make(self.kind, **{**dict(self.options), **more})
        return replace(merged, given=(*self.given, *more.items()))

    def param_group(self) -> dict[str, Any]:
        """The options as a fresh dict, to be changed by schedulers."""
        return dict(self.options)


def _plain(value: Any) -> Any:
    """A hashable option: torch.optim takes tensors for some."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    return value.item() if isinstance(value, Tensor) else value


# TorchRec's classes of its `optimizers` are placeholders that FBGEMM runs, with FBGEMM's defaults.
_PLACEHOLDER = "torchrec.optim.optimizers."
# Before a lookup's gradients are summed by row each of their elements is clamped: FBGEMM's `gradient_clipping`.
_CLIPPING = {"gradient_clipping": False, "max_gradient": 1.0}
_ADAGRAD = {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0, **_CLIPPING}
_LAMB = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **_CLIPPING}
_MOMENTS = {"exp_avg": StateTensor(), "exp_avg_sq": StateTensor()}
_PARTIAL_MOMENTS = {"exp_avg": StateTensor(), "exp_avg_sq": StateTensor(is_row_wise=True)}

for _optimizer in (
    RowOptimizer(
        "sgd",
        {"lr": 1e-3, **_CLIPPING},
        row_updates.sgd,
        classes={"torch.optim.sgd.SGD": {}, _PLACEHOLDER + "SGD": {"lr": 1e-2}},
        fbgemm=("sgd", ()),
        fbgemm_type="EXACT_SGD",
    ),
    RowOptimizer(
        "adagrad",
        _ADAGRAD,
        row_updates.adagrad,
        state={"sum": StateTensor(start="initial_accumulator_value")},
        classes={"torch.optim.adagrad.Adagrad": {}, _PLACEHOLDER + "Adagrad": {"eps": 1e-8}},
        fbgemm=("adagrad", ("eps",)),
        fbgemm_type="EXACT_ADAGRAD",
    ),
    RowOptimizer(
        "rowwise_adagrad",
        {**_ADAGRAD, "weight_decay": 0.0, "weight_decay_mode": "none", "max_norm": 0.0},
        row_updates.rowwise_adagrad,
        state={"sum": StateTensor(is_row_wise=True, start="initial_accumulator_value")},
        classes={"torchrec.optim.rowwise_adagrad.RowWiseAdagrad": {}},
        fbgemm=("rowwise_adagrad", ("eps",)),
        beyond_fbgemm=("weight_decay", "max_norm"),
        fbgemm_type="EXACT_ROWWISE_ADAGRAD",
    ),
    RowOptimizer(
        "adam",
        # With bias_corrected_eps, eps is added to the corrected root, as by `torch.optim.Adam`; else to the plain root.
        {**_LAMB, "lr": 1e-3, "bias_corrected_eps": True},
        row_updates.adam,
        state=_MOMENTS,
        classes={
            "torch.optim.adam.Adam": {},
            "torch.optim.sparse_adam.SparseAdam": {"bias_corrected_eps": False},
            _PLACEHOLDER + "Adam": {"lr": 1e-2},
        },
        fbgemm_type="ADAM",
    ),
    RowOptimizer(
        "partial_rowwise_adam",
        _LAMB,
        row_updates.partial_rowwise_adam,
        state=_PARTIAL_MOMENTS,
        classes={_PLACEHOLDER + "PartialRowWiseAdam": {}},
        fbgemm_type="PARTIAL_ROWWISE_ADAM",
    ),
    RowOptimizer(
        "lamb",
        _LAMB,
        row_updates.lamb,
        state=_MOMENTS,
        classes={_PLACEHOLDER + "LAMB": {}},
        fbgemm_type="LAMB",
        reads_row=True,
    ),
    RowOptimizer(
        "partial_rowwise_lamb",
        _LAMB,
        row_updates.partial_rowwise_lamb,
        state=_PARTIAL_MOMENTS,
        classes={_PLACEHOLDER + "PartialRowWiseLAMB": {}},
        fbgemm_type="PARTIAL_ROWWISE_LAMB",
        reads_row=True,
    ),
    RowOptimizer(
        "lars_sgd",
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0, "eta": 1e-3, **_CLIPPING},
        row_updates.lars_sgd,
        state={"momentum_buffer": StateTensor()},
        classes={_PLACEHOLDER + "LarsSGD": {}},
        fbgemm_type="LARS_SGD",
        reads_row=True,
    ),
):
    register_optimizer(_optimizer)
