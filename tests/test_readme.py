"""The README's program is run as printed: under torchrun, and as one plain process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parent.parent


def program() -> str:
    """The first Python block."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def test_program_names_what_else_is_needed_first() -> None:
    for name in ("apply_optimizer_in_backward", "clip_grad_norm_", "verify", "to_unsharded", "save_checkpoint"):
        assert f"{name}(" in program()


def test_program_is_short() -> None:
    assert len(program().strip().splitlines()) <= 30


@pytest.mark.parametrize("processes", [1, 2])
def test_program_runs(processes: int, tmp_path: Path) -> None:
    """By torchrun itself in `make test-all`; the quick suite has torchrun's agent in tests/test_elastic.py."""
    (tmp_path / "program.py").write_text(program())
    done = run_program(["program.py"], processes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint" / "plan.json").exists()
    losses = [
        [float(loss) for loss in re.findall(rf"rank {rank}, step \d: loss (\d\.\d+)", done.stdout)]
        for rank in range(processes)
    ]
    assert all(len(of_rank) == 10 and of_rank[-1] < 0.5 * of_rank[0] for of_rank in losses), done.stdout
    for said in ("items.weight  table_wise(0)", "items.weight: not compared, updated in the", "(top): Linear"):
        assert done.stdout.count(said) == processes
