"""What an optimizer of rows is: the state it keeps, and how it changes the rows of a batch.

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

_MOVES_OTHER_ROWS = (
    "it moves rows that are not in the batch; FBGEMM's, for which TorchRec's classes ask, as torchrec.optim.Adam and "
    "LarsSGD do, moves those of the batch, and is another number"
)
NOT_OF_ROWS: Mapping[str, str] = {
    "momentum": _MOVES_OTHER_ROWS,
    "nesterov": _MOVES_OTHER_ROWS,
    "weight_decay": _MOVES_OTHER_ROWS,
    "lr_decay": "the learning rate is read from the optimizer at every step; use a torch scheduler instead",
    "amsgrad": "it keeps a third state tensor",
    "maximize": "the gradient is descended",
}
"""Option of a class of torch's kind -> why an update of rows cannot honour it."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which rows of a table are summed, their optimizer works and keeps its state: float32 for 16 bits, as FBGEMM.

    Squares of gradients below 2.4e-4 are 0 in float16, and a sum in bfloat16 takes nothing below its 256th part.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class StateTensor:
    """A state tensor of a table, beside `step`.

    Args:
        is_row_wise: one value per row, rather than per weight.
        dtype: of its values; None for what `wide` makes of the weights'.
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

    It computes in the gradients' dtype, which is `wide`: an eps of 1e-8 is 0 in float16.

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
        """A copy of the rows' state: (n, D), or (n,) if it is row-wise; in its dtype, or the gradients' for 16 bits."""
        found = self.state[name].index_select(0, self._places(name))
        return found.to(self.grads_nD.dtype) if found.is_floating_point() and found.itemsize < 4 else found

    def write(self, name: str, values: Tensor) -> None:
        """Set the rows' state, shaped as `read` gives it."""
        self.state[name].index_copy_(0, self._places(name), values.to(self.state[name].dtype))

    def weights(self) -> Tensor:
        """A copy of the rows' weights: (n, D)."""
        return self.weights_VD.index_select(0, self.rows_n).to(self.grads_nD.dtype)

    def descend(self, direction_nD: Tensor) -> None:
        """Move the weights against a direction, by the learning rate."""
        self.move(direction_nD, -float(self.options["lr"]))

    def move(self, direction_nD: Tensor, scale: float) -> None:
        """Add a direction, scaled, to the weights."""
        if self.grads_nD.dtype == self.weights_VD.dtype:
            self.weights_VD.index_add_(0, self.rows_n, direction_nD, alpha=scale)
        else:  # rounded once
            self.replace(self.weights().add_(direction_nD, alpha=scale))

    def replace(self, weights_nD: Tensor) -> None:
        """Set the weights."""
        self.weights_VD.index_copy_(0, self.rows_n, weights_nD.to(self.weights_VD.dtype))

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
        beyond_fbgemm: options that this update leaves out: where one is set, torch's operations update.
        fbgemm_type: its name in FBGEMM's `EmbOptimType`, by which TorchRec's `fused_params` ask for it.
        reads_row: an update of a weight reads its row's other columns, also without row-wise state, as by norms.
        refused: options that a user may have given to a class of torch's kind -> why they cannot be honoured.

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
    beyond_fbgemm: tuple[str, ...] = ()
    fbgemm_type: str | None = None
    reads_row: bool = False
    refused: Mapping[str, str] = field(default_factory=lambda: NOT_OF_ROWS)

    @property
    def mixes_columns(self) -> bool:
        """Whether columns of a row are updated by what others of them hold: numbers then depend on cuts of columns."""
        return self.reads_row or any(tensor.is_row_wise for tensor in self.state.values())

    def state_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the state of a table of this dtype: for each weight, and for each row."""
        sizes = {False: 0, True: 0}
        for tensor in self.state.values():
            sizes[tensor.is_row_wise] += (tensor.dtype or wide(dtype)).itemsize
        return sizes[False], sizes[True]
