"""The README's program is run as printed: under torchrun, and as one plain process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def program() -> str:
    """The first Python block."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def test_program_names_what_else_is_needed_first() -> None:
    for name in ("apply_optimizer_in_backward", "clip_grad_norm_", "verify", "to_unsharded", "save_checkpoint"):
        assert f"{name}(" in program()


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
    ranks = 2 if launcher else 1
    losses = [
        [float(loss) for loss in re.findall(rf"rank {rank}, step \d: loss (\d\.\d+)", done.stdout)]
        for rank in range(ranks)
    ]
    assert all(len(of_rank) == 10 and of_rank[-1] < 0.5 * of_rank[0] for of_rank in losses), done.stdout
    for said in ("items.weight  table_wise(0)", "items.weight: not compared, updated in the", "(top): Linear"):
        assert done.stdout.count(said) == ranks
