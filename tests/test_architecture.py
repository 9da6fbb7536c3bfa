"""The shape of the code: who imports whom, what `import dmp` brings, which names are public, what the README says."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dmp", "sharders", "planner")

# Frozen: a name comes in when it is meant to stay, and goes only with a note to the users.
PUBLIC = {
    "dmp": {
        # the wrapper and where it runs
        "DistributedModelParallel",
        "ShardingEnv",
        # plans and layouts
        "Layout",
        "ParameterSharding",
        "PlanChange",
        "Shard",
        "ShardingPlan",
        "check_cover",
        "column_wise",
        "colwise",
        "data_parallel",
        "dense_parameters",
        "fully_sharded",
        "grid",
        "is_replicated",
        "place_dense",
        "plan_parameters",
        "rectangles",
        "replicate",
        "row_wise",
        "rowwise",
        "sequence",
        "table_row_wise",
        "table_wise",
        # state
        "GradScaler",
        "clip_grad_norm_",
        "export_safetensors",
        "full_optimizer_state_dict",
        "full_state_dict",
        "keep_last",
        "latest",
        "load_checkpoint",
        "save_checkpoint",
        "tensors_of",
        "to_unsharded",
        "verify",
        # contracts of sharders
        "ChunkedTensor",
        "DataParallelWrapper",
        "FusedModule",
        "FusedParameter",
        "ModelPlacement",
        "ModelSharder",
        "ModuleSharder",
        "ParameterInfo",
        "ShardedModule",
        "Calls",
        "register_sharder",
        # calls that all ranks make together
        "ranks",
        # errors
        "CheckpointError",
        "DmpError",
        "InputError",
        "PlanError",
        "RanksError",
        "ShardError",
    },
    "sharders": {
        "DDPWrapper",
        "EmbeddingBagCollectionSharder",
        "EmbeddingBagSharder",
        "EmbeddingCollectionSharder",
        "EmbeddingSharder",
        "FSDPWrapper",
        "Jagged",
        "TensorParallelSharder",
        "default_sharders",
        "dense_to_jagged",
        "gather_batch",
        "jagged_to_dense",
        "slice_batch",
    },
    "planner": {"Constraint", "CostModel", "PlanReport", "ShardingPlanner", "Topology"},
}

# What a user of `dmp` alone need not have, or need not wait for.
NOT_IMPORTED_BY_DMP = (
    "torchrec",
    "fbgemm_gpu",
    "tensordict",
    "torchmetrics",
    "scipy",
    "jinja2",
    "tqdm",
    "safetensors",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "sharders",
    "planner",
)


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


def module_files() -> dict[str, Path]:
    """Dotted name -> file, for every file of the three packages; a package's name is that of its `__init__.py`."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_in(source: str, module: str, is_package: bool, path: str) -> Iterator[Import]:
    """Every import of a file: at any depth, under `TYPE_CHECKING` too, and `import_module` of a literal."""
    package = module if is_package else module.rpartition(".")[0]

    def absolute(level: int, name: str) -> str:
        if not level:
            return name
        base = package.split(".")[: len(package.split(".")) - (level - 1)]
        return ".".join([*base, *filter(None, [name])])

    for node in ast.walk(ast.parse(source)):
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


def test_the_walker_sees_every_kind_of_import() -> None:
    source = """
import a, b.c as d
from . import e
from .f import g
from ..h import i
if TYPE_CHECKING:
    from j import k
def fn():
    from l.m import n, o
    importlib.import_module("p.q")
    import_module(".r", __package__)
    __import__("s")
    import_module(name)
"""
    found = [(i.module, i.names) for i in imports_in(source, "dmp.x.y", False, "dmp/x/y.py")]
    assert sorted(found) == [
        ("a", ()),
        ("b.c", ()),
        ("dmp.h", ("i",)),
        ("dmp.x", ("e",)),
        ("dmp.x.f", ("g",)),
        ("dmp.x.r", ()),
        ("j", ("k",)),
        ("l.m", ("n", "o")),
        ("p.q", ()),
        ("s", ()),
    ]
    assert [i.module for i in imports_in("from . import e", "dmp.x", True, "dmp/x/__init__.py")] == ["dmp.x"]


def test_the_walker_sees_a_circle() -> None:
    circle = {"p": [], "p.a": [Import("", "p", ("b",))], "p.b": [Import("", "p.c", ("x",))], "p.c": [Import("", "p.a")]}
    assert len(cycle(edges(circle))) == 4
    assert cycle(edges({**circle, "p.c": []})) == []
    through_init = {"p": [Import("", "p.a", ("x",))], "p.a": [Import("", "p", ("x",))]}
    assert len(cycle(edges(through_init))) == 3


def test_packages_have_files() -> None:
    assert {module.partition(".")[0] for module in module_files()} == set(PACKAGES)


def test_dmp_imports_neither_sharders_nor_planner() -> None:
    assert [i for i in of_package("dmp") if i.package in ("sharders", "planner")] == []


def test_dmp_names_sharders_and_planner_in_its_registry_alone() -> None:
    target = re.compile(r"(sharders|planner)[.:][\w.:]+")
    named_in = {
        path.relative_to(ROOT).as_posix()
        for module, path in module_files().items()
        if module.partition(".")[0] == "dmp"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and target.fullmatch(node.value)
    }
    assert named_in <= {"dmp/registry.py"}


@pytest.mark.parametrize(("package", "sibling"), [("sharders", "planner"), ("planner", "sharders")])
def test_siblings_do_not_import_each_other(package: str, sibling: str) -> None:
    assert [i for i in of_package(package) if i.package == sibling] == []


@pytest.mark.parametrize("package", ["sharders", "planner"])
def test_siblings_take_public_names_of_dmp_alone(package: str) -> None:
    """`from dmp import name`, name in `dmp.__all__`; no submodule, no bare `import dmp`, no star."""
    public = set(importlib.import_module("dmp").__all__)
    from_dmp = [i for i in of_package(package) if i.package == "dmp"]
    assert [i for i in from_dmp if i.module != "dmp" or not i.names or not public.issuperset(i.names)] == []


def test_no_import_cycles() -> None:
    assert cycle(edges(all_imports())) == []


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


def test_no_circles_between_folders() -> None:
    assert cycle(rooms()) == []


def test_every_import_goes_down_in_the_picture() -> None:
    """The picture in docs/architecture.md, line by line, is the order of the rooms; it names each of them."""
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    line_of, package = {}, ""
    for number, line in enumerate(picture.splitlines()):
        if (found := re.match(r" (\w+)? {2,}(\S.*)", line)) and "import" not in line:
            package = found[1] or package
            line_of |= {f"{package}.{name.strip().replace('/', '.')}": number for name in found[2].split("|")}
    graph = rooms()
    assert set(line_of) == set(graph)
    assert [(a, b) for a in graph for b in graph[a] if b in line_of and line_of[a] >= line_of[b]] == []


def test_no_private_name_across_files() -> None:
    """Neither imported, nor reached through an imported module of ours."""
    found = []
    files = module_files()
    for module, imports in all_imports().items():
        found += [(i.place, n) for i in imports for n in i.names if i.package in PACKAGES and n.startswith("_")]
        tree = ast.parse(files[module].read_text())
        ours = {
            (alias.asname or alias.name): node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES
            for alias in node.names
            if f"{node.module}.{alias.name}" in files
        }
        found += [
            (f"{files[module].relative_to(ROOT)}:{node.lineno}", node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ours
            and node.attr.startswith("_")
        ]
    assert found == []


def test_import_dmp_needs_torch_alone() -> None:
    """In a fresh interpreter, that has the extras installed: what would be imported, is."""
    code = "import sys, torch; before = set(sys.modules); import dmp; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "dmp" in loaded
    assert [m for m in loaded if any(m == name or m.startswith(f"{name}.") for name in NOT_IMPORTED_BY_DMP)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_frozen(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert len(module.__all__) == len(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_every_file_has_its_phrase_in_its_folder() -> None:
    """A line of the folder's `__init__` has its name and two words more; none names what is not there."""
    for package in (module for module, path in module_files().items() if path.name == "__init__.py"):
        folder = ROOT / package.replace(".", "/")
        lines = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").splitlines()
        phrases = dict(found.groups() for line in lines if (found := re.match(r"- `(\w+)`: (.*)", line)))
        assert set(phrases) == {path.stem for path in folder.glob("*.py")} - {"__init__"}, package
        assert [name for name, phrase in phrases.items() if len(phrase.split()) < 2] == [], package


def test_readme_names_every_folder_in_a_phrase() -> None:
    text = (ROOT / "README.md").read_text()
    folders = {path.parent.relative_to(ROOT) for path in module_files().values()} - {Path(name) for name in PACKAGES}
    unnamed = [
        folder.as_posix()
        for folder in sorted(folders)
        if not re.search(rf"\| `{folder.as_posix()}/` \| .*\w \w.* \|", text)
        and not re.search(rf"\| `{folder.parent.as_posix()}/` \| .*`{folder.name}/`.* \|", text)
    ]
    assert unnamed == []


def test_readme_names_no_file_that_is_not_there() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(PACKAGES)}|tests|examples)/[\w/]+\.py\b", text))
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
