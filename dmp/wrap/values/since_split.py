"""What has become of a model since it was split in place: its *skeleton* is of before, and copies are made from that.

An attribute that was set (a temperature, an activation function), an object that was written to (a config), a buffer
that a first forward has registered, a module without weights in the place of another, a hook: copies have them too.
What was deleted or removed they do not have.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from dmp.deep_copy import deep_copy
from dmp.names import around

_log = logging.getLogger("dmp")
_TORCHS = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
_FIXED = (int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, type(None))
_CALLED = (FunctionType, BuiltinFunctionType, MethodType)
_HOOKS = tuple(sorted(name for name in _TORCHS if "hook" in name and isinstance(getattr(nn.Module(), name), dict)))
_NONE: frozenset[int] = frozenset()
_SPLITTING = ("torch.distributed.", "dmp.", "sharders.")
"""Where hooks are from that are put on at the first forward, and that a copy gets at its own."""


class SinceSplit:
    """A model as it was when everything had been split in place.

    Args:
        module: the model.
        skeleton: of before.
        owned: paths of sharders' modules, which are copied by themselves.
    """

    def __init__(self, module: nn.Module, skeleton: nn.Module, owned: Iterable[str]) -> None:
        self._owned = frozenset(owned)
        self._modules = {path: m for path, m in module.named_modules(remove_duplicate=False) if self._is_ours(path)}
        before, found = dict(skeleton.named_modules(remove_duplicate=False)), self._modules.items()
        self._then = {path: _own(m) for path, m in found}
        self._sizes = {
            path: {k: copy.deepcopy(v) for k, v in of.items() if _is_fixed(v)} for path, of in self._then.items()
        }
        """What they hold of numbers by name or in a row, in which splits have set some."""
        self._own = {path: frozenset(_own(before[path])) for path in self._modules}
        """Names of the attributes that each module had before."""
        self._hooks = {path: _hooks(before[path]) for path in self._modules}
        """Of those that it had before; what splits it has put on others."""
        self._of_split = {path: _hooks(m) for path, m in found}

    def _is_ours(self, path: str) -> bool:
        return self._owned.isdisjoint(around(path))

    def give(self, live: nn.Module, new: nn.Module) -> None:
        """Do to a copy of the skeleton, of which all has memory, what was done to the model since."""
        now, places = (dict(m.named_modules(remove_duplicate=False)) for m in (live, new))
        known = [path for path, m in self._modules.items() if now.get(path) is m and path in places]
        memo: dict[int, Any] = {id(now[path]): places[path] for path in self._owned if path in now}
        for path in known:
            memo[id(now[path])] = places[path]
            for kind in ("_parameters", "_buffers"):
                to = getattr(places[path], kind)
                memo.update({id(t): to[n] for n, t in getattr(now[path], kind).items() if to.get(n) is not None})
        for path in known:
            self._give_tensors(now[path], places[path], memo)
            children = {name: copy.deepcopy(child, memo) for name, child in now[path]._modules.items()}
            places[path]._modules.clear()
            places[path]._modules.update(children)
            self._give_attributes(path, now[path], places[path], memo)
            self._give_hooks(path, now[path], places[path], memo)

    @staticmethod
    def _give_tensors(old: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
        for name, p in old._parameters.items():
            if name not in new._parameters:
                new._parameters[name] = copy.deepcopy(p, memo)
        for name, buffer in old._buffers.items():
            held = new._buffers.get(name)
            if buffer is not None and (held is None or (held.shape, held.dtype) != (buffer.shape, buffer.dtype)):
                memo[id(buffer)] = new._buffers[name] = buffer.detach().clone()
        for name in new._buffers.keys() - old._buffers.keys():
            del new._buffers[name]
        new._non_persistent_buffers_set |= old._non_persistent_buffers_set

    def _give_attributes(self, path: str, old: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
        then, sizes = self._then[path], self._sizes[path]
        for name in self._own[path] - old.__dict__.keys():
            new.__dict__.pop(name, None)
        for name, value in old.__dict__.items():
            if name in _TORCHS or (name in then and name not in self._own[path]):
                continue  # what has been split has hooks and states of its own
            is_computed = isinstance(value, torch.Tensor) and not value.is_leaf
            is_computed |= name in sizes and value is then[name] and _is_fixed(value) and value == sizes[name]
            if is_computed or (isinstance(value, _FIXED + _CALLED) and name in then and value is then[name]):
                continue
            try:
                new.__dict__[name] = deep_copy(value, memo)
            except RuntimeError as error:  # of results that have a graph
                _log.warning("a copy has %r of %s as it was at wrapping: %s", name, type(old).__name__, error)

    def _give_hooks(self, path: str, old: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
        for kind in _HOOKS:
            own, held, known = getattr(old, kind), getattr(new, kind), self._of_split[path].get(kind, _NONE)
            for key in self._hooks[path].get(kind, _NONE) - own.keys():
                held.pop(key, None)
            for key, hook in own.items():
                if key not in known and not str(getattr(hook, "__module__", "")).startswith(_SPLITTING):
                    held[key] = copy.deepcopy(hook, memo)
        new._is_full_backward_hook = old._is_full_backward_hook


def _is_fixed(value: Any) -> bool:
    """Whether it is a dict, list or tuple of numbers and the like, or of such."""
    if type(value) not in (dict, list, tuple):
        return False
    items = value.values() if type(value) is dict else value
    return bool(value) and all(isinstance(each, _FIXED) or _is_fixed(each) for each in items)


def _own(module: nn.Module) -> dict[str, Any]:
    """Its attributes, without those that every module has: models of many modules would keep some kilobytes of each."""
    return {name: value for name, value in module.__dict__.items() if name not in _TORCHS}


def _hooks(module: nn.Module) -> dict[str, frozenset[int]]:
    """Kind -> keys, where there are any."""
    return {kind: frozenset(held) for kind in _HOOKS if (held := getattr(module, kind))}
