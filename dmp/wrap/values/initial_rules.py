"""Which calls give the tensors of a model their initial values, found without changing anything; and what they give.

Terms. A *rule* is a call that sets tensors of one module or below it: a method of the module (`reset_parameters`, ...),
or the model's `_init_weights(module)`, that of the nearest model around the module. A rule *reaches* below where it
sets a child's tensors: `nn.Transformer`'s Xavier values, the factors of Hugging Face's T5.

[Note: order] Rules run in the order in which a model that is built really would run them: children before parents,
all methods first, then all `_init_weights`. So what a parent does wins. The reach of a rule is found by running it on a
*skeleton*, the model's structure on meta, and watching what is written. What code of `__init__` does to parameters
cannot be run again: that is said in a warning where it can be seen.

Each rule starts from random numbers made of (seed, its kind, its path), and runs for the tensors of one module, or of
all modules that it reaches when they are small together; which, the model alone decides. So values depend on (name,
seed) alone.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from dmp.errors import ShardError
from dmp.names import around, join_name
from dmp.places import Place, places_of
from dmp.wrap.values.skeleton import skeleton_of

TOGETHER_ELEMENTS = 1 << 26  # of modules that are filled in one run of the rules that they share
_RESETS = ("reset_parameters", "_reset_parameters")  # torch's MultiheadAttention and Transformer have the second
_BY_MODEL = "_init_weights"
_METHODS = (*_RESETS, "init_weights", "initialize_weights", "_initialize_weights", "init_parameters")
_IN_PLACE = frozenset(n for n in dir(nn.init) if n.endswith("_") and n[0] != "_") | {
    *("fill_", "zero_", "copy_", "mul_", "div_", "add_", "random_", "exponential_", "apply"),
}


@dataclass(frozen=True)
class Rule:
    """One call, on the skeleton.

    Args:
        order: where it comes among all.
        path: of the module that it sets.
        is_own: a method of the module.
        text: for messages.
        reached: ids of the skeleton's tensors below the module that it sets; None when that is not known.
    """

    order: int
    path: str
    is_own: bool
    text: str
    call: Callable[[], Any]
    reached: frozenset[int] | None


class Rules:
    """The rules of a model.

    Args:
        root: the model before anything is sharded.
        leave: paths of modules whose own methods are of no interest beyond those of leaves, with all below.
    """

    def __init__(self, root: nn.Module, leave: Collection[str] = ()) -> None:
        self._root = skeleton_of(root, [])
        self._modules = dict(self._root.named_modules())
        self._on_meta = {
            path: [name for name, t in _own(module).items() if t.is_meta and not is_lazy(t)]
            for path, module in root.named_modules()
        }
        self._places: dict[int, list[Place]] = {}  # which keep the tensors alive, so that they can be told by id
        self._held: dict[int, list[Place]] = {}  # by the module that holds them
        for place in places_of(self._modules.items()):
            self._places.setdefault(id(place.tensor), []).append(place)
            self._held.setdefault(id(place.owner), []).append(place)
        self._rules: dict[str, list[Rule]] = {}
        left = frozenset(leave)
        for order, (path, module, name, owner) in enumerate(_calls(self._root)):
            is_left = not left.isdisjoint(around(path))
            if name == _BY_MODEL or not is_left or next(module.children(), None) is None:
                self._rules.setdefault(path, []).append(self._rule(order, path, module, name, owner))
        self._above: dict[str, list[Rule]] = {}  # of each path that was asked for
        self._groups: dict[tuple[int, ...], list[str]] = {}
        for path, names in self._on_meta.items():
            if names:
                self._groups.setdefault(self._shared(path), []).append(path)
        self._made: dict[tuple[str, str], torch.Tensor] = {}

    def _rule(self, order: int, path: str, module: nn.Module, name: str, owner: nn.Module) -> Rule:
        given = "" if owner is module and name != _BY_MODEL else type(module).__name__
        call = partial(getattr(owner, name), *[module] * (name == _BY_MODEL))
        is_leaf = next(module.children(), None) is None
        reached = frozenset() if is_leaf else self._reach(call, module)
        return Rule(order, path, name != _BY_MODEL, f"{type(owner).__name__}.{name}({given})", call, reached)

    def of(self, path: str) -> list[Rule]:
        """Every rule for the module's own tensors, in order."""
        return sorted([*self._rules.get(path, ()), *self.from_above(path)], key=lambda rule: rule.order)

    def from_above(self, path: str) -> list[Rule]:
        """Those of them that are a parent's."""
        if path not in self._above:
            mine = {id(t) for t in _own(self._modules[path]).values()}
            rules = (rule for outer in around(path)[1:] for rule in self._rules.get(outer, ()))
            self._above[path] = [rule for rule in rules if rule.reached is None or rule.reached & mine]
        return self._above[path]

    def reach_into(self, site: str, path: str) -> bool:
        """Whether a rule from beyond the module at `site` sets tensors of the one at `path` in it."""
        return any(not r.is_own or len(r.path) < len(site) for r in self.of(path))

    def value(self, path: str, name: str, seed: int) -> torch.Tensor:
        """A whole tensor on the CPU, which the module has on meta; those made with it wait to be asked for.

        Raises:
            ShardError: nothing gives it values, or a rule cannot be followed.
        """
        if (path, name) not in self._made:
            self._made.update(self._run(self._together(path), seed))
        return self._made.pop((path, name))

    def fill(self, path: str, name: str, values: torch.Tensor) -> None:
        """Run the rules of a module on `values` in the place of one of its tensors, from the present random state."""
        old, rules = _own(self._modules[path])[name], self.of(path)
        self._put(old, nn.Parameter(values, requires_grad=False) if isinstance(old, nn.Parameter) else values)
        try:
            for rule in rules:
                _follow(rule, path)
        finally:
            self._put_back([old], rules)

    def _shared(self, path: str) -> tuple[int, ...]:
        return tuple(sorted(rule.order for rule in self.from_above(path)))

    def _together(self, path: str) -> list[str]:
        """The modules whose tensors are filled in one run with this one's."""
        shared = self._shared(path)
        if not shared:
            return [path]
        others = self._groups[shared]
        size = sum(t.numel() for p in others for _, t in self._own_on_meta(p))
        if size <= TOGETHER_ELEMENTS:
            return others
        for rule in self.from_above(path):
            if rule.reached is None:
                raise ShardError(
                    f"module {rule.path!r} is on meta, and its {rule.text} looks at values of all that is below, "
                    f"{size:,} elements: too many to hold whole; build it on a real device, or pass "
                    "init_parameters=False and load values"
                )
        return [path]

    def _run(self, paths: list[str], seed: int) -> dict[tuple[str, str], torch.Tensor]:
        rules = {rule.order: rule for path in paths for rule in self.of(path)}
        olds = [t for path in paths for _, t in self._own_on_meta(path)]
        alone = paths[0] if len(paths) == 1 else ""
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for old in olds:
                    self._put(old, _unset(old))
                for _, rule in sorted(rules.items()):
                    set_seed(seed, rule.path, rule.text, alone)
                    _follow(rule, paths[0])
            made = {(p, n): _own(self._modules[p])[n].detach() for p in paths for n in self._on_meta[p]}
        finally:
            self._put_back(olds, rules.values())
        left = [place for place, value in made.items() if bool(_is_unset(value).any())]
        if left:
            path = left[0][0]
            raise ShardError(
                f"module {path!r} ({type(self._modules[path]).__name__}) is on meta, and nothing gave "
                f"{[name for p, name in left if p == path]} values: neither a reset_parameters(), its own or a "
                "parent's, nor the model's _init_weights(module); give it one of these"
            )
        return made

    def _own_on_meta(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        own = _own(self._modules[path])
        return ((name, own[name]) for name in self._on_meta[path])

    def _put(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """`new` in every place of the skeleton's `old`."""
        for place in self._places[id(old)]:
            place.store[place.name] = new

    def _put_back(self, olds: Iterable[torch.Tensor], rules: Iterable[Rule]) -> None:
        """The skeleton as it was: a rule may have set others than it was followed for, by new tensors too."""
        for old in olds:
            self._put(old, old)
        for path in {rule.path for rule in rules}:
            for module in self._modules[path].modules():
                for place in self._held.get(id(module), ()):
                    place.store[place.name] = place.tensor

    def _reach(self, call: Callable[[], Any], module: nn.Module) -> frozenset[int] | None:
        """Storages of the tensors below that the call writes, or puts others in place of."""
        below = [(m, n, t) for m in module.modules() for n, t in _own(m).items()]
        before = {id(t): _storage(t) for _, _, t in below}
        watch = _Writes()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), watch:
                call()
        except Exception:  # it looks at values: it has to be run on all that there is below
            return None
        reached = {id(t) for _, _, t in below if before[id(t)] in watch.storages}
        for m, n, t in below:
            if _own(m).get(n) is not t or _storage(t) != before[id(t)]:  # another was put there, or its data was
                self._put(t, t)
                reached.add(id(t))
        return frozenset(reached)


class _Writes(TorchDispatchMode):
    """Notes the storages that operations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for each in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(each, torch.Tensor):
                        self.storages.add(_storage(each))
        return func(*args, **kwargs)


def _follow(rule: Rule, path: str) -> None:
    try:
        rule.call()
    except Exception as error:
        raise ShardError(
            f"{rule.text} of module {rule.path!r}, which gives {path!r} its values, cannot be followed on meta: "
            f"{type(error).__name__}: {error}; build the model on a real device, or pass init_parameters=False and "
            "load values"
        ) from error


def set_seed(seed: int, *names: Any) -> None:
    """The CPU's generator from (seed, names); torch.manual_seed would set those of the devices too."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))


def _calls(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(path, module, method, whose method) of every rule, see [Note: order]."""
    seen: set[int] = set()
    found: list[tuple[str, nn.Module, nn.Module | None]] = []
    known: dict[FunctionType, bool] = {}

    def walk(path: str, module: nn.Module, model: nn.Module | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        model = module if model_init(module) is not None else model
        for name, child in module.named_children():
            walk(join_name(path, name), child, model)
        found.append((path, module, model))

    walk("", root, None)
    for path, module, model in found:
        name = _method(module, _RESETS if model is not None else _METHODS, known)
        if name is not None:
            yield path, module, name, module
    for path, module, model in found:
        if model is not None:
            yield path, module, _BY_MODEL, model


def _method(module: nn.Module, names: tuple[str, ...], known: dict[FunctionType, bool]) -> str | None:
    """The first of these that a module has and that needs no arguments.

    Args:
        known: function -> whether it needs none, which grows: a class has as many modules as there are tables.
    """
    for name in names:
        method = getattr(module, name, None)
        if inspect.ismethod(method) and _needs_nothing(method, known):
            return name
    return None


def _needs_nothing(method: MethodType, known: dict[FunctionType, bool]) -> bool:
    function = method.__func__
    if isinstance(function, FunctionType) and function in known:
        return known[function]
    try:
        inspect.signature(method).bind()
        found = True
    except (TypeError, ValueError):
        found = False
    if isinstance(function, FunctionType):
        known[function] = found
    return found


def model_init(root: nn.Module | None) -> Callable[[nn.Module], Any] | None:
    """The model's `_init_weights`, where it is one that takes a module."""
    found = getattr(root, _BY_MODEL, None)
    if not callable(found):
        return None
    try:
        inspect.signature(found).bind(root)
    except (TypeError, ValueError):
        return None
    return found  # type: ignore[no-any-return]


def warn_of_constructors(root: nn.Module, log: logging.Logger) -> None:
    """Say which classes set parameters in `__init__`, which nothing can run again for those on meta."""
    named: dict[str, set[str]] = {}
    known: dict[FunctionType, bool] = {}
    for path, module in root.named_modules():
        kind = type(module)
        if kind.__module__.split(".")[0] in ("torch", "torchrec", "transformers", "fbgemm_gpu"):
            continue
        if not any(t.is_meta for t in [*module.parameters(), *module.buffers()]) or _method(module, _METHODS, known):
            continue
        code = getattr(kind.__init__, "__code__", None)
        names = set(code.co_names) & _IN_PLACE if code is not None else set()
        names -= {"apply"} if model_init(module) is not None else set()
        if names:
            named.setdefault(f"{kind.__name__}.__init__ calls {', '.join(sorted(names))}", set()).add(path)
    for what, paths in named.items():
        log.warning(
            "%s (module %s): for parameters on meta this is not done again; they get what reset_parameters() of each "
            "module gives. Put it into a reset_parameters() of that class, which is called",
            what,
            ", ".join(repr(p) for p in sorted(paths)[:3]),
        )


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in both if tensor is not None}


def _storage(tensor: torch.Tensor) -> int:
    # Private: on meta no storage has an address, and views must be told to be of the same.
    return -id(tensor) if is_lazy(tensor) else tensor.untyped_storage()._cdata


def _unset(old: torch.Tensor) -> torch.Tensor:
    """Room for values, so marked that what is left without is seen."""
    mark = torch.nan if old.is_floating_point() or old.is_complex() else _mark(old.dtype)
    values = torch.full(old.shape, mark, dtype=old.dtype, device="cpu")
    return nn.Parameter(values, requires_grad=False) if isinstance(old, nn.Parameter) else values


def _is_unset(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    mark = _mark(tensor.dtype)
    return tensor == mark if mark else torch.zeros((), dtype=torch.bool)


def _mark(dtype: torch.dtype) -> int:
    """A number that no index or count begins with; 0 where there is none."""
    return torch.iinfo(dtype).min if dtype.is_signed and dtype != torch.bool else 0
