"""The DLRM example stops at a signal or a bad line with what it has, and goes on from the line where it was."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "dlrm"))

from criteo import CriteoReader
from generate import ensure_generated, generate, read_truth
from logs import ClickLogs, Position, files_of

from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "dlrm"
SMALL = ["--rows", "200", "--dim", "4", "--batch-size", "64"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "clicks.tsv"
    generate(str(path), 1200)
    return path


@contextlib.contextmanager
def the_example(arguments: list[str]) -> Iterator[ModuleType]:
    """Its `train` module, by itself: other examples have files of the same names."""
    before, path, argv, environment = dict(sys.modules), list(sys.path), sys.argv, dict(os.environ)
    for name in [path.stem for path in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    sys.argv = ["train.py", *arguments]
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchRec's and FBGEMM's on import
            yield importlib.import_module("train")
    finally:
        for name in set(sys.modules) - set(before):
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        sys.modules.update(before)
        sys.path[:], sys.argv = path, argv
        os.environ.clear()
        os.environ.update(environment)


def train(arguments: list[str], stop_at: int | None = None) -> tuple[str, str]:
    """What a rank prints, and how it ends; the last rank alone is asked to stop, at that time of asking."""
    with the_example(arguments) as example, contextlib.redirect_stdout(io.StringIO()) as said:
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return dist.get_rank() == dist.get_world_size() - 1 and asked - 1 == stop_at

        try:
            example.run(example.parse_arguments(), stop)
        except Exception as error:
            return said.getvalue(), f"{type(error).__name__}: {error}"
    return said.getvalue(), ""


def held_out(said: str) -> str:
    (line,) = re.findall(r"^held-out: .*$", said, re.M)
    return str(line)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(ranks: int, log: Path, tmp_path: Path) -> None:
    """Two files, two epochs, stopped in the second epoch's second file by one rank alone."""
    other = tmp_path / "more.tsv"
    other.write_bytes(log.read_bytes()[: log.stat().st_size // 2].rpartition(b"\n")[0] + b"\n")
    place = str(tmp_path / "checkpoint")
    data = ["--data", str(log), str(other), *SMALL, "--epochs", "2"]
    once = run_ranks(ranks, train, data, timeout=120)
    steps = ClickLogs([str(log), str(other)], 200, 64).num_steps
    assert steps is not None and steps > 20
    stop_at = steps + 1 + steps - 3  # it is asked once more at the end of an epoch
    stopped = run_ranks(ranks, train, [*data, "--save", place, "--save-every", "10"], stop_at, timeout=120)
    assert [how for _, how in stopped] == ["Stopped: "] * ranks
    said = stopped[0][0]
    assert f"saved {place}, after 10 steps" in said and f"stopped after {2 * steps - 3} steps" in said
    assert shlex.split(said.splitlines()[-1])[-4:] == ["--save-every", "10", "--resume", place]
    resumed = run_ranks(ranks, train, [*data, "--save", place, "--resume", place], timeout=120)
    assert f"goes on from {place}, after {2 * steps - 3} steps" in resumed[0][0]
    assert f"saved {place}, after {2 * steps} steps" in resumed[0][0]
    assert held_out(resumed[0][0]) == held_out(once[0][0])
    (_, how), *_ = run_ranks(ranks, train, ["--data", str(log), *SMALL, "--resume", place])
    assert "at a position of other lines; expected 2 files" in how and f"--load {place}" in how


def test_a_bad_line_saves_what_was_trained(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines()
    lines[900] = "0\tnonsense"
    bad = tmp_path / "bad.tsv"
    bad.write_text("\n".join(lines) + "\n")
    place = str(tmp_path / "checkpoint")
    (said, how), (_, same) = run_ranks(2, train, ["--data", str(bad), *SMALL, "--save", place], timeout=120)
    assert how == same == f"MalformedLine: {bad}, line 901: expected 40 fields separated by tabs, got 2"
    assert "--on-bad-line skip goes on without such lines" in said
    again = shlex.split(said.splitlines()[-1])
    assert again[-4:] == ["--on-bad-line", "skip", "--resume", place]
    (said, how), _ = run_ranks(2, train, again[again.index("--data") :], timeout=120)
    assert how == "" and f"goes on from {place}" in said and "malformed lines skipped in the train part: 1" in said


def test_a_place_that_is_not_free_is_named_before_training(log: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    ((said, how),) = run_ranks(1, train, ["--data", str(log), *SMALL, "--save", str(tmp_path)])
    assert how.startswith(f"ValueError: --save {tmp_path}: what lies there is no checkpoint")
    assert said == ""


def values(logs: Any) -> list[list[float]]:
    return [batch.dense.tolist() for batch in logs]


def test_several_files_and_a_folder(log: Path, tmp_path: Path) -> None:
    data = log.read_bytes()
    days = tmp_path / "days"
    days.mkdir()
    for name in ("day_10", "day_2", "day_1.gz"):
        generate(str(days / name), 300, seed=len(name))
    (days / ".hidden").write_bytes(data)
    (days / "sub").mkdir()
    names = [str(days / name) for name in ("day_1.gz", "day_2", "day_10")]
    assert files_of([str(days), str(log)]) == [*names, str(log)]
    assert values(ClickLogs([str(days)], 10, 50)) == [b for name in names for b in values(CriteoReader(name, 10, 50))]
    assert ClickLogs([str(days)], 10, 50).num_steps is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is a folder without a click log"):
        files_of([str(tmp_path / "empty")])

    whole = ClickLogs([str(days)], 10, 50)
    batches = []
    for batch in whole:
        batches.append(batch.dense.tolist())
        later = ClickLogs([str(days)], 10, 50)
        later.start = whole.position
        if whole.position in (Position(0, 2), Position(1, 1), Position(2, 3)):
            rest = values(later)
            assert [*batches, *rest] == values(ClickLogs([str(days)], 10, 50))
    assert len(batches) > 12


def test_nothing_of_the_user_is_written_over(log: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tsv.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=r"a\.tsv\.json exists and was not generated"):
        ensure_generated(str(tmp_path / "a.tsv"), 10)
    generate(str(tmp_path / "b.tsv"), 10)
    (tmp_path / "b.tsv").write_text("mine")
    with pytest.raises(ValueError, match=r"b\.tsv has been changed since it was generated"):
        ensure_generated(str(tmp_path / "b.tsv"), 20)
    assert (tmp_path / "b.tsv").read_text() == "mine"
    (tmp_path / "c.tsv.json").write_text("[")
    assert read_truth(str(tmp_path / "c.tsv")) is None


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_stops_all_and_what_is_printed_can_be_run(processes: int, log: Path, tmp_path: Path) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    words = [sys.executable, *run, str(FOLDER / "train.py"), "--data", str(log), *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*words, "--epochs", "1000", "--save", "checkpoint", "--save-every", "10"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        deadline = time.monotonic() + 200
        while not (tmp_path / "checkpoint").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert re.search(r"^stopped after \d+ steps$", said, re.M), said
    line = said.split("to go on:\n")[1].splitlines()[0].replace("--epochs 1000", "--epochs 1")
    again = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "goes on from checkpoint, after" in again.stdout and "held-out: AUC" in again.stdout
