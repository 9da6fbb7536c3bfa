"""The README's program is run as printed: under torchrun, and as one plain process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def program() -> str:
    """The first Python block."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def test_program_is_short() -> None:
    assert len(program().strip().splitlines()) <= 30


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_program_runs(launcher: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program())
    done = subprocess.run(
        [sys.executable, *launcher, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint" / "plan.json").exists()
