"""What stands for a table's parameter inside the model's forward, where only the lookup may read it.

Outside the forward the parameter of a sharded table is this rank's part of it, for optimizers, loggers and others.
Inside, the model's code means the whole table: it may ask for shape, dtype and device, and gets the whole table's; what
needs values is an error, for it would get one rank's rows and give back one rank's gradient.

So it does in a method that is called past the forward. With gradients that may be a penalty, see `loss_terms`; without
them, as where all items are scored or rows are made of length 1 after each step, a product with the part or a row by
its number would have the part's shape, and be taken for the whole's: a `Part` refuses these, and what makes one number
of it. What is done to each element, or to each row where those are whole, is right, and so it is to tables that are cut
alike. Methods that run with gradients ask for values by `.data` or `.detach()`, next to the weight. Others have the
parameter itself, for an optimizer or its `.grad`, but where the code around says, there or by a local name, that an
operation is about to take it of which the part's result would be another than the whole's, or lead to one: a product
with it, rows by their numbers, what turns it over or puts it beside a batch.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from dmp import DistributedModelParallel, Shard, ShardError

_ALLOWED = frozenset(
    ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_cuda", "is_cpu", "requires_grad", "is_leaf")
    + ("is_sparse", "is_quantized", "is_floating_point", "is_complex", "size", "dim", "numel", "element_size")
    + ("nbytes", "itemsize", "__len__", "get_device", "stride")
)

_THE_SAME = frozenset(("data", "detach"))  # what tools of torch's keep of every parameter, without a look at values


_TURNED = frozenset(
    ("T", "t", "mT", "transpose", "permute", "swapaxes", "unsqueeze", "expand", "view", "reshape", "repeat")
)

_JOINS = frozenset(("cat", "concat", "stack", "vstack", "hstack"))

_MIXES_ROWS = frozenset(
    (
        "mm",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "@",
        "linear",
        "bmm",
        "addmm",
        "einsum",
        "tensordot",
        "baddbmm",
        "mv",
        "inner",
    )
    + ("embedding", "embedding_bag", "index_select", "gather", "take", "cdist", "cosine_similarity")
    + ("index_fill", "index_copy", "index_add", "index_put", "scatter", "scatter_add", "select", "narrow")
)

_MIXES_COLUMNS: Mapping[str, int] = {
    **dict.fromkeys(("sum", "mean", "prod", "std", "var", "std_mean", "var_mean", "median", "logsumexp"), 1),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "sort", "argsort", "cumsum", "cumprod"), 1),
    **dict.fromkeys(("softmax", "log_softmax", "any", "all"), 1),
    **dict.fromkeys(("topk", "kthvalue", "quantile"), 2),
    "norm": 2,
    "normalize": 2,
    "vector_norm": 2,
    "linalg_vector_norm": 2,
    "layer_norm": -1,
    "renorm": -1,
}
"""Name -> which argument says the dims that are mixed; -1: none does."""

_INDEXED = "[...]"
"""What is asked of a weight, where it is indexed."""

_BY_INDEX = frozenset(("__getitem__", "__setitem__"))

_LEADS_ON = _TURNED | _JOINS | _MIXES_ROWS | frozenset(_MIXES_COLUMNS) | {_INDEXED}
"""What takes a weight, in a method that runs with gradients, and is not to have it unwatched."""
_WATCHED = _THE_SAME | _LEADS_ON

_OF_LEAVES = frozenset(("grad", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"))
"""What only the parameter itself has."""


class Part(torch.Tensor):
    """This rank's part of a table, read by the model's own code past its forward; see the top of the file."""

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
        if is_whole and not torch.is_grad_enabled():
            return parameter
        reader = sys._getframe(2)
        asked = _asked_after(reader.f_code).get(reader.f_lasti) if torch.is_grad_enabled() else None
        if torch.is_grad_enabled() and asked not in _WATCHED:
            return parameter
        model, name = _self_of(reader), f"{reader.f_globals.get('__name__')}."
        if (
            model is None
            or name.startswith(("torch.", "dmp.", "sharders."))
            or all(m is not holder for m in model.modules())
        ):
            return parameter
        if is_whole and asked in _THE_SAME:
            return parameter
        made = parameter.detach() if asked in _THE_SAME else parameter
        return made.as_subclass(Part)._as(table, cut, parameter.shape[1:] == size[1:], is_whole)

    def _as(self, table: str, cut: Sequence[Shard], rows_are_whole: bool, is_whole: bool) -> Part:
        self._table, self._cut, self._rows_are_whole, self._is_whole = table, cut, rows_are_whole, is_whole
        return self

    def _refuses(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether of a part the result would be another than of the whole, by what is asked."""
        name = func.__name__
        if name in _BY_INDEX:
            return not _is_of_all(args[1])
        name = name.removesuffix("_")
        if name in _MIXES_ROWS or name not in _MIXES_COLUMNS or self._may_be_a_penalty():
            return name in _MIXES_ROWS
        at = _MIXES_COLUMNS[name]
        dims = kwargs.get("dim", args[at] if 0 <= at < len(args) else None)
        return not self._rows_are_whole or bool({0, -2} & set(dims if isinstance(dims, list | tuple) else [dims]))

    def _may_be_a_penalty(self) -> bool:
        """Which `loss_terms` looks at, in the backward pass."""
        return torch.is_grad_enabled() and self.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = [each for each in _nested((args, kwargs)) if isinstance(each, Part) and "_table" in vars(each)]
        if not parts:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        read = parts[0]
        if read._refuses(func, args, kwargs):
            raise ShardError(_of_a_part(read._table, func.__name__))
        other = next((part for part in parts if part._cut != read._cut), None)
        try:
            made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, IndexError) as error:  # of shapes that do not fit, as those of the wholes do
            raise ShardError(_of_a_part(read._table, func.__name__)) from error
        if other is not None and isinstance(made, Part):
            raise ShardError(_of_a_part(read._table, f"{func.__name__}, with {other._table!r}, which is cut otherwise"))
        if isinstance(made, Part):
            if _is_of_more(made, args, func.__name__):
                raise ShardError(_of_a_part(read._table, func.__name__))
            is_of_fewer = func.__name__ in _MIXES_COLUMNS and made.shape[:1] != read.shape[:1]
            if (made.dim() == 0 or is_of_fewer) and not made._may_be_a_penalty():
                raise ShardError(_of_a_part(read._table, func.__name__))
            if made.dim() == 0:
                return made.as_subclass(torch.Tensor)
            made._as(read._table, read._cut, read._rows_are_whole, read._is_whole)
        return made


def _is_of_all(index: Any) -> bool:
    """Whether an index is no number of a row or column: all there is, or a mask."""
    if isinstance(index, torch.Tensor):
        return index.dtype is torch.bool and index.dim() == 2
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_of_more(made: torch.Tensor, args: Any, name: str) -> bool:
    """Whether parts were put beside other values, each of them to each of these."""
    tensors = [each for each in _nested(args) if isinstance(each, torch.Tensor)]
    parts = [each for each in tensors if isinstance(each, Part)]
    if len(tensors) == len(parts) and (len(parts) < 2 or name in _JOINS or all(each._is_whole for each in parts)):
        return False
    return all(_is_less(each.shape, made.shape) for each in parts)


def _is_less(shape: Sequence[int], made: Sequence[int]) -> bool:
    """Whether a shape was broadcast, or joined, to make another."""
    return any(m > n for m, n in zip(reversed(made), [*reversed(shape), *[1] * len(made)], strict=False))


@lru_cache(256)
def _asked_after(code: CodeType) -> Mapping[int, str]:
    """Where an instruction is -> what is asked of what it gives, next to it or by way of a local name: an attribute,
    `_INDEXED`, or the name of the function that is called with it."""
    steps = [*_steps(code)]
    called = _called(steps)
    asked: dict[int, str] = {}
    by_name: dict[str, str] = {}
    are_leaves: set[str] = set()
    for i, (step, after) in enumerate(pairwise(steps)):
        if after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            asked[step.offset] = after.argval
        elif step.opname == "LOAD_ATTR" or "LOAD_FAST" in step.opname:
            taker, above = _taker(steps[i + 1 :])
            if taker is not None and (what := _what_takes(taker, above, called)) is not None:
                asked[step.offset] = what
        if "LOAD_FAST" in step.opname and (what := asked.get(step.offset)) is not None:
            if what in _LEADS_ON:
                by_name[step.argval] = what
            elif what in _OF_LEAVES:
                are_leaves.add(step.argval)
    for step, after in pairwise(steps):
        if after.opname.startswith("STORE_FAST") and after.argval in by_name.keys() - are_leaves:
            asked[step.offset] = by_name[after.argval]
    return asked


_ARE_NO_STEPS = frozenset(("EXTENDED_ARG", "CACHE", "NOP", "KW_NAMES"))
_OF_ONE_NAME = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """Its instructions; those of two local names, which there are since Python 3.13, as two."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, tuple) and len(names := _OF_ONE_NAME.findall(step.opname)) == len(step.argval):
            for i, (opname, name) in enumerate(zip(names, step.argval, strict=True)):
                own = {"opname": opname, "opcode": dis.opmap[opname], "arg": 0, "argval": name}
                yield step._replace(**own, offset=step.offset + i)  # instructions lie at even places
        elif step.opname not in _ARE_NO_STEPS:
            yield step


def _called(steps: Sequence[dis.Instruction]) -> Mapping[int, str]:
    """Where a call is -> the name of what is called."""
    found: dict[int, str] = {}
    for i, step in enumerate(steps):
        if step.argval in _LEADS_ON and step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"):
            taker, _ = _taker(steps[i + 1 :])
            if taker is not None:
                found[taker.offset] = step.argval
    return found


def _what_takes(taker: dis.Instruction, above: int, called: Mapping[int, str]) -> str | None:
    if taker.opname.startswith(("CALL", "PRECALL")):
        return called.get(taker.offset)
    operands = {"BINARY_SUBSCR": 2, "BINARY_SLICE": 3}.get(taker.opname, 2 if taker.argrepr == "[]" else 0)
    if operands:
        return _INDEXED if operands == above else None
    return "@" if taker.argrepr in ("@", "@=") else None


def _taker(steps: Sequence[dis.Instruction]) -> tuple[dis.Instruction | None, int]:
    """The instruction of these that takes what was loaded before them, by itself or in a list, and how much of the
    stack lay from it on; None where it goes another way."""
    depth = 1
    for step in steps:
        if "JUMP" in step.opname:
            break
        above, depth = depth, depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname in ("BUILD_LIST", "BUILD_TUPLE") and step.arg and step.arg >= above:
            depth = 1
        elif depth < 1 or (depth == 1 and above >= depth):
            return step, above
    return None, 0


def _of_a_part(table: str, what: str) -> str:
    return (
        f"{_reader()} reads table {table!r} ({what}) past the model's forward, and has this rank's part of it, not the "
        "whole: full_state_dict(model) gives whole tables, to_unsharded(model) a plain model to evaluate; or look all "
        "rows up, table(torch.arange(num_rows)), on all ranks. What changes rows is right where they are whole, and "
        "of two tables where both are cut alike: row_wise() in the plan; what changes the whole, with replicate()"
    )


class Unread(torch.Tensor):
    """A tensor without values; see the top of the file."""

    _table: str
    _way_out: str

    @staticmethod
    def of(parameter: nn.Parameter, size: tuple[int, ...], table: str, way_out: str) -> Unread:
        """For a table of this size, whose local part is `parameter`.

        Args:
            table: its name.
            way_out: what to do about a read, for the message.
        """
        nothing = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(size)
        made = nothing.requires_grad_(parameter.requires_grad).as_subclass(Unread)
        made._table, made._way_out = table, way_out
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(func, "__self__", None)  # of a getter the attribute's descriptor
        name = getattr(owner, "__name__", "") if func.__name__ == "__get__" else func.__name__
        found = [each for each in _nested((args, kwargs or {})) if isinstance(each, Unread)]
        if name in _THE_SAME and len(found) == 1 and hasattr(found[0], "_table"):
            return found[0]
        if name in _ALLOWED or not found or not hasattr(found[0], "_table"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ShardError(
            f"{_reader()} reads table {found[0]._table!r} ({name}) inside the model's forward: each rank holds only "
            f"its part of a table, and only its own module's lookup may read it. {found[0]._way_out}"
        )


def _nested(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _nested(each)]
    return [value]


def _reader() -> str:
    """Who reads: function, line, and the path of the module whose method it is in."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    ours = ("torch.", "sharders.embedding.unread_weight")
    reader = next((f for f in frames if not f"{f.f_globals.get('__name__')}.".startswith(ours)), frames[0])
    line = f"{reader.f_code.co_name} ({reader.f_code.co_filename}:{reader.f_lineno})"
    inner = frames[frames.index(reader) :]
    module = next((m for m in map(_self_of, inner) if m is not None), None)
    roots = [m for m in map(_self_of, inner) if isinstance(m, DistributedModelParallel)]
    for root in roots[-1:]:
        path = next((path for path, m in root.named_modules() if m is module), "")
        return f"{type(module).__name__} at {path!r}, in {line},"
    return line


def _self_of(frame: FrameType) -> nn.Module | None:
    """The module whose code a frame runs, by whatever name its methods have for it; a hook has the one around it."""
    code, held = frame.f_code, frame.f_locals.get("self")
    if held is None and code.co_argcount:
        held = frame.f_locals.get(code.co_varnames[0])
        if getattr(getattr(type(held), code.co_name, None), "__code__", None) is not code:
            return None
    return held if isinstance(held, nn.Module) else None
