"""This rank's part of a table, as the model's own code reads it past its forward: never taken for the whole.

A method that is called past the forward means the whole table, too. With gradients that may be a penalty, see
`loss_terms`; without them, as where all items are scored or rows are made of length 1 after each step, a product with
the part or a row by its number would have the part's shape, and be taken for the whole's. So a `Part` does what is done
to each element by itself, or to each row where those are whole, which is right, and so it is to tables that are cut
alike; all else is an error. One number of it may be a penalty, where there are gradients, and the backward pass judges;
what is trained beside it would get its gradient from the part, and is an error.

Its sizes are the whole's, where code asks for nothing else. An optimizer or a look at its `.grad` needs the parameter
itself. So the code around says what it is to be, where it reads a weight or by a local name: the parameter, in a method
that runs with gradients, unless torch's operations or the model's modules are about to take it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dmp import Shard, ShardError, ranks
from sharders.embedding.weights.asked_of import INDEXED, UNKNOWN, asked_of, reader, self_of
from sharders.embedding.weights.drawn_later import carry_place
from sharders.embedding.weights.operations import MIXES_COLUMNS, MIXES_ROWS, MOVES, dims_of, is_pointwise, operations
from sharders.embedding.weights.seen_part import seen
from sharders.embedding.weights.unread_weight import ALLOWED, THE_SAME, Unread, name_of, nested

_JOINS = frozenset(("cat", "concat", "stack", "vstack", "hstack"))

_BY_INDEX = frozenset(("__getitem__", "__setitem__"))

_SIZES = frozenset(("shape", "size", "numel", "nelement", "nbytes", "stride", "len", "__len__"))

_OF_LEAVES = frozenset(
    ("grad", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward")
    + ("is_leaf", "set_", "set_data", "print", "type", "as_subclass", "requires_grad")
)
"""What only the parameter itself has, or nobody need watch."""


_MAKE_A_MODULE = frozenset(("from_pretrained", "Parameter"))
"""What makes a plain module's weight of it, which would go for a whole one."""

_IS_SEEN = frozenset(
    (INDEXED, *THE_SAME, *_MAKE_A_MODULE, "T", "mT", "t", "transpose", "rand_like", "randn_like")
    + (*MIXES_ROWS, *MIXES_COLUMNS)
) - {"sum"}
"""What code outside the model does with a weight that `seen_part` is for."""


class Part(torch.Tensor):
    """This rank's part of a table; see the top of the file."""

    _table: str
    _cut: Sequence[Shard]
    _rows_are_whole: bool
    _is_whole: bool

    @staticmethod
    def of(
        parameter: nn.Parameter, size: tuple[int, ...], table: str, holder: nn.Module, cut: Sequence[Shard]
    ) -> torch.Tensor:
        """For who reads it now: the parameter itself, but for a method of the model around.

        Args:
            size: of the table.
            holder: the module whose parameter it is.
            cut: the table's shards on all ranks.
        """
        if torch.compiler.is_compiling():
            return parameter
        is_whole = tuple(parameter.shape) == size  # here, and not on others, which are refused what has gradients
        frame = sys._getframe(2)
        asked = asked_of(frame)
        if all(_is_seen(what) for what in asked) and _is_outside(frame, holder):
            return seen(parameter, lambda: f"table {table!r}", size[1], is_weight=True)
        if not _SIZES.isdisjoint(asked) and _is_outside(frame, holder):
            ranks.say_once(
                "a script asks a table's weight for its shape, and gets that of this rank's part: ids drawn below it, "
                "and masks of it, are of this rank's row numbers. The module's num_embeddings is the whole table's"
            )
        if is_whole and not torch.is_grad_enabled():
            return parameter
        is_of_sizes = all(what in ALLOWED or what in _SIZES for what in asked)
        needs_none = not _OF_LEAVES.isdisjoint(asked) or (is_of_sizes and _SIZES.isdisjoint(asked))
        if needs_none or (torch.is_grad_enabled() and asked == (UNKNOWN,)):
            return parameter
        model = self_of(frame)
        if model is None or all(m is not holder for m in model.modules()):
            return parameter
        is_looked_up = model is holder and not MIXES_ROWS.isdisjoint(asked)  # by torch's own forward, asked for by name
        if _is_of_libraries(frame) and not is_looked_up:
            return parameter
        if is_of_sizes:
            return Unread.of(parameter, size, table, "")
        only_copied = len(asked) == 1 and asked[0] in THE_SAME
        if torch.is_grad_enabled() and not (only_copied or any(_takes(what, model) for what in asked)):
            return parameter
        if is_whole and only_copied:
            return parameter
        made = (parameter.detach() if only_copied else parameter).as_subclass(Part)
        carry_place(parameter, made)
        return made._as(table, cut, parameter.shape[1:] == size[1:], is_whole)

    def _as(self, table: str, cut: Sequence[Shard], rows_are_whole: bool, is_whole: bool) -> Part:
        self._table, self._cut, self._rows_are_whole, self._is_whole = table, cut, rows_are_whole, is_whole
        return self

    def _refuses(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether of a part the result would be another than of the whole, by what is asked; what gives one number, and
        may be a penalty, is asked once it is done."""
        name = name_of(func)
        if name in _BY_INDEX:
            return not _is_of_all(args[1])
        name = name if name.startswith("__") else name.removesuffix("_")
        if name in MIXES_ROWS:
            return True
        if torch.is_grad_enabled() and name not in _JOINS:
            beside = (each for each in nested((args, kwargs)) if not isinstance(each, Part))
            if any(isinstance(each, torch.Tensor) and each.requires_grad for each in beside):
                return True
        return name in MIXES_COLUMNS and not (self._may_be_a_penalty() or self._is_by_row(name, args, kwargs))

    def _is_by_row(self, name: str, args: Any, kwargs: Any) -> bool:
        return self._rows_are_whole and not {0, -2} & dims_of(name, args, kwargs)

    def _keeps(self, name: str, args: Any, kwargs: Any, is_number: bool) -> bool:
        """Whether the result has for each element, or whole row, of the part what it has for that of the whole; or is a
        number that may be a sum over these."""
        is_whole_of_one = len(self._cut) == 1 and self._may_be_a_penalty()
        if name.startswith("__") or is_whole_of_one or kwargs.get("reduction") == "none":
            return True
        name = name.removesuffix("_")
        if name in MIXES_COLUMNS:
            return name == "sum" or self._is_by_row(name, args, kwargs)
        plain = name.removeprefix("_foreach").replace("_", "")
        return is_number or name in MOVES or name in _JOINS or is_pointwise(plain)

    def _may_be_a_penalty(self) -> bool:
        """Which `loss_terms` looks at, in the backward pass."""
        return torch.is_grad_enabled() and self.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = [each for each in nested((args, kwargs)) if isinstance(each, Part) and "_table" in vars(each)]
        if not parts or name_of(func) in ALLOWED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        read = parts[0]
        if read._refuses(func, args, kwargs):
            raise ShardError(_of_a_part(read._table, name_of(func)))
        other = next((part for part in parts if part._cut != read._cut), None)
        try:
            made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, IndexError) as error:  # of shapes that do not fit, as those of the wholes do
            raise ShardError(_of_a_part(read._table, name_of(func))) from error
        if isinstance(made, Part):
            return read._made(made, other, func, args, kwargs)
        for each in nested(made):
            if isinstance(each, Part):
                read._made(each, other, func, args, kwargs)
        return made

    def _made(self, made: Part, other: Part | None, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """What was made of it, if that is right."""
        name = name_of(func)
        if other is not None:
            raise ShardError(_of_a_part(self._table, f"{name}, with {other._table!r}, which is cut otherwise"))
        is_number = made.dim() == 0
        is_of_fewer = name in MIXES_COLUMNS and made.shape[:1] != self.shape[:1]
        if (
            _is_of_more(made, args, name)
            or ((is_number or is_of_fewer) and not made._may_be_a_penalty())
            or not self._keeps(name, args, kwargs, is_number)
        ):
            raise ShardError(_of_a_part(self._table, name))
        if name in THE_SAME:
            carry_place(self, made)
        if is_number:
            return made.as_subclass(torch.Tensor)
        return made._as(self._table, self._cut, self._rows_are_whole, self._is_whole)


def _is_seen(what: str) -> bool:
    """Whether `seen_part` is for what code outside does with a weight; `loss_terms` is for terms of a loss."""
    if what in _IS_SEEN or torch.is_grad_enabled() or what in _OF_LEAVES or not what.isidentifier():
        return what in _IS_SEEN
    name = what.removesuffix("_")
    return name in MOVES or name in MIXES_COLUMNS or is_pointwise(name.replace("_", ""))


def _is_outside(frame: FrameType, holder: nn.Module) -> bool:
    """Whether a frame is of a program's code, and of no method of the model."""
    model = self_of(frame)
    is_own = model is not None and any(m is holder for m in model.modules())
    return not is_own and not _is_of_libraries(frame)


def _is_of_libraries(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "dmp.", "sharders."))


def _takes(what: str, model: nn.Module) -> bool:
    """Whether it is torch's operations, or a module of the model, that take a weight, by what is asked of it."""
    if what in MOVES or what in MIXES_ROWS or what in MIXES_COLUMNS or what in (INDEXED, *_BY_INDEX, *_MAKE_A_MODULE):
        return True
    if not what.isidentifier():
        return what != UNKNOWN  # an operator
    is_of_torch = (
        what.replace("_", "") in operations() or what in _JOINS or hasattr(F, what) or hasattr(torch.linalg, what)
    )
    return is_of_torch or isinstance(model._modules.get(what), nn.Module)


def _is_of_all(index: Any) -> bool:
    """Whether an index is no number of a row or column: all there is, or a mask."""
    if isinstance(index, torch.Tensor):
        return index.dtype is torch.bool and index.dim() == 2
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_of_more(made: torch.Tensor, args: Any, name: str) -> bool:
    """Whether parts were put beside other values, each of them to each of these."""
    tensors = [each for each in nested(args) if isinstance(each, torch.Tensor)]
    parts = [each for each in tensors if isinstance(each, Part)]
    if len(tensors) == len(parts) and (len(parts) < 2 or name in _JOINS or all(each._is_whole for each in parts)):
        return False
    return all(_is_less(each.shape, made.shape) for each in parts)


def _is_less(shape: Sequence[int], made: Sequence[int]) -> bool:
    """Whether a shape was broadcast, or joined, to make another."""
    return any(m > n for m, n in zip(reversed(made), [*reversed(shape), *[1] * len(made)], strict=False))


def _of_a_part(table: str, what: str) -> str:
    return (
        f"{reader()} reads table {table!r} ({what}) past the model's forward, and has this rank's part of it, not the "
        "whole: full_state_dict(model) gives whole tables, to_unsharded(model) a plain model to evaluate; or look all "
        "rows up, table(torch.arange(num_rows)), on all ranks. What changes rows is right where they are whole, and "
        "of two tables where both are cut alike: row_wise() in the plan; what changes the whole, with replicate()"
    )
