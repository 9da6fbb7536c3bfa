"""What stands for a table's parameter inside the model's forward, where only the lookup may read it.

Outside the forward the parameter of a sharded table is this rank's part of it, for optimizers, loggers and others.
Inside, the model's code means the whole table: it may ask for shape, dtype and device, and gets the whole table's; what
needs values is an error, for it would get one rank's rows and give back one rank's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmp import ShardError
from sharders.embedding.weights.asked_of import reader

ALLOWED = frozenset(
    ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_cuda", "is_cpu", "requires_grad", "is_leaf")
    + ("is_sparse", "is_quantized", "is_floating_point", "is_complex", "size", "dim", "numel", "nelement")
    + ("element_size", "nbytes", "itemsize", "__len__", "get_device", "stride")
)
"""What needs no values."""

THE_SAME = frozenset(("data", "detach"))
"""What tools of torch's keep of every parameter, without a look at values."""


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
        name = name_of(func)
        found = [each for each in nested((args, kwargs or {})) if isinstance(each, Unread)]
        if name in THE_SAME and len(found) == 1 and hasattr(found[0], "_table"):
            return found[0]
        if name in ALLOWED or not found or not hasattr(found[0], "_table"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ShardError(
            f"{reader()} reads table {found[0]._table!r} ({name}) inside the model's forward: each rank holds only "
            f"its part of a table, and only its own module's lookup may read it. {found[0]._way_out}"
        )


def name_of(func: Any) -> str:
    """Of an operation; of a getter that of the attribute's descriptor, of an overload that of all of them."""
    name: str = func.__name__
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name.partition(".")[0]


def nested(value: Any) -> list[Any]:
    """Whatever is no dict, list or tuple, in these at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in nested(each)]
    return [value]
