"""The gradient of this rank's part of a table, as code outside the model reads it: a number of it is not the table's.

A loop that clips by hand, sharpens (SAM) or skips a step takes a norm, a sum or a maximum of every `.grad`. Of a dense
weight that is the same on all ranks; of a part of a table each rank has its own, and what is scaled or skipped by it
makes copies of the dense weights drift apart. So such a `.grad` says once what it is, where one number is made of it.
It is worth no error: who only looks at it may. Optimizers work on each element, and get what a plain tensor gives them;
those that do not are judged by themselves, see `dmp.wrap.optimizer_trial`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from dmp import ShardError
from sharders.embedding.operations import is_pointwise
from sharders.embedding.unread_weight import name_of, nested

_log = logging.getLogger("dmp")

_STAYS = frozenset(
    ("data", "detach", "view", "view_as", "reshape", "flatten", "ravel", "contiguous", "T", "mT", "t", "transpose")
    + ("float", "double", "half", "bfloat16", "to", "cpu", "cat", "concat", "stack", "hstack", "vstack", "where")
)
"""What has the elements in other places, or beside others."""

_IS_KEPT = ("clone", "zeros_like", "ones_like", "full_like", "empty_like")
"""What optimizers begin their state with, which is plain."""

_ADVICE = (
    "torch.nn.utils.clip_grad_norm_ and get_total_norm, of all parameters or gradients, take the whole model's norm; "
    "for other numbers put the ranks' together, or have the table with data_parallel() in the plan"
)


class PartGradient(torch.Tensor):
    """Of this rank's part of a table; see the top of the file."""

    _table: Callable[[], str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if (none := next((part for part in _parts(args) if not part.numel()), None)) is None:
                raise
            raise ShardError(f"{name}: this rank has no row of table {none._table()!r}: {error}. {_ADVICE}") from error
        if name.endswith("_") and not name.endswith("__"):
            return made  # what it was written to
        if isinstance(made, torch.Tensor):
            return _part(made, name, args)
        if isinstance(made, list | tuple) and name.startswith("_foreach"):
            return type(made)(_part(each, name.removeprefix("_foreach_"), args) for each in made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.as_subclass(torch.Tensor).detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def hand_out(parameter: torch.Tensor, table: Callable[[], str]) -> None:
    """Have a parameter's gradient, if it has one, say what it is.

    Args:
        parameter: this rank's part of a table.
        table: gives its name.
    """
    gradient = parameter.grad
    if type(gradient) is torch.Tensor and not gradient.requires_grad:
        parameter.grad = gradient.as_subclass(PartGradient)
        parameter.grad._table = table


def _part(made: torch.Tensor, name: str, args: Any) -> torch.Tensor:
    """What an operation has made of parts: one too, if it has their elements."""
    parts = _parts(args)
    if not parts or type(made) is not torch.Tensor:
        return made
    if made.dim() == 0:
        _say(parts[0]._table(), name)
    elif name in _STAYS or (name not in _IS_KEPT and is_pointwise(name.replace("_", ""))):
        made = made.as_subclass(PartGradient)
        made._table = parts[0]._table
    return made


def _parts(args: Any) -> list[PartGradient]:
    return [each for each in nested(args) if isinstance(each, PartGradient) and "_table" in vars(each)]


def _is_in_a_step() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


_said: set[str] = set()


def _say(table: str, name: str) -> None:
    """Once a process: a model may have thousands of tables."""
    if _said or _is_in_a_step():
        return
    _said.add(table)
    _log.warning(
        "%s of the gradient of table %r is of this rank's part of it: each rank gets another number, and copies of "
        "other weights that are scaled or skipped by it drift apart. %s",
        name,
        table,
        _ADVICE,
    )
