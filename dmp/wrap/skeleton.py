"""Skeletons: the structure of a module on meta, from which a module that was sharded in place can be copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import as_chunks


def skeleton_of(module: nn.Module, sharded: list[nn.Module]) -> nn.Module:
    """The same structure on meta; modules in `sharded` are not copied.

    What `copy.deepcopy` would give, but most of what a module's attributes hold are numbers, for which that is slow.
    """
    memo: dict[int, Any] = {id(m): m for m in sharded}
    owned = {id(m) for s in sharded for m in s.modules()}
    copied = [m for m in module.modules() if id(m) not in owned]
    memo.update({id(m): type(m).__new__(type(m)) for m in copied})
    for each in copied:
        for tensor in [*each._parameters.values(), *each._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor)
    for each in copied:
        memo[id(each)].__dict__.update({name: _copied(value, memo) for name, value in each.__dict__.items()})
    made: nn.Module = memo[id(module)]
    return made


_SHARED = (int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, FunctionType)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if value is None or isinstance(value, _SHARED):
        return value
    if type(value) is dict and all(v is None or id(v) in memo for v in value.values()):  # of modules, of parameters
        return {key: None if v is None else memo[id(v)] for key, v in value.items()}
    if type(value) in (OrderedDict, set) and not value:
        return type(value)()
    return copy.deepcopy(value, memo)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return copy.deepcopy(tensor)
    empty = torch.empty_like(tensor.detach(), device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def copy_values(old: nn.Module, new: nn.Module, device: torch.device) -> None:
    """Values, flags and modes of `old` into a copy of its structure that is still on meta."""
    made: dict[int, torch.Tensor] = {}
    for name, module in new.named_modules():
        source = old.get_submodule(name)
        module.training = source.training
        for kind in ("_parameters", "_buffers"):
            own = getattr(module, kind)
            for key in [key for key, tensor in own.items() if tensor is not None and tensor.is_meta]:
                meta, live = own[key], getattr(source, kind)[key]
                if id(meta) not in made:
                    value = torch.empty_like(meta.detach(), device=device)
                    as_chunks(value).fill_from(as_chunks(live))
                    is_parameter = isinstance(meta, nn.Parameter)
                    made[id(meta)] = nn.Parameter(value, requires_grad=live.requires_grad) if is_parameter else value
                own[key] = made[id(meta)]


def put_back(module: nn.Module) -> None:
    """Pieces in place of whole weights after a forward that has failed, for an optimizer made then, and the next one.

    What FSDP2 has accumulated without exchanging it (`set_requires_gradient_sync(False)`) is lost with that forward.
    """
    if hasattr(type(module), "reset_iter_state"):
        module.reset_iter_state()  # type: ignore[operator]


def all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name they have."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
