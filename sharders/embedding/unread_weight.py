"""What stands for a table's parameter inside the model's forward, where only the lookup may read it.

Outside the forward the parameter of a sharded table is this rank's part of it, for optimizers, loggers and others.
Inside, the model's code means the whole table: it may ask for shape, dtype and device, and gets the whole table's; what
needs values is an error, for it would get one rank's rows and give back one rank's gradient.

So it does in a method that is called past the forward. With gradients that may be a penalty, see `loss_terms`; without
them, as where all items are scored, a product with the part or a row by its number would have the part's shape, and be
taken for the whole's: a `Part` refuses these, and what makes one number of it. What is done to each element, or to each
row where those are whole, is right.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError

_ALLOWED = frozenset(
    ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_cuda", "is_cpu", "requires_grad", "is_leaf")
    + ("is_sparse", "is_quantized", "is_floating_point", "is_complex", "size", "dim", "numel", "element_size")
    + ("nbytes", "itemsize", "__len__", "get_device", "stride")
)

_THE_SAME = frozenset(("data", "detach"))  # what tools of torch's keep of every parameter, without a look at values


_MIXES_ROWS = frozenset(
    (
        "mm",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "linear",
        "bmm",
        "addmm",
        "einsum",
        "tensordot",
        "baddbmm",
        "mv",
        "inner",
    )
    + ("embedding", "embedding_bag", "index_select", "gather", "take", "__getitem__", "cdist", "cosine_similarity")
)

_MIXES_COLUMNS = frozenset(
    ("normalize", "norm", "vector_norm", "linalg_vector_norm", "sum", "mean", "amax", "max", "softmax", "log_softmax")
    + ("layer_norm", "renorm")
)


class Part(torch.Tensor):
    """This rank's part of a table, read by the model's own code past its forward; see the top of the file."""

    _table: str
    _refuses: frozenset[str]

    @staticmethod
    def of(parameter: nn.Parameter, size: tuple[int, ...], table: str, holder: nn.Module) -> torch.Tensor:
        """For who reads it now: the parameter itself, but for a method of the model around.

        Args:
            size: of the table.
            holder: the module whose parameter it is.
        """
        if tuple(parameter.shape) == size or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return parameter
        reader = sys._getframe(2)
        model, name = _self_of(reader), f"{reader.f_globals.get('__name__')}."
        if (
            model is None
            or name.startswith(("torch.", "dmp.", "sharders."))
            or all(m is not holder for m in model.modules())
        ):
            return parameter
        made = parameter.as_subclass(Part)
        made._table = table
        made._refuses = _MIXES_ROWS if parameter.shape[1:] == size[1:] else _MIXES_ROWS | _MIXES_COLUMNS
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = _nested((args, kwargs or {}))
        read = next((each for each in leaves if isinstance(each, Part) and "_table" in vars(each)), None)
        if read is not None and func.__name__ in read._refuses:
            raise ShardError(_of_a_part(read._table, func.__name__))
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(made, Part) and read is not None:
            if made.dim() == 0 or (func.__name__ in _MIXES_COLUMNS and made.shape[:1] != read.shape[:1]):
                raise ShardError(_of_a_part(read._table, func.__name__))
            made._table, made._refuses = read._table, read._refuses
        return made


def _of_a_part(table: str, what: str) -> str:
    return (
        f"{_reader()} reads table {table!r} ({what}) past the model's forward, and has this rank's part of it, not the "
        "whole: full_state_dict(model) gives whole tables, to_unsharded(model) a plain model to evaluate; or look all "
        "rows up, table(torch.arange(num_rows)), on all ranks"
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
    held = frame.f_locals.get("self")
    return held if isinstance(held, nn.Module) else None
