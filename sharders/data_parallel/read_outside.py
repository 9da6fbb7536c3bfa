"""Methods that read a weight past the model's forward, in which FSDP2 gathers it: `model.encode_image(images)`.

Models read their own parameters there (positions, class tokens, projections), find pieces, and torch refuses the piece
beside a plain tensor. Without gradients such an operation is given the whole of the piece, which all ranks gather as
they run the method, and so is what makes a number of Python's. With gradients these would be of this rank's samples
alone: that is an error that says what to do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dmp import ShardError, is_dtensor, ranks
from sharders.data_parallel.fsdp_units import is_idle
from sharders.data_parallel.past_hooks import MIXED

_VALUES = frozenset(
    ("item", "tolist", "numpy", "__array__", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)
"""What makes values of Python's, see dmp/state/numbers.py."""

_REFUSED = (MIXED, "Cannot set version_counter for inference tensor")
"""What torch says of a piece beside a plain tensor, and of a view of a piece in inference mode."""

_ADVICE = (
    "call the wrapped model; or call it under torch.no_grad(); or, of a method of the model that calls it, on all "
    "ranks, tell FSDP2 once after wrapping: "
    "torch.distributed.fsdp.register_fsdp_forward_method(model.module, 'name_of_the_method')"
)


def read_outside(root: Any, before_forward: Callable[[], None]) -> None:
    """Have methods that read a weight past the root's forward compute with the whole of it; collective, where they do.

    Args:
        root: after `fully_shard`.
        before_forward: what is done before each forward of the root.
    """
    meshes = {p.device_mesh for p in root.parameters() if is_dtensor(p)}

    def wrapped(own: Callable[..., Any], path: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not is_idle(root):
                return own(*args, **kwargs)
            if not torch.is_grad_enabled() or hasattr(own, "__wrapped__"):  # a decorator may be torch.no_grad()
                before_forward()
            with _Whole(meshes, f"{own.__name__}() of {path or type(root).__name__!r}"):
                return own(*args, **kwargs)

        return method

    for path, module in root.named_modules():
        for name in _readers(cast("Any", type(module)), frozenset(_split_in(module))):
            setattr(module, name, wrapped(getattr(module, name), path))


_LISTS = (nn.ParameterList, nn.ParameterDict)


def _split_in(module: nn.Module) -> Iterator[frozenset[str]]:
    """Names that code reads for a piece: its own; of a module that it holds, that one's and the weight's (as
    `self.relations.weight`); of a list of weights, the list's."""
    yield from (frozenset((name,)) for name, p in module._parameters.items() if is_dtensor(p))
    for child, held in module._modules.items():
        split = [name for name, p in held._parameters.items() if is_dtensor(p)] if held is not None else []
        yield from (frozenset((child,) if isinstance(held, _LISTS) else (child, name)) for name in split)


class _Whole(TorchFunctionMode):
    """Gives operations the whole of a piece where torch refuses the piece; what writes to one is left to it."""

    def __init__(self, meshes: Container[Any], method: str) -> None:
        super().__init__()
        self.meshes, self.method = meshes, method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _VALUES:
            args = tree_map(self._whole, args)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(each in str(error) for each in _REFUSED):
                raise
            if torch.is_grad_enabled():
                raise ShardError(
                    f"{self.method} reads a weight past the forward, in which it is gathered: {_ADVICE}"
                ) from error
            name = func.__name__
            written = int(name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))
            rest, named = tree_map(self._whole, (args[written:], kwargs))
            return func(*args[:written], *rest, **named)

    def _whole(self, value: Any) -> Any:
        """Ranks say first that they gather: torch's exchange would meet another's of one that runs no such method."""
        if not is_dtensor(value) or value.device_mesh not in self.meshes:
            return value
        for dim, placement in enumerate(value.placements):
            if not placement.is_replicate():
                what = f"{self.method}, which gathers what it reads from all ranks"
                ranks.gather_words(what, [0, 0], value.device_mesh.get_group(dim))
        return value.full_tensor()


@functools.cache
def _readers(kind: Any, split: frozenset[frozenset[str]]) -> tuple[str, ...]:
    """Methods of a class that is not torch's own, beside `forward`, whose code reads one of these, see `_split_in`, or
    calls a `forward` that does."""
    own = [of for of in kind.__mro__[: kind.__mro__.index(nn.Module)] if not of.__module__.startswith("torch.")]
    every = {name: value for of in reversed(own) for name, value in vars(of).items() if not name.startswith("__")}
    functions = {name: inspect.unwrap(value) for name, value in every.items() if isinstance(value, FunctionType)}
    forward = functions.pop("forward", None)
    if forward is not None and any(names <= _read(forward.__code__) for names in split):
        split |= {frozenset(("forward",))}
    read = {name: _read(function.__code__) for name, function in functions.items()}
    return tuple(name for name, names in read.items() if any(each <= names for each in split))


def _read(code: CodeType) -> set[str]:
    """Names of attributes that code reads, and code within it."""
    inside = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_read, inside))
