"""This rank's part of a table, or its gradient, as code outside the model sees it: never taken for the whole's.

A loop that clips by hand, sharpens (SAM) or skips a step takes a norm, a sum or a maximum of every `.grad`. Of a dense
weight that is the same on all ranks; of a part of a table each rank has its own, and what is scaled or skipped by it
makes copies of the dense weights drift apart. So a part says once what it is, where one number is made of it, a row is
read, or changed in a gradient, by its number, or anything else is made (scores, a mean of columns, an array) than what
has for each element, or whole row, what it has of the whole's: who only looks may go on. What is drawn in its place is
drawn as `drawn_later` has it. A row of the table that is written by its number (`emb.weight.data[0] = 0` for padding)
is an error: it would be another one on each rank. Optimizers get the plain gradient while they step, at a plain
tensor's cost; those that do not work on each element are judged by themselves, see
`dmp.wrap.optimizers.optimizer_trial`. torch.compile, which fails at tensors of other classes, runs what takes a part
as it stands.

Of a weight it is what the attribute gives that is indexed, or copied without a gradient; a model's own method gets a
`Part`, see `part_read`, and who lists parameters the parameter itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dmp import ShardError
from sharders.before_steps import before_steps
from sharders.embedding.weights.drawn_later import carry_place, draw_by_place
from sharders.embedding.weights.operations import MIXES_COLUMNS, MIXES_ROWS, MOVES, dims_of, is_pointwise
from sharders.embedding.weights.unread_weight import ALLOWED, name_of, nested

_log = logging.getLogger("dmp")

_STAYS = frozenset(
    ("data", "detach", "view", "view_as", "reshape", "flatten", "ravel", "contiguous", "T", "mT", "t", "transpose")
    + ("float", "double", "half", "bfloat16", "to", "cpu", "cat", "concat", "stack", "hstack", "vstack", "where")
    + ("flatten_dense_tensors", "clone")
)
"""What has the elements in other places, or beside others."""

_IS_KEPT = ("zeros_like", "ones_like", "full_like", "empty_like")
"""What is made to gather something of its own, and is plain."""

_BY_NUMBER = frozenset(
    ("__getitem__", "__setitem__", "index_fill", "index_copy", "index_add", "index_put", "index_reduce", "scatter")
    + ("scatter_add", "scatter_reduce", "index_select", "select", "narrow", "gather", "take")
)

_GIVE_ROWS = frozenset(("unbind", "chunk", "split", "tensor_split"))

_OF_A_WHOLE = "load_state_dict takes whole tables"

_ADVICE = (
    "torch.nn.utils.clip_grad_norm_ and get_total_norm, of all parameters or gradients, take the whole model's norm, "
    "full_state_dict(model) gives whole tables; for other numbers put the ranks' together, or have the table with "
    "data_parallel() in the plan"
)


class SeenPart(torch.Tensor):
    """See the top of the file.

    Attributes:
        _table: what it is a part of, for messages.
        _columns: of the table, by which whole rows are known.
        _is_row: made by the number of a row.
        _is_weight: of the table itself.
    """

    _table: Callable[[], str]
    _columns: int
    _is_row: bool
    _is_weight: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        parts = [each for each in nested(args) if isinstance(each, SeenPart) and "_table" in vars(each)]
        to = args[0] if parts and args and args[0] is parts[0] else None
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        by_number = to is not None and _is_by_number(name, args)
        if to is not None and writes and (by_number or to._is_row):
            _written_by_number(to, name)
        by_number |= to is not None and name in _GIVE_ROWS and _dim_of(name, args, kwargs or {}) in (0, -to.dim())
        try:
            with torch._C.DisableTorchFunctionSubclass():
                own = draw_by_place(func, name, parts[0]) if parts else func
                made = own(*args, **(kwargs or {}))
        except (RuntimeError, IndexError) as error:
            is_beyond = by_number and isinstance(error, IndexError)
            if (none := next((p for p in parts if is_beyond or _is_of_other_shape(p, args)), None)) is None:
                raise
            has = f"a part of shape {tuple(none.shape)}" if none.numel() else "no row"
            raise ShardError(
                f"{name}: this rank has {has} of {none._table()}: {error}. {_OF_A_WHOLE}; {_ADVICE}"
            ) from error
        if not parts:
            return made
        if not parts[0]._is_row and name not in ALLOWED and _is_of_rows(name, parts[0], args, kwargs or {}, made):
            _say(parts[0]._table(), name)
        if writes:
            return made
        if isinstance(made, torch.Tensor):
            return _made(made, name, parts[0], by_number)
        if isinstance(made, list | tuple) and (by_number or name.startswith("_foreach")):
            return type(made)(_made(each, name.removeprefix("_foreach_"), parts[0], by_number) for each in made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.as_subclass(torch.Tensor).detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_weight and not self._is_row:
            _say(self._table(), "a saved copy")
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def seen(
    part: torch.Tensor, table: Callable[[], str], columns: int, *, is_weight: bool, is_row: bool = False
) -> torch.Tensor:
    """The same values, which say what they are.

    Args:
        table: says what they are a part of.
        columns: of the table.
        is_weight: they are the table's own.
        is_row: they were found by the number of a row.
    """
    _prepare()
    made = part.as_subclass(SeenPart)
    made._table, made._columns, made._is_weight, made._is_row = table, columns, is_weight, is_row
    carry_place(part, made)
    return made


def hand_out(parameter: torch.Tensor, table: Callable[[], str], columns: int) -> None:
    """Have a parameter's gradient, if it has one, say what it is.

    Args:
        parameter: this rank's part of a table.
        table: gives its name.
        columns: of the table.
    """
    if (gradient := parameter.grad) is not None:
        told = told_gradient(gradient, parameter, table, columns)
        if told is not gradient:
            parameter.grad = told


def told_gradient(
    gradient: torch.Tensor, parameter: torch.Tensor, table: Callable[[], str], columns: int
) -> torch.Tensor:
    """One that says what it is; as it came where it does, or has a graph. Arguments as of `hand_out`."""
    if type(gradient) is not torch.Tensor or gradient.requires_grad:
        return gradient
    carry_place(parameter, gradient)
    return seen(gradient, lambda: f"the gradient of table {table()!r}", columns, is_weight=False)


_put_off: WeakKeyDictionary[Any, list[tuple[Any, torch.Tensor, Any]]] = WeakKeyDictionary()
"""Optimizer in its step -> parameters, their gradients as these are in it, and as they were."""


@cache
def _prepare() -> None:
    before_steps(_before_step)
    register_optimizer_step_post_hook(_after_step)
    import torch._dynamo.config as compiling  # whoever has an optimizer has imported it

    compiling.nontraceable_tensor_subclasses.add(SeenPart)


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    found = [(p, p.grad.as_subclass(torch.Tensor), p.grad) for p in parameters if type(p.grad) is SeenPart]
    for parameter, plain, _seen in found:
        parameter.grad = plain
    if found:
        _put_off.setdefault(optimizer, []).extend(found)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, plain, was in _put_off.pop(optimizer, ()):
        if parameter.grad is plain:
            parameter.grad = was


def _made(made: torch.Tensor, name: str, part: SeenPart, by_number: bool) -> torch.Tensor:
    """What an operation has made of a part: one too, if it has its elements."""
    if type(made) is not torch.Tensor:
        return made
    if (made.dim() == 0 and not part._is_row) or by_number:
        _say(part._table(), name)
    is_of_elements = name in _STAYS or name in MIXES_COLUMNS or (name not in _IS_KEPT and _is_of_elements(name))
    if not by_number and not (is_of_elements and made.dim()):
        return made
    if made.shape == part.shape:
        carry_place(part, made)
    is_weight = part._is_weight and name != "clone"
    return seen(made, part._table, part._columns, is_weight=is_weight, is_row=part._is_row or by_number)


def _written_by_number(to: SeenPart, name: str) -> None:
    if not to._is_weight:
        _say(to._table(), name)
    elif not _is_in_a_step():
        raise ShardError(
            f"{name} of a row of {to._table()} by its number: each rank has other rows, and would write another. "
            "Before the model is wrapped, and in load_state_dict, numbers are the table's; padding_idx gets no gradient"
        )


def _is_of_rows(name: str, part: SeenPart, args: Any, kwargs: Any, made: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return _mixes(name, part, args, kwargs, made) or _has_numbered(part, args)


def _mixes(name: str, part: SeenPart, args: Any, kwargs: Any, made: Any) -> bool:
    """Whether what an operation makes has other than for each element, or whole row, what it makes of the whole."""
    name = name if name.startswith("__") else name.removeprefix("_foreach_").removesuffix("_")
    if name in MIXES_ROWS:
        return name not in _GIVE_ROWS
    if name in MIXES_COLUMNS:
        has_rows = part.dim() == 2 and part.shape[1] == part._columns
        return not has_rows or bool({0, -2} & dims_of(name, args, kwargs))
    is_other = isinstance(made, torch.Tensor) and not name.startswith("_")
    return is_other and not (name in MOVES or name in _STAYS or name in _IS_KEPT or _is_of_elements(name))


def _has_numbered(part: SeenPart, args: Any) -> bool:
    """Whether there is something for each row beside a part that was not made of one: it goes by the rows' numbers."""
    if part.dim() != 2 or part.shape[0] < 2:
        return False
    plain = (each for each in nested(args) if isinstance(each, torch.Tensor) and not isinstance(each, SeenPart))
    of_rows = [(part.shape[0], 1), (part.shape[0],)]
    beside = [each for each in plain if each.shape in of_rows]
    is_one_column = part.shape[1] == 1  # whose weights and momentum have that shape too
    return any(each.dtype is torch.bool or (each.dim() == 2 and not is_one_column) for each in beside)


def _is_of_elements(name: str) -> bool:
    return is_pointwise(name.replace("_", ""))


def _is_of_other_shape(part: SeenPart, args: Any) -> bool:
    """Whether an operation may have failed for what the part is of the whole."""
    beside = (each for each in nested(args) if isinstance(each, torch.Tensor) and not isinstance(each, SeenPart))
    return not part.numel() or any(each.shape != part.shape for each in beside)


def _is_by_number(name: str, args: Any) -> bool:
    """Whether it takes some rows by their numbers, as they are in the part."""
    if name.removesuffix("_") not in _BY_NUMBER and name not in _BY_NUMBER:
        return False
    index = args[1] if len(args) > 1 else None
    if name not in ("__getitem__", "__setitem__"):
        return not isinstance(index, int) or index in (0, -args[0].dim())
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, torch.Tensor):
        return first.dtype is not torch.bool
    return first is not Ellipsis and first is not None and first != slice(None)


def _dim_of(name: str, args: Any, kwargs: Any) -> Any:
    at = 1 if name == "unbind" else 2
    return kwargs.get("dim", args[at] if len(args) > at else 0)


def _is_in_a_step() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


_said: set[str] = set()


def _say(what: str, name: str) -> None:
    """Once a process: a model may have thousands of tables."""
    if _said or _is_in_a_step():
        return
    _said.add(what)
    _log.warning(
        "%s of %s is of this rank's part of it: each rank gets another value, and copies of other weights that are "
        "scaled or skipped by it drift apart. %s",
        name,
        what,
        _ADVICE,
    )
