"""Skeletons: the structure of a module on meta, from which a module that was sharded in place can be copied."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import as_chunks
from dmp.deep_copy import deep_copy
from dmp.places import Place, places_of, replace_tensors, room_for
from dmp.plans.kept_places import kept_beside
from dmp.wrap.values.gathered import chunks_shown


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
                memo[id(tensor)] = copy.deepcopy(tensor) if is_lazy(tensor) else room_for(tensor, "meta")
    memo.update((id(tensor), room_for(tensor, "meta")) for tensor in computed(copied))
    for is_first in (True, False):  # a graph that torch has traced of one looks for what the others hold
        for each in copied:
            values = ((k, v) for k, v in each.__dict__.items() if (k in _HELD) is is_first)
            memo[id(each)].__dict__.update({k: v if type(v) in _ATOMS else _copied(v, memo) for k, v in values})
    made: nn.Module = memo[id(module)]
    return made


def computed(modules: Iterable[nn.Module], *, in_objects: bool = False) -> Iterator[torch.Tensor]:
    """Results that modules keep as attributes or buffers, which `copy.deepcopy` refuses: attention weights of the last
    batch, a weight that weight norm has computed.

    Args:
        in_objects: those within other objects too, as the mean of a distribution: nobody knows how much hangs on them.
    """
    for module in modules:
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        yield from _computed_in({**own, **module._buffers}, set(), in_objects)


def _computed_in(value: Any, seen: set[int], in_objects: bool) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:  # which may hold itself
        seen.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            if not isinstance(each, _SHARED):
                yield from _computed_in(each, seen, in_objects)
    elif in_objects and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | nn.Module):
        yield from _computed_in(vars(value), seen, in_objects)


def copy_scripted(module: nn.Module, memo: dict[int, Any]) -> None:
    """Tell `memo` the copies of modules that torch.jit has compiled: `copy.deepcopy` gives them results for weights."""
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule):
            with torch.no_grad():
                memo[id(each)] = made = copy.deepcopy(each)
            for old, new in zip(each.parameters(), made.parameters(), strict=True):
                new.requires_grad_(old.requires_grad)


_HELD = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset(vars(nn.Module()))
_ATOMS = frozenset((NoneType, bool, int, float, complex, str, bytes))
_SHARED = (*_ATOMS, type, Enum, torch.dtype, torch.device, torch.Size, FunctionType)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _SHARED):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict and all(v is None or id(v) in memo for v in value.values()):  # of modules, of parameters
        return {key: None if v is None else memo[id(v)] for key, v in value.items()}
    if type(value) in (OrderedDict, set) and not value:
        return type(value)()
    if type(value) is list:
        memo[id(value)] = new = []
        new += [_copied(each, memo) for each in value]
        return new
    if type(value) is partial and not vars(value):
        options = {key: _copied(each, memo) for key, each in value.keywords.items()}
        memo[id(value)] = bound = partial(_copied(value.func, memo), *[_copied(x, memo) for x in value.args], **options)
        return bound
    if _is_copied_by_attributes(type(value)):  # such as the configs of a thousand tables
        memo[id(value)] = made = object.__new__(type(value))
        made.__dict__.update({key: _copied(each, memo) for key, each in vars(value).items()})
        return made
    return deep_copy(value, memo)


_DEEPCOPY_ASKS = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)


def _is_copied_by_attributes(kind: Any) -> bool:
    """Whether `copy.deepcopy` of an object is an object with copies of its attributes, and no more."""
    if not hasattr(kind, "__dataclass_fields__"):
        return False
    is_plain = kind.__new__ is object.__new__ and not any("__slots__" in vars(base) for base in kind.__mro__)
    has_own = any(getattr(kind, name, None) is not getattr(object, name, None) for name in _DEEPCOPY_ASKS)
    return is_plain and not has_own and kind not in copyreg.dispatch_table


def copy_values(old: nn.Module, new: nn.Module, device: torch.device, only: Container[str] | None = None) -> None:
    """Values, flags and modes of `old` into a copy of its structure that is still on meta.

    Args:
        only: names of the tensors that are copied; None: all.
    """
    modules = dict(old.named_modules(remove_duplicate=False))
    for path, module in new.named_modules():
        if path in modules:  # else it has been removed since
            module.training = modules[path].training

    def copied(place: Place) -> torch.Tensor:
        source = modules.get(place.path, nn.Module())
        live: torch.Tensor | None = source._parameters.get(place.name, source._buffers.get(place.name))
        value = room_for(place.tensor, device)
        if live is None:
            return value
        if place.store is place.owner._buffers and (live.size(), live.dtype) != (value.size(), value.dtype):
            return live.detach().to(device, copy=True)  # of a forward: a mask that has grown, a regrouping's indices
        as_chunks(value).fill_from(as_chunks(live))
        return value.requires_grad_(live.requires_grad) if isinstance(value, nn.Parameter) else value

    on_meta = [place for place in places_of(new.named_modules()) if place.tensor.is_meta]
    wanted = [place for place in on_meta if only is None or place.full_name in only]
    with chunks_shown(old):  # what is gathered may be older than these
        replace_tensors(wanted, copied, kept_beside(new))


def put_back(module: nn.Module) -> None:
    """Pieces in place of whole weights after a forward that has failed, for an optimizer made then, and the next one.

    What FSDP2 has accumulated without exchanging it (`set_requires_gradient_sync(False)`) is lost with that forward.
    """
    if hasattr(type(module), "reset_iter_state"):
        with suppress(AttributeError):  # what torch has not made yet: the first forward has not come so far
            module.reset_iter_state()  # type: ignore[operator]


def all_tensors(module: nn.Module, *, remove_duplicate: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under every name they have or under the first."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)
