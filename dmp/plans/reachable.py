"""The Python code that a model's forward may come to, found without running it.

[Note: reachable] From the `forward` of every module, its hooks and what it holds, code is followed by name: an
attribute's name leads to every method and property of that name in any of the model's classes, a global name to the
function, class or module that it is. That is more than what runs, never less but for what Python makes up at run time
(`exec`, `eval`, names computed), and for what `nn.Module` has already (an overridden `to` or `state_dict` is not
looked into). Torch's own code, TorchRec's and the standard library's are not followed: they read no
parameter of a module that they are not given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_FOREIGN = frozenset({"torch", "torchrec", "fbgemm_gpu", "numpy", "dmp", "sharders", *sys.stdlib_module_names})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_BY_ITSELF = ("__init__", "__post_init__", "__call__", "__enter__", "__exit__", "forward")
"""Methods that run without their name being written, of classes that are no modules."""


@dataclass(frozen=True)
class Code:
    """Some function's code.

    Args:
        code: it.
        names: of the module that it was written in.
        selves: what its first argument may be; None where nobody can say.
        first: name of the first argument of the function, for code inside a function that of the outer one.
        closed: what names of an outer function stand for.
    """

    code: CodeType
    names: Mapping[str, Any]
    selves: tuple[nn.Module, ...] | None
    first: str
    closed: Mapping[str, Any]

    @property
    def title(self) -> str:
        """For messages."""
        return f"{getattr(self.code, 'co_qualname', self.code.co_name)} in {self.names.get('__name__')}"


def is_foreign(module_name: str | None) -> bool:
    """Whether code of that Python module is not followed."""
    return (module_name or "").partition(".")[0] in _FOREIGN and module_name != "__main__"


def reachable(modules: list[nn.Module], others: list[nn.Module]) -> list[Code]:
    """What the forward of any of these modules may come to, see [Note: reachable].

    Args:
        others: modules whose forward is not looked at, only what code of these `modules` asks them for.
    """
    return _Walk(modules, others).run()


class _Walk:
    def __init__(self, modules: list[nn.Module], others: list[nn.Module]) -> None:
        self.modules, self.everything = modules, [*modules, *others]
        self.by_class: dict[type, list[nn.Module]] = {}
        for module in self.everything:
            for cls in type(module).__mro__:
                if not is_foreign(cls.__module__):
                    self.by_class.setdefault(cls, []).append(module)
        self.named: dict[str, list[tuple[Any, Any]]] = {}
        for cls in self.by_class:
            for name, value in vars(cls).items():
                if callable(value) or hasattr(value, "__get__"):
                    self.named.setdefault(name, []).append((value, cls))
        self.seen: set[tuple[int, int]] = set()
        self.found: list[Code] = []
        self.followed: set[str] = set()
        self.classes: set[type] = set()

    def run(self) -> list[Code]:
        """All of it."""
        for module_type in dict.fromkeys(map(type, self.modules)):
            for name in ("forward", "__call__", "__getattr__", "__getattribute__"):
                self._method(name, module_type)
        for module in self.everything:
            for kind in _HOOKS:
                for hook in vars(module)[kind].values():
                    self._function(hook, (module,))
        for module in self.modules:
            for value in vars(module).values():
                self._held(value, module)
        at = 0
        while at < len(self.found):
            self._follow(self.found[at])
            at += 1
        return self.found

    def _held(self, value: Any, module: nn.Module) -> None:
        """What lies in a module's attributes: functions, methods, and objects that are no modules."""
        for each in _items(value):
            if isinstance(each, FunctionType | MethodType | functools.partial):
                self._function(each, (module,))
            elif callable(each) and not isinstance(each, nn.Module | type) and not is_foreign(type(each).__module__):
                self._class(type(each))  # such as a loss or a sampler that was given a table

    def _follow(self, code: Code) -> None:
        for name in code.code.co_names:
            self._attribute(name)
            value = code.names.get(name)
            if isinstance(value, ModuleType) and not is_foreign(value.__name__):
                for attribute in code.code.co_names:
                    self._global(vars(value).get(attribute))
            else:
                self._global(value)
        for constant in code.code.co_consts:
            if isinstance(constant, CodeType):
                self._add(Code(constant, code.names, code.selves, code.first, code.closed))

    def _global(self, value: Any) -> None:
        if value is None or is_foreign(getattr(value, "__module__", None)):
            return
        if isinstance(value, type):
            if not issubclass(value, nn.Module):
                self._class(value)
        elif callable(value):
            self._function(value, None)

    def _class(self, cls: type) -> None:
        """A class that is no module: what making and calling one runs, the rest when its name is met."""
        for base in cls.__mro__:
            if base in self.classes or is_foreign(base.__module__):
                continue
            self.classes.add(base)
            for name, value in vars(base).items():
                if name in _BY_ITSELF or name in self.followed:
                    self._function(value, None)
                elif not name.startswith("__"):
                    self.named.setdefault(name, []).append((value, None))

    def _method(self, name: str, module_type: type) -> None:
        """A method of a module and those that it overrides, which it may call."""
        for cls in module_type.__mro__:
            if name in vars(cls) and cls in self.by_class:
                self._function(vars(cls)[name], tuple(self.by_class[cls]))

    def _attribute(self, name: str) -> None:
        if name not in self.followed and not hasattr(nn.Module, name):
            self.followed.add(name)
            for value, cls in self.named.get(name, ()):
                is_bound = cls is not None and not isinstance(value, staticmethod)
                self._function(value, tuple(self.by_class[cls]) if is_bound else None)

    def _function(self, value: Any, selves: tuple[nn.Module, ...] | None) -> None:
        for function in _functions(value, 0):
            code = function.__code__
            first = code.co_varnames[0] if code.co_argcount else ""
            self._add(Code(code, function.__globals__, selves, first, closed_over(function)))

    def _add(self, code: Code) -> None:
        key = (id(code.code), id(code.selves and code.selves[0]))
        if key not in self.seen:
            self.seen.add(key)
            self.found.append(code)


def _items(value: Any) -> Iterator[Any]:
    """A value, or what a plain container holds."""
    if type(value) in (list, tuple):
        yield from value
    elif type(value) is dict:
        yield from value.values()
    else:
        yield value


def _functions(value: Any, depth: int) -> Iterator[FunctionType]:
    """The plain functions in a function, method, property or decorated one."""
    if depth > 8:
        return
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        if not is_foreign(value.__module__) or value.__closure__:
            yield value
        inner = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inner = [each for each in inner if isinstance(each, FunctionType | MethodType | functools.partial)]
        inner.append(getattr(value, "__wrapped__", None))
    elif isinstance(value, MethodType | staticmethod | classmethod):
        inner = [value.__func__]
    elif isinstance(value, functools.partial | functools.cached_property):
        inner = [value.func]
    elif isinstance(value, property):
        inner = [value.fget]
    for each in inner:
        if each is not None:
            yield from _functions(each, depth + 1)


def closed_over(function: FunctionType) -> dict[str, Any]:
    """Names of an outer function that a function uses, and what they stand for."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
