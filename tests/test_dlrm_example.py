"""The DLRM example as a user runs it: help, errors in one line, torchrun on meshes, checkpoints that travel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "dlrm"))

from arguments import parse_arguments
from generate import generate
from launch import make_env

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "examples" / "dlrm" / "train.py")
SMALL = ["--rows", "500", "--dim", "8", "--batch-size", "256"]


def run(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program([TRAIN, *arguments], processes)


def auc(result: subprocess.CompletedProcess[str]) -> float:
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"^held-out: AUC ([0-9.]+), log loss [0-9.]+ on [0-9,]+ held-out lines$", result.stdout, re.M)
    assert len(found) == 1, result.stdout + result.stderr
    return float(found[0])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("dlrm") / "clicks.tsv")
    generate(path, 2000)
    return path


def test_help_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments()
    assert exit_info.value.code == 0
    said = capsys.readouterr().out
    for word in ("examples:", "torchrun --nproc_per_node=2", "--mesh 2x2", "--unsharded", "--on-bad-line", "--save"):
        assert word in said


@pytest.fixture(scope="module")
def trained(log: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, subprocess.CompletedProcess[str]]:
    """The checkpoint of two processes, and how they ended."""
    checkpoint = str(tmp_path_factory.mktemp("trained") / "checkpoint")
    return checkpoint, run(2, "--data", log, *SMALL, "--save", checkpoint)


def test_trained_on_two_processes(log: str, trained: tuple[str, subprocess.CompletedProcess[str]]) -> None:
    """Its checkpoint is as good in a plain module."""
    checkpoint, ended = trained
    assert "t_cat_25 " in ended.stdout  # the plan
    assert "samples/s" in ended.stderr
    assert "best reachable: AUC" in ended.stdout
    evaluated = run(1, "--data", log, *SMALL, "--load", checkpoint, "--eval-only", "--unsharded")
    assert auc(evaluated) == pytest.approx(auc(ended), abs=1e-6)


@pytest.mark.slow
def test_goes_on_anywhere(log: str, trained: tuple[str, subprocess.CompletedProcess[str]]) -> None:
    """Trained further on replicate x shard as in the plain module."""
    load = ["--data", log, *SMALL, "--load", trained[0]]
    unsharded = run(1, *load, "--unsharded")
    further = run(4, *load, "--mesh", "2x2", "--layout", "row_wise")
    assert "replicate=2" in further.stdout
    # Eight more steps, sums in another order: the order of 200 lines hardly moves.
    assert auc(further) == pytest.approx(auc(unsharded), abs=1e-3)


@pytest.mark.slow
def test_half_the_bytes_train_as_well(tmp_path: Path) -> None:
    """The demo's lines, every table by rows, so that all results and gradients travel."""
    common = ["--data", str(tmp_path / "clicks.tsv"), "--layout", "row_wise"]
    exact = auc(run(2, *common, "--generate", "150000"))
    assert exact > 0.7
    for wire in ("bfloat16", "float16"):
        assert auc(run(2, *common, "--wire", wire)) == pytest.approx(exact, abs=1e-3)


@pytest.mark.slow
def test_bad_line_ends_all_ranks_with_one_message(log: str, tmp_path: Path) -> None:
    lines = Path(log).read_text().splitlines()
    lines[1500] = "0\tnonsense"
    bad = tmp_path / "bad.tsv"
    bad.write_text("\n".join(lines) + "\n")
    result = run(2, "--data", str(bad), *SMALL)
    assert result.returncode != 0
    message = f"error: {bad}, line 1501: expected 40 fields separated by tabs, got 2"
    assert result.stderr.splitlines().count(message) + result.stdout.splitlines().count(message) == 1
    assert 'train.py", line' not in result.stderr  # no traceback of ours
    skipped = run(1, "--data", str(bad), *SMALL, "--on-bad-line", "skip")
    assert auc(skipped) > 0
    assert re.search(r"malformed lines skipped in the (train|heldout) part: 1$", skipped.stdout, re.M)


def test_missing_file_is_one_line() -> None:
    result = run(1, "--data", "missing.tsv")
    assert result.returncode == 2
    assert result.stderr == "error: missing.tsv: no such file\n"


def test_without_data_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--mesh", "2x2"])
    arguments = parse_arguments()
    assert arguments.data.endswith("clicks.tsv")
    assert arguments.generate > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generate", "0"], "argument --generate: expected at least 1, got 0 (see --help)"),
        (["--unsharded", "--layout", "row_wise"], "--unsharded has no mesh and no layout (see --help)"),
        (["--batch-size", "0"], "argument --batch-size: expected at least 1, got 0 (see --help)"),
        (["--rows", "a"], "argument --rows: invalid number of rows value: 'a' (see --help)"),
    ],
)
def test_mistaken_arguments_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "clicks.tsv", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        ([2, 2], None, "--mesh 2x2 takes 4 processes, this run has 1"),
        ([1, 1, 1], None, "--mesh has 3 axes, --axes names 0: none"),
        (None, ["a", "b"], "--mesh has 1 axes, --axes names 2: a,b"),
    ],
)
def test_mesh_that_does_not_fit(mesh: list[int] | None, axes: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(mesh, axes, "cpu")
