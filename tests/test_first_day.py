"""What a newcomer does first: installs the package with what it declares and nothing else, and runs a program."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dmp", "sharders", "planner")
PLANNED = """
import logging, torch
from torch import nn
from dmp import DistributedModelParallel, ShardingEnv
from planner import ShardingPlanner
import sharders
try:
    import scipy
except ModuleNotFoundError:
    print("no scipy")
env = ShardingEnv.abstract((2, 2), ("host", "local"), "cpu")
module = nn.Sequential(nn.EmbeddingBag(50_000, 64), nn.Linear(64, 1))
plan = ShardingPlanner().plan(module, sharders.default_sharders(), env)
print(plan)
print(plan.report)
"""


INNER = "sharders.embedding.lookup.numba_", "sharders.embedding.lookup.triton_functions"
"""What the modules that need an extra are called, which only functions import."""


def declared() -> list[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return [re.split(r"[<>=!~ ]", line)[0] for line in parser["options"]["install_requires"].split()]


def imported(path: Path) -> list[str]:
    """What a file imports when it is imported itself."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_what_is_imported_is_declared() -> None:
    """At the top of a module; a function may import an extra, and says so where it is missing. So may a module that
    only functions import, those of others of its kind included."""
    known = {*sys.stdlib_module_names, *PACKAGES, *declared()}
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    names_of = {module: imported(path) for module, path in zip(modules, paths, strict=True)}
    extras = {m: [n for n in names if n.split(".")[0] not in known] for m, names in names_of.items()}
    inner = {module for module, names in extras.items() if names}
    while more := {m for m, names in names_of.items() if inner & set(names)} - inner:
        inner |= more
    assert inner, "nothing needs an extra"
    assert not {module for module in inner if not module.startswith(INNER)}
    of_functions = {
        node.module
        for path in paths
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    }
    assert inner & of_functions, "nothing loads them"


def program() -> str:
    """The README's."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def with_all_they_need(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    from packaging.requirements import Requirement

    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        asked = (Requirement(text) for text in found[name].requires or ())
        names += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def new_environment(path: Path) -> Path:
    """With what setup.cfg declares, and what that asks for, out of this one; returns its interpreter."""
    venv.create(path, with_pip=True)
    (site,) = path.glob("lib/python3*/site-packages")
    for name in ("setuptools", "pkg_resources", "_distutils_hack"):  # of Python's own, on some versions
        shutil.rmtree(site / name, ignore_errors=True)
    for distribution in with_all_they_need(declared()).values():
        place = Path(str(distribution.locate_file("")))
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(place / name)
    return path / "bin" / "python"


def clone(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return path


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "MYPYPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.slow
def test_what_is_declared_is_enough(tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment")
    run(python, *PIP, clone(tmp_path / "clone"), cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    by_hand = program()
    by_planner = by_hand.replace(", plan=plan)", ")")
    assert by_planner != by_hand
    for text in (by_hand, by_planner):
        (work / "program.py").write_text(text)
        for launcher in ((), TORCHRUN):
            run(python, *launcher, "program.py", cwd=work)
            assert (work / "checkpoint" / "dmp.json").exists()
    said = run(python, "-c", PLANNED, cwd=work)
    assert "no scipy" in said and "0.weight" in said


@pytest.mark.slow
def test_an_editable_install_beside_a_script(tmp_path: Path) -> None:
    """The clone has the package's name, and so the script's folder seems to hold the package."""
    python = new_environment(tmp_path / "environment")
    run(python, *PIP, "--editable", clone(tmp_path / "dmp"), cwd=tmp_path)
    (tmp_path / "script.py").write_text(
        "import dmp, planner, sharders\nprint(dmp.DistributedModelParallel.__module__)\n"
    )
    assert run(python, "script.py", cwd=tmp_path) == "dmp.wrap.wrapper\n"
    (tmp_path / "typed.py").write_text(
        "from dmp import DistributedModelParallel\nimport torch\n\n"
        "reveal_type(DistributedModelParallel(torch.nn.Linear(2, 1)).plan)\n"
    )
    checker = ("-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache", "typed.py")
    assert 'Revealed type is "dmp.plans.plan.ShardingPlan"' in run(sys.executable, *checker, cwd=tmp_path)
