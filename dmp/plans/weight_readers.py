"""Who reads a weight besides the forward of its own module, told from the code that the model's forward comes to.

A weight that is only looked up can be cut into chunks behind its module's forward. One that other code reads
(`x @ self.emb.weight.T`, a loss, a functional tie) would there be this rank's chunk, and its gradient this rank's own.

[Note: reads] A read is an attribute of the weight's name. What it is read from is found where that is a path from a
module (`self.a.b.weight`, also by way of a local name, a loop over a list of modules, an index). Where it is not (an
argument, what a call returned, `getattr`), the read may be of any module that code gets hold of other than by calling
it (`self.emb(ids)`): when in doubt, it is read.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from dmp.plans.kept_places import Kept, kept_in
from dmp.plans.reachable import Code, reachable

_ANY = "[]"
_HANDS_OUT = frozenset(
    ("children", "modules", "named_children", "named_modules", "get_submodule", "_modules", "getattr", "__dict__")
    + ("vars", "attrgetter", "get_input_embeddings", "get_output_embeddings")
)
"""Names by which code gets hold of modules that it does not name."""

_ALL = frozenset(("parameters", "named_parameters"))
"""Names by which code gets all parameters of a module."""

_BY_NAME = frozenset(("getattr", "attrgetter", "get_parameter", "_parameters", "functional_call", "__getattr__"))
"""Names by which code reads an attribute that it has as a string."""

OF_NO_VALUE = frozenset(
    ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_meta", "requires_grad", "is_floating_point")
)
"""What may be asked of a parameter that is elsewhere."""

_HARMLESS = frozenset(("num_embeddings", "embedding_dim", "padding_idx", "training", "mode", "forward"))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Reader:
    """What reads a weight.

    Args:
        who: code, or where something keeps it.
        is_keeper: it keeps the module or the parameter itself, and would not see what takes their place.
    """

    who: str
    is_keeper: bool = False

    @property
    def text(self) -> str:
        """What it does, for messages."""
        if self.is_keeper:
            return f"{self.who} keeps it beside its place in the model, and would go on with the whole, untrained"
        return f"{self.who} reads it besides the forward of its own module"

    @property
    def way_out(self) -> str:
        """How it becomes a table all the same."""
        if self.is_keeper:
            return "Let go of it there before wrapping (del, or None in its place), and it is a table"
        return "A plan entry such as row_wise() makes it a table all the same, and a read an error"


def find_readers(model: nn.Module, sites: Mapping[int, tuple[nn.Module, Iterable[str]]]) -> dict[int, Reader]:
    """Which sites' weights something else may read, and what does.

    Args:
        sites: id of a module -> the module, and the names of its parameters relative to it. Its own forward may read
            them.

    Returns:
        id of those that are read -> by whom, in words.
    """
    watched = _Watched(sites)
    inside = {id(m) for module, _ in sites.values() for m in module.modules()}
    others = [m for m in model.modules() if id(m) not in inside]
    codes = reachable(others, [module for module, _ in sites.values()])
    readers = watched.kept(others, codes)
    unknown = ""
    for code in codes:
        names = code.code.co_names
        if not _ALL.isdisjoint(names) and "next" not in names:  # `next(self.parameters()).device` asks one for no value
            for found in _Reads(code).of_all():
                for site in watched.below(found):
                    readers.setdefault(site, Reader(code.title))
        if watched.names.isdisjoint(names) and watched.names.isdisjoint(_strings(code.code)):
            continue
        reads = _Reads(code)
        for found in reads.of(watched.names):
            for holder in found or ():
                if id(holder) in watched.site_of:
                    readers.setdefault(watched.site_of[id(holder)], Reader(code.title))
            if found is None:
                unknown = unknown or code.title
    if unknown:
        for site in watched.handed_out(model, codes):
            readers.setdefault(site, Reader(f"maybe {unknown}"))
    return readers


class _Watched:
    """The modules that hold a parameter of a site, and its names there."""

    def __init__(self, sites: Mapping[int, tuple[nn.Module, Iterable[str]]]) -> None:
        self.names: set[str] = set()
        self.site_of: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.direct: set[int] = set()
        self.rebound: set[int] = set()
        """Sites that lie in other places too, from which code may get hold of them."""
        for site, (module, relative_names) in sites.items():
            for relative in relative_names:
                path, _, name = relative.rpartition(".")
                self.names.add(name)
                holder = module.get_submodule(path)
                self.site_of[id(holder)] = site
                self.parameters[id(holder._parameters.get(name))] = site
                if not path:
                    self.direct.add(site)

    def below(self, modules: Iterable[nn.Module] | None) -> set[int]:
        """Sites of parameters in any of these modules."""
        if modules is None:
            return set(self.site_of.values())
        return {self.site_of[id(m)] for module in modules for m in module.modules() if id(m) in self.site_of}

    def kept(self, modules: Iterable[nn.Module], codes: Iterable[Code]) -> dict[int, Reader]:
        """Sites of which something keeps the module or a parameter, other than as a submodule."""
        places = list(kept_in(modules))
        for code in codes:
            held = [*code.closed.values(), *(code.names.get(name) for name in code.code.co_names)]
            places += [Kept(code.title, each) for each in held]
        objects = {**{site: site for site in self.direct}, **self.parameters}
        found = [(objects[id(kept.value)], kept) for kept in places if id(kept.value) in objects]
        moved = [site for site, kept in found if kept.put is not None and isinstance(kept.value, nn.Module)]
        self.rebound = set(moved)
        stays = [(site, kept) for site, kept in found if kept.put is None or not isinstance(kept.value, nn.Module)]
        return {site: Reader(kept.where, True) for site, kept in stays}

    def handed_out(self, model: nn.Module, codes: list[Code]) -> Set[int]:
        """Sites that code may get hold of without naming them before their weight."""
        names = {name for code in codes for name in code.code.co_names}
        if not _HANDS_OUT.isdisjoint(names):
            return self.direct
        called_as = _names_of(model, self.direct)
        wanted = {name for of_site in called_as.values() for name in of_site}
        mentioning = [code.code for code in codes if not wanted.isdisjoint(code.code.co_names)]
        escaping = {name for code in mentioning for name in _uncalled(code)}
        return self.rebound | {site for site in self.direct if not escaping.isdisjoint(called_as[site])}


class _Reads:
    """Reads of an attribute in one function's code, see [Note: reads]."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.steps = [s for s in dis.get_instructions(code.code) if s.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]

    def of(self, names: Set[str]) -> list[list[nn.Module] | None]:
        """For each read of an attribute of these names the modules that it may be read from; None: any."""
        reads = [i for i, s in enumerate(self.steps) if _is_attribute(s) and s.argval in names]
        found = [self._value(i - 1, 0) for i in reads if not self._asks_only(i)]
        by_name = not _BY_NAME.isdisjoint(self.code.code.co_names)
        if by_name and not names.isdisjoint(_strings(self.code.code)):
            found.append(None)
        return [_modules(values) for values in found]

    def of_all(self) -> list[list[nn.Module] | None]:
        """For each call of `parameters()` the modules that it may be asked of; None: any."""
        calls = [i for i, s in enumerate(self.steps) if _is_attribute(s) and s.argval in _ALL and _is_called(s)]
        return [_modules(self._value(i - 1, 0)) for i in calls]

    def _asks_only(self, at: int) -> bool:
        """Whether of a parameter only what needs no values is asked: `self.emb.weight.dtype`."""
        after = self.steps[at + 1] if at + 1 < len(self.steps) else None
        return after is not None and _is_attribute(after) and after.argval in OF_NO_VALUE

    def _value(self, last: int, depth: int) -> list[Any] | None:
        """What the expression whose last step is at `last` may be; None where that cannot be told."""
        path: list[str] = []
        at = last
        while at >= 0 and depth < 8:
            step = self.steps[at]
            if self.steps[at + 1].is_jump_target:  # one of several values
                return None
            if _is_attribute(step):
                path.append(step.argval)
                at -= 1
            elif _is_index(step) and at and self.steps[at - 1].opname.startswith("LOAD_"):
                if _is_attribute(self.steps[at - 1]):
                    return None
                path.append(_ANY)
                at -= 2
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
                name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
                return _walk(self._local(name, depth), path[::-1])
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = self.code.names.get(step.argval)
                return None if value is None else _walk([value], path[::-1])
            else:
                return None
        return None

    def _local(self, name: str, depth: int) -> list[Any] | None:
        """What a local name may stand for."""
        stores = [i for i, s in enumerate(self.steps) if s.opname.startswith("STORE_") and _stores(s, name)]
        if not stores and name == self.code.first:
            return None if self.code.selves is None else list(self.code.selves)
        if not stores and name in self.code.closed:
            return [self.code.closed[name]]
        values: list[Any] = []
        for store in stores:
            before = self.steps[store - 1]
            if before.opname == "FOR_ITER" and store >= 2 and self.steps[store - 2].opname == "GET_ITER":
                value = _walk(self._value(store - 3, depth + 1), [_ANY])
            else:
                value = self._value(store - 1, depth + 1)
            if value is None:
                return None
            values += value
        return values if stores else None


def _walk(starts: list[Any] | None, path: list[str]) -> list[Any] | None:
    """What lies at a path of attributes and indices from each of `starts`; None where a step runs code."""
    if starts is None:
        return None
    found = starts
    for name in path:
        reached: list[Any] = []
        for start in found:
            if name == _ANY:
                if isinstance(start, _CONTAINERS):
                    reached += start._modules.values()
                elif isinstance(start, list | tuple | dict):
                    reached += start.values() if isinstance(start, dict) else start
                elif isinstance(start, nn.Module):
                    return None
                continue
            held = _attribute_of(start, name)
            if held is _RUNS:
                return None
            if held is not _LACKS:
                reached.append(held)
        found = reached
    return found


def _modules(values: list[Any] | None) -> list[nn.Module] | None:
    return None if values is None else [m for m in values if isinstance(m, nn.Module)]


_RUNS, _LACKS = object(), object()


def _attribute_of(start: Any, name: str) -> Any:
    """An attribute as it lies there, without running any code."""
    own = getattr(start, "__dict__", {})
    for kind in ("_modules", "_parameters", "_buffers") if isinstance(start, nn.Module) else ():
        if name in own.get(kind, ()):
            return own[kind][name]
    if name in own:
        return own[name]
    if isinstance(start, nn.Module) and type(start).__getattr__ is not nn.Module.__getattr__:
        return _RUNS
    in_class = next((vars(cls)[name] for cls in type(start).__mro__ if name in vars(cls)), _LACKS)
    runs = in_class is not _LACKS and hasattr(type(in_class), "__get__") and not callable(in_class)
    return _RUNS if runs or (in_class is _LACKS and not isinstance(start, nn.Module)) else in_class


def _is_attribute(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _is_index(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _is_called(step: dis.Instruction) -> bool:
    """Whether an attribute is loaded to be called at once."""
    return step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL|self" in step.argrepr)


def _stores(step: dis.Instruction, name: str) -> bool:
    return name in step.argval if isinstance(step.argval, tuple) else step.argval == name


def _uncalled(code: CodeType) -> set[str]:
    """Attributes that are loaded other than to be called at once, or to ask for a number."""
    steps = list(dis.get_instructions(code))
    return {
        s.argval
        for s, after in zip(steps, [*steps[1:], None], strict=True)
        if _is_attribute(s)
        and not _is_called(s)
        and not (after is not None and _is_attribute(after) and after.argval in _HARMLESS)
    }


def _names_of(model: nn.Module, sites: Set[int]) -> dict[int, set[str]]:
    """Attributes under which code finds each site; for one in a list or dict of modules that container's."""
    names: dict[int, set[str]] = {site: set() for site in sites}

    def visit(module: nn.Module, inherited: set[str], seen: frozenset[int]) -> None:
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            here = {*inherited, name} if isinstance(module, _CONTAINERS) else {name}
            if id(child) in names:
                names[id(child)] |= here
            visit(child, here if isinstance(child, _CONTAINERS) else set(), seen | {id(child)})

    visit(model, set(), frozenset({id(model)}))
    return names


def _strings(code: CodeType) -> set[str]:
    return {c for c in code.co_consts if isinstance(c, str)}
