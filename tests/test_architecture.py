"""The shape of the code: who imports whom, what `import dmp` brings, which names are public, what the README says."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.code_walk import (
    LAYOUT_NAMES,
    NAMES_OF_OTHERS_TOO,
    PACKAGES,
    ROOT,
    Import,
    all_imports,
    branches_on_layout_names,
    cycle,
    edges,
    imports_in,
    module_files,
    nodes_of,
    of_package,
    rooms,
)

# Frozen: a name comes in when it is meant to stay, and goes only with a note to the users.
PUBLIC = {
    "dmp": {
        # the wrapper and where it runs
        "DistributedModelParallel",
        "ShardingEnv",
        # plans and layouts
        "Layout",
        "ParameterSharding",
        "NameIndex",
        "PlanChange",
        "Shard",
        "ShardingPlan",
        "check_cover",
        "column_wise",
        "colwise",
        "data_parallel",
        "Found",
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
        "to_unsharded",
        "verify",
        # what a step has taken
        "step_phases",
        # training loops
        "EvalPipelineSparseDist",
        "PrefetchTrainPipelineSparseDist",
        "TrainPipeline",
        "TrainPipelineBase",
        "TrainPipelineSparseDist",
        # contracts of sharders
        "ChunkedTensor",
        "DataParallelWrapper",
        "FusedModule",
        "FusedParameter",
        "ModelPlacement",
        "ModelSharder",
        "ModuleSharder",
        "ParameterInfo",
        "Planner",
        "Resharded",
        "ShardedModule",
        "Calls",
        "default_sharders",
        "hook",
        "register_sharder",
        # names, nested values, and the tensors of modules, for authors of sharders; values as a person reads them
        "Place",
        "is_dtensor",
        "is_inside",
        "rectangles_of",
        "strided",
        "fully_sharded_dim",
        "join_name",
        "local_of",
        "deep_copy",
        "map_nested",
        "places_of",
        "replace_tensors",
        "room_for",
        "shown",
        "shown_bytes",
        "tensors_of",
        "tied_places",
        # whose class an object is of
        "attribute_of",
        "is_torchrecs",
        # generators of random numbers
        "RandomNumbers",
        "random_numbers_kept",
        # whether two have the same bits
        "checksum",
        "sharding_types",
        "type_name",
        # many objects made that stay
        "without_collection",
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
        "ManagedCollisionEmbeddingBagCollectionSharder",
        "ManagedCollisionEmbeddingCollectionSharder",
        "FSDPWrapper",
        "FusedEmbeddingBagCollectionSharder",
        "FusedEmbeddingCollectionSharder",
        "Jagged",
        "TensorParallelSharder",
        "TorchRecSharder",
        "default_sharders",
        "dense_to_jagged",
        "gather_batch",
        "jagged_to_dense",
        "slice_batch",
    },
    "planner": {
        *("Constraint", "CostModel", "PlanReport", "ShardingPlanner", "Topology", "from_torchrec"),
        *("MeshProposal", "MeshProposals", "Observation", "observe", "propose_mesh"),
    },
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


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    """Collections in the tests that follow would look at all nodes."""
    yield
    nodes_of.cache_clear()


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
        for node in nodes_of(path.read_text())
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


def test_no_sharder_imports_the_battery() -> None:
    found = [i for i in of_package("sharders") if f"{i.module}.{'.'.join(i.names)}".startswith("sharders.testing")]
    assert found and [i for i in found if not i.place.startswith("sharders/testing/")] == []


def test_no_import_cycles() -> None:
    assert cycle(edges(all_imports())) == []


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
        nodes = nodes_of(files[module].read_text())
        ours = {
            (alias.asname or alias.name): node.module
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES
            for alias in node.names
            if f"{node.module}.{alias.name}" in files
        }
        found += [
            (f"{files[module].relative_to(ROOT)}:{node.lineno}", node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ours
            and node.attr.startswith("_")
        ]
    assert found == []


def test_the_walker_sees_every_branch_on_a_layout_name() -> None:
    source = """
is_copied = name == "data_parallel"
if entry.layout.name in ("colwise", "rowwise"): pass
rule = {"row_wise": 1, "grid": 2}
dim = {"colwise": 0, "rowwise": 1}[layout.name]
dim = {"colwise": 0}.get(self._layout.name)
match name:
    case "table_wise" | "fully_sharded": pass
if layout.name.startswith("column_wise"): pass
found = [x for x in plan if plan[x].layout.name != "replicate"]
"""
    assert len(LAYOUT_NAMES) == 12 and NAMES_OF_OTHERS_TOO < LAYOUT_NAMES
    assert branches_on_layout_names(source) == [2, 3, 4, 5, 6, 7, 9, 10]
    of_others = """
planner = ShardingPlanner(constraints={"t1": Constraint(layouts=["row_wise"], forbid="data_parallel")})
if style == "colwise" or family(style) in ("rowwise", "sequence"): pass
sizes = {"replicate": 2}["replicate"]
if layout.name not in constraint.layouts: pass
"""
    assert branches_on_layout_names(of_others) == []


def test_only_layouts_branch_on_their_names() -> None:
    """Others ask a layout's properties, or its shards: a new constructor needs no change outside its file."""
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for module, path in module_files().items()
        if not module.startswith("dmp.layouts") and (lines := branches_on_layout_names(path.read_text()))
    }
    assert found == {}


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


def test_no_file_is_over_450_lines() -> None:
    """Longer ones hold two nouns; tests and examples too."""
    folders = (*PACKAGES, "tests", "examples")
    long = {path: len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {path.relative_to(ROOT).as_posix(): lines for path, lines in long.items() if lines > 450} == {}


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
