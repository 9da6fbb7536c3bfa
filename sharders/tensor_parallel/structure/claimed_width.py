"""Attentions that read their width from what they are called with, and not from an attribute.

[Note: claimed width] `B, T, C = x.shape`, and then `view(B, T, heads, C // heads)` and `view(B, T, C)`: such code joins
a rank's heads where the width that it reads is theirs together. So the input says so. It is handed on as a tensor whose
last size, where Python code asks for it (`shape`, `size()`), is the rank's part; whatever is computed gets the tensor
itself, of all features, and gives plain tensors. What else an attention does with the width that it reads (a scale, new
zeros) is wrong then or right, and shapes do not tell: it is taken only where it is proved.

Compiled code holds such a tensor for one that is as wide as it says (torch 2.13: a guard that fails at once), so that
these attentions are called between compiled graphs.

Which input it is does not depend on sizes: the first that `forward` names, wherever else it is passed too, as where
query, key and value are one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from dmp import is_dtensor, map_nested
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.sources import source_of
from sharders.unheard import made_of

_WIDTH = ".shape[-1]"


def width_read_by(module: nn.Module) -> str | None:
    """What stands for the width among the module's numbers, such as `x.shape[-1]`; None where, by the source of its
    class, it is not read."""
    kind: Any = type(module)
    try:
        first = next(iter(inspect.signature(module.forward).parameters), None)
    except (TypeError, ValueError):  # of what has no signature nobody knows
        return None
    return first + _WIDTH if first is not None and _is_read(kind, first) else None


@cache
def _is_read(kind: Any, name: str) -> bool:
    """Whether methods of a class read sizes of what is called so, beside the first two; also without a source."""
    source = source_of(kind)
    if source is None:
        return True
    sizes = rf"\b{re.escape(name)}\.(?:shape\b|size\(\))"
    others = rf"\b_\s*=\s*{sizes}(?!\[)|{sizes}\[(?:0|1|:-1|:2)\]|\b{re.escape(name)}\.size\((?:dim=)?[01]\)"
    return re.search(rf"\b{re.escape(name)}\.(?:shape|size)\b", re.sub(others, "", source)) is not None


def is_width(name: str) -> bool:
    """Whether a number's name stands for a width that is read from an input."""
    return name.endswith(_WIDTH)


def claim_width(module: nn.Module, name: str, width: int) -> None:
    """Have the input of a module claim a width, see [Note: claimed width]. The Linears inside get it as it is.

    Args:
        name: what stands for it.
    """
    for inner in module.modules():
        if features_of(inner) is not None:
            inner.register_forward_pre_hook(_take_whole, prepend=True)
    kind: Any = type(module)
    module.__class__ = _called_uncompiled(kind)
    module.register_forward_pre_hook(partial(_claim, width, name.removesuffix(_WIDTH)), with_kwargs=True)
    module.register_forward_hook(_give_whole)


def whole_of(x: Any) -> Any:
    """The tensor itself, of one that claims a width; anything else as it is."""
    return x.whole if isinstance(x, Claiming) else x


class Claiming(torch.Tensor):
    """A tensor that claims another width; what is computed of it is what is computed of the tensor itself."""

    width: int
    """Of its last dim, as it says; of all that are of one class."""

    whole: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_nested((args, dict(kwargs or {})), lambda x, _: whole_of(x))
        result = func(*args, **kwargs)
        if func == _SHAPE:  # made anew each time that it is asked for
            return torch.Size((*result[:-1], cls.width))
        if func is torch.Tensor.size:
            if isinstance(result, torch.Size):
                return torch.Size((*result[:-1], cls.width))
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return cls.width if dim in (-1, args[0].dim() - 1) else result
        return result


_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


@cache
def _claiming(width: int) -> Any:
    return type(Claiming.__name__, (Claiming,), {"width": width, "__module__": __name__})


@cache
def _called_uncompiled(kind: Any) -> Any:
    """The subclass of `kind` that does not become part of a compiled graph; named as `kind`, for code that asks."""
    return made_of(kind, {"__call__": _disable_dynamo(kind.__call__)})


def _claim(
    width: int, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    x: Any = args[0] if args else kwargs.get(name)
    if type(x) not in (torch.Tensor, nn.Parameter) and not is_dtensor(x):
        return None
    claimed = (x.to_local() if is_dtensor(x) else x).as_subclass(_claiming(width))
    claimed.whole = x
    given = tuple(claimed if value is x else value for value in args)
    return given, {key: claimed if value is x else value for key, value in kwargs.items()}


def _take_whole(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(whole_of, args))


def _give_whole(_: nn.Module, args: Any, output: Any) -> Any:
    held = output if isinstance(output, tuple | list) else output.values() if isinstance(output, dict) else (output,)
    return map_nested(output, lambda x, _: whole_of(x)) if any(isinstance(x, Claiming) for x in held) else None
