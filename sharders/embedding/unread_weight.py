"""What stands for a table's parameter inside the model's forward, where only the lookup may read it.

Outside the forward the parameter of a sharded table is this rank's part of it, for optimizers, loggers and others.
Inside, the model's code means the whole table: it may ask for shape, dtype and device, and gets the whole table's; what
needs values is an error, for it would get one rank's rows and give back one rank's gradient.
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
