"""What can be read from the code of the three packages: who imports whom, and where a layout's name decides."""

from __future__ import annotations

import ast
import gc
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dmp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dmp", "sharders", "planner")


@dataclass(frozen=True)
class Import:
    """`import module` (names empty) or `from module import names`, wherever in the file it stands."""

    place: str
    """`path:line`."""
    module: str
    """Absolute dotted name."""
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


@cache
def module_files() -> dict[str, Path]:
    """Dotted name -> file, for every file of the three packages; a package's name is that of its `__init__.py`."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Of a file or a snippet; of all files some 600,000, at which collections would look again as they are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return list(ast.walk(ast.parse(source)))
    finally:
        if was_enabled:
            gc.enable()


def imports_in(source: str, module: str, is_package: bool, path: str) -> Iterator[Import]:
    """Every import of a file: at any depth, under `TYPE_CHECKING` too, and `import_module` of a literal."""
    package = module if is_package else module.rpartition(".")[0]

    def absolute(level: int, name: str) -> str:
        if not level:
            return name
        base = package.split(".")[: len(package.split(".")) - (level - 1)]
        return ".".join([*base, *filter(None, [name])])

    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (Import(f"{path}:{node.lineno}", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(f"{path}:{node.lineno}", absolute(node.level, node.module or ""), names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str):
                level = len(name) - len(name.lstrip("."))
                yield Import(f"{path}:{node.lineno}", absolute(level, name.lstrip(".")))


@cache
def all_imports() -> dict[str, list[Import]]:
    """Dotted name of each file -> its imports."""
    return {
        module: list(
            imports_in(path.read_text(), module, path.name == "__init__.py", path.relative_to(ROOT).as_posix())
        )
        for module, path in module_files().items()
    }


def of_package(package: str) -> list[Import]:
    return [i for module, found in all_imports().items() if module.partition(".")[0] == package for i in found]


def edges(imports: dict[str, list[Import]]) -> dict[str, set[str]]:
    """File -> the files it imports. `from p import x` is p.x where that is a file, else p, whose `__init__` has x.

    That importing p.x runs p's `__init__` first is not counted: it is so for every file of p alike.
    """
    graph: dict[str, set[str]] = {module: set() for module in imports}
    for module, found in imports.items():
        for i in found:
            targets = {f"{i.module}.{name}" if f"{i.module}.{name}" in graph else i.module for name in i.names}
            graph[module] |= {target for target in targets or {i.module} if target in graph}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of files, first repeated as last; empty when there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def room(module: str) -> str:
    """The folder of a file; a file beside the rooms of a package is one by itself, and so is its `__init__`."""
    folder = module if module_files()[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder in PACKAGES else folder


def rooms() -> dict[str, set[str]]:
    """Folder -> the folders it imports. A package's own `__init__` is its face, and left out."""
    graph: dict[str, set[str]] = {}
    for module, targets in edges(all_imports()).items():
        if module not in PACKAGES:
            graph.setdefault(room(module), set()).update(room(target) for target in targets)
    return {name: targets - {name} for name, targets in graph.items()}


# A layout's names are its constructors': the public functions that return one.
LAYOUT_NAMES = {
    name for name in dmp.__all__ if getattr(getattr(dmp, name), "__annotations__", {}).get("return") == "Layout"
}
NAMES_OF_OTHERS_TOO = {"colwise", "rowwise", "sequence", "replicate"}  # styles of modules, roles of axes
LOOKUPS = ("get", "pop", "setdefault", "startswith", "endswith", "count", "index")


def branches_on_layout_names(source: str) -> list[int]:
    """Lines where the name of a layout is compared, a key, a case, or what something is looked up by.

    A name that others bear too counts where the `.name` of a layout stands beside it.
    """
    lines = []
    for node in nodes_of(source):
        beside: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            beside = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            values = (v for case in node.cases for v in ast.walk(case.pattern))
            beside = [node.subject, *(v.value for v in values if isinstance(v, ast.MatchValue))]
        elif isinstance(node, ast.Dict):
            beside = list(node.keys)
        elif isinstance(node, ast.Subscript):
            beside = [node.value, node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS:
            beside = [node.func.value, *node.args]
        leaves = [leaf for side in beside if side is not None for leaf in ast.walk(side)]
        constants = {leaf.value for leaf in leaves if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}
        is_of_layout = any(
            isinstance(leaf, ast.Attribute) and leaf.attr == "name" and "layout" in ast.unparse(leaf.value).lower()
            for leaf in leaves
        )
        if constants & (LAYOUT_NAMES if is_of_layout else LAYOUT_NAMES - NAMES_OF_OTHERS_TOO):
            lines.append(node.lineno)
    return sorted(set(lines))
