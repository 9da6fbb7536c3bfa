"""Who holds a module of tables from before wrapping holds the sharded one: a loss, a sampler, a function.

In one process they share its weights with the model. So the module that was replaced hands everything on: a call, an
attribute that is read or set, a walk over its parameters, a copy. What `isinstance` says of it, it says of the sharded
one; `type` alone tells them apart. Its own weights are let go of.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


class _Successor:
    """Methods that hand on to the module in its `__dict__`, which holds nothing else."""

    def __getattribute__(self, name: str) -> Any:
        return getattr(_successor_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_successor_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_successor_of(self), name)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return _successor_of(self)(*inputs, **keywords)

    def __repr__(self) -> str:
        return repr(_successor_of(self))

    def __dir__(self) -> list[str]:
        return dir(_successor_of(self))


def hand_on(original: nn.Module, new: nn.Module) -> None:
    """Have `original` be another name of `new`; from now on, for good."""
    kind: Any = type(original)  # mypy has it that classes cannot be hashed
    cls = _handing_on(kind)
    vars(original).clear()
    vars(original)["new"] = new
    object.__setattr__(original, "__class__", cls)


@cache
def _handing_on(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same memory layout, as Python asks for where an object changes its class: of one base alone."""
    return type(kind.__name__, (kind,), {name: value for name, value in vars(_Successor).items() if callable(value)})


def _successor_of(module: Any) -> nn.Module:
    new: nn.Module = object.__getattribute__(module, "__dict__")["new"]
    return new
