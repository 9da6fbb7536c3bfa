"""The protocol serves strangers: the example as a user runs it, and the same sharder found through an entry point."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "custom_sharder.py"


def run(*arguments: str, processes: int = 1, path: Path | None = None, **options: Any) -> str:
    """Output of a Python process that finds the project, and what lies in `path`."""
    done = run_program(arguments, processes, path=[path] if path else [], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("size", "arguments", "processes"),
    [
        pytest.param(1, ["1"], 1, marks=pytest.mark.slow),
        pytest.param(2, [], 1, marks=pytest.mark.slow),
        (2, [], 2),
        pytest.param(3, [], 3, marks=pytest.mark.slow),
    ],
)
def test_example_proves_what_it_says(size: int, arguments: list[str], processes: int) -> None:
    """Its processes are torchrun's, or its own."""
    said = run(str(EXAMPLE), *arguments, processes=processes)
    assert f"{size} processes; the planner's plan:" in said
    assert "experts.weight" in said
    assert "20 steps equal one process on the whole batch: outputs, gradients, weights" in said
    assert f"loaded with every expert on rank {size - 1}, gives the same outputs" in said


def test_the_sharder_is_short() -> None:
    _, _, rest = EXAMPLE.read_text().partition("# ---- the sharder ----\n")
    sharder, mark, _ = rest.partition("# ---- the proof ----")
    assert mark and len(sharder.strip().splitlines()) < 100


PROGRAM = """
import torch
import torch.distributed as dist
from custom_sharder import Experts
from dmp import DistributedModelParallel
dist.init_process_group("gloo")
model = DistributedModelParallel(torch.nn.Sequential(Experts(6, 3, 2)))
if dist.get_rank() == 0:
    print(type(model.module[0]).__name__, list(model.plan), tuple(model.module[0].weight.shape))
dist.destroy_process_group()
"""


def test_an_installed_plugin_is_found(tmp_path: Path) -> None:
    """Without `sharders=`; with the same file on the path but not installed, nothing is sharded."""
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "examples")
    shutil.copytree(EXAMPLE.parent / "plugin", tmp_path / "examples" / "plugin")  # pip builds inside it
    target = tmp_path / "installed"
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    plugin = str(tmp_path / "examples" / "plugin")
    run("-m", "pip", "install", *options, "--target", str(target), plugin, is_fresh=True)
    assert [path.name for path in target.glob("*.py")] == ["custom_sharder.py"]

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert run(str(program), processes=2, path=target).strip() == "ShardedExperts ['0.weight'] (3, 3, 2)"
    assert run(str(program), processes=2, path=EXAMPLE.parent).strip() == "Experts [] (6, 3, 2)"
