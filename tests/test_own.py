"""A save, and what it removes, touch nothing that a save did not write; one save at a time writes to a path."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    export_safetensors,
    keep_last,
    latest,
    load_checkpoint,
    save_checkpoint,
)
from dmp.checkpoint.convert import convert
from dmp.checkpoint.targets import claim as claims
from dmp.checkpoint.targets import replaceable
from tests.ranks import run_ranks


def put(path: Path, text: str = "dear") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def saved(path: Path) -> Path:
    save_checkpoint(path, nn.Linear(2, 1), extra="first")
    return path


def with_beside(path: Path, state: str) -> None:
    saved(path)
    put(path.with_name(f".x.{state}") / "thesis.tex")


def torch_folder(path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save({"weight": torch.zeros(2)}, storage_writer=FileSystemWriter(path), no_dist=True)


# What lies at x, or beside it -> what the error says.
STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (put, "x is a file of 4 bytes"),
    "a folder of other files": (lambda x: [put(x / name) for name in "abcd"], "x holds 'a', 'b', 'c' and 1 more,"),
    "a clone": (lambda x: [put(x / ".git" / "HEAD"), put(x / "train.py")], "x holds '.git', 'train.py',"),
    "earlier checkpoints": (lambda x: [saved(x / "step-1"), saved(x / "step-2")], "x holds 'step-1', 'step-2',"),
    "an empty folder in it": (lambda x: (x / "sub").mkdir(parents=True), "x holds 'sub',"),
    "notes in a checkpoint": (lambda x: put(saved(x) / "notes.txt"), "x holds 'notes.txt',"),
    "a folder in a checkpoint": (lambda x: put(saved(x) / "plots" / "loss.png"), "x holds 'plots',"),
    "a link in a checkpoint": (lambda x: (saved(x) / "__9_0.distcp").symlink_to(x), "x holds '__9_0.distcp',"),
    "a folder by a name of ours": (lambda x: put(x / "dmp.json" / "a"), "x holds 'dmp.json',"),
    "another's dmp.json": (lambda x: put(x / "dmp.json", '{"format": "other"}'), "x holds 'dmp.json', and no dmp.json"),
    "torch's checkpoint": (torch_folder, "x holds '.metadata', '__0_0.distcp', and no dmp.json"),
    "a link": (lambda x: x.symlink_to(saved(x.with_name("y"))), "x is a link to"),
    "a link to nothing": (lambda x: x.symlink_to("nothing"), "x is a link to nothing"),
    "their own .saving": (lambda x: put(x.with_name(".x.saving") / "a"), ".x.saving holds 'a',"),
    "their own .saving, a file": (lambda x: put(x.with_name(".x.saving")), ".x.saving is a file"),
    "their own .replaced": (lambda x: with_beside(x, "replaced"), ".x.replaced holds 'thesis.tex',"),
    "their own .claim": (lambda x: put(x.with_name(".x.claim")), ".x.claim is no file of ours"),
}


def tree(root: Path) -> dict[str, Any]:
    """All that lies below a folder, and when each was changed."""
    found = {}
    for path in sorted(root.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (kind, path.lstat().st_mtime_ns if path.is_file() else 0)
    return found


def save_and_wait(path: Path, asynchronous: bool) -> None:
    pending = save_checkpoint(path, nn.Linear(2, 1), asynchronous=asynchronous, keep_last=1)
    if pending is not None:
        pending.wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "in the background"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_not_ours_is_named_and_stays(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    make, words = STRANGERS[kind]
    make(tmp_path / "x")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        save_and_wait(tmp_path / "x", asynchronous)
    assert words in str(caught.value)
    assert tree(tmp_path) == before


def test_below_a_file(tmp_path: Path) -> None:
    """What came was "File exists"."""
    put(tmp_path / "x")
    for path in (tmp_path / "x" / "step-1", tmp_path / "x" / "run" / "step-1"):
        with pytest.raises(CheckpointError, match=r"step-1 cannot be made: .*x is no folder"):
            save_checkpoint(path, nn.Linear(2, 1))


def save_on_strangers(folder: str) -> list[str]:
    """On each rank: what the saves to each of them say; then one to a path that is free."""
    model = DistributedModelParallel(nn.EmbeddingBag(8, 4))
    said = []
    for kind in STRANGERS:
        try:
            save_checkpoint(Path(folder) / kind / "x", model)
        except CheckpointError as error:
            said.append(str(error))
    save_checkpoint(Path(folder) / "free" / "x", model)
    return said


def test_every_rank_is_told(tmp_path: Path) -> None:
    for kind, (make, _) in STRANGERS.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind / "x")
    before = tree(tmp_path)
    for said in run_ranks(2, save_on_strangers, str(tmp_path)):
        assert [words in text for text, (_, words) in zip(said, STRANGERS.values(), strict=True)] == [True] * len(said)
    load_checkpoint(tmp_path / "free" / "x", nn.EmbeddingBag(8, 4))
    assert {name: found for name, found in tree(tmp_path).items() if not name.startswith("free")} == before


@pytest.mark.parametrize("path", [".", "", "..", "sub/..", "/", "sub"])
def test_the_working_directory_and_what_is_above(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "work" / "train.py")
    put(tmp_path / "work" / "sub" / "data.csv")
    monkeypatch.chdir(tmp_path / "work")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds '|no place for a checkpoint"):
        save_checkpoint(path, nn.Linear(2, 1))
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"is the working directory .* such as .*empty/step-1"):
        save_checkpoint(".", nn.Linear(2, 1))
    assert os.getcwd() == str(tmp_path / "empty")


def half_removed(x: Path) -> None:
    saved(x).rename(x.with_name(".x.saving"))
    for file in x.with_name(".x.saving").glob("[!d]*"):
        file.unlink()


OURS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda x: None,
    "an empty folder": lambda x: x.mkdir(),
    "a checkpoint": saved,
    "a damaged one": lambda x: [file.write_bytes(b"") for file in saved(x).glob("*") if file.name != "dmp.json"],
    "what a killed save left": lambda x: saved(x).rename(x.with_name(".x.saving")),
    "what one left that had just begun": lambda x: put(x.with_name(".x.saving") / "dmp.json", '{"for'),
    "what was left of that": half_removed,
    "what an exchange left": lambda x: saved(x).rename(x.with_name(".x.replaced")),
    "an empty claim": lambda x: x.with_name(".x.claim").touch(),
}


@pytest.mark.parametrize("kind", OURS)
def test_ours_is_replaced(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SILENT_S", 0.1)
    monkeypatch.setattr(claims, "_LOOK_S", 0.02)
    OURS[kind](tmp_path / "x")
    save_checkpoint(tmp_path / "x", nn.Linear(2, 1), extra="second")
    assert load_checkpoint(tmp_path / "x", nn.Linear(2, 1)) == "second"
    left = {"x", ".x.replaced"} if kind == "what an exchange left" else {"x"}
    assert set(os.listdir(tmp_path)) - left == set()


def test_what_comes_while_a_save_runs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into what will be replaced, after it was looked at."""
    saved(tmp_path / "x")
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: [put(tmp_path / "x" / "notes.txt"), real(fd)][1])
    with pytest.raises(CheckpointError, match=r"x holds 'notes\.txt'"):
        save_checkpoint(tmp_path / "x", nn.Linear(2, 1))
    assert os.listdir(tmp_path) == ["x"]
    (tmp_path / "x" / "notes.txt").unlink()
    assert load_checkpoint(tmp_path / "x", nn.Linear(2, 1)) == "first"


# ---- what is older goes, and what the clocks say ----


def stamped(path: Path, saved_ns: object) -> None:
    """A checkpoint that says when it was saved; without checksums, as the first version wrote it."""
    saved(path)
    about = json.loads((path / "dmp.json").read_text())
    (path / "dmp.json").write_text(json.dumps({**about, "version": 1, "saved_ns": saved_ns}))


NOW, FUTURE, LAST = time.time_ns(), time.time_ns() + 10**18, (1 << 62) - 1
STAMPS = {"future": FUTURE, "last": LAST, "now": NOW, "zero": 0, "negative": -1, "text": "soon", "null": None}
STAMPS |= {"infinite": 1e400, "beyond 64 bits": 10**99, "bool": True, "list": [1]}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stamp", STAMPS.values(), ids=STAMPS)
@pytest.mark.sampled(4)
def test_the_one_just_written_stays(count: int, stamp: object, tmp_path: Path) -> None:
    for name in "ab":
        stamped(tmp_path / name, stamp)
    save_checkpoint(tmp_path / "new", nn.Linear(2, 1), extra="new", keep_last=count)
    assert load_checkpoint(tmp_path / "new", nn.Linear(2, 1)) == "new"
    kept = len(os.listdir(tmp_path))
    if stamp == LAST:  # nothing can be after it
        assert kept == count + 1
        return
    assert kept == (count if stamp in (FUTURE, NOW, 0) else 3)
    assert latest(tmp_path) == tmp_path / "new"


def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "a")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    for name in "bc":
        saved(tmp_path / name)
        assert latest(tmp_path) == tmp_path / name
    assert keep_last(tmp_path, 1) == [tmp_path / "b", tmp_path / "a"]


def test_older_ones_with_something_else_in_them_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abcde":
        saved(tmp_path / name)
    put(tmp_path / "a" / "notes.txt")
    put(tmp_path / "b" / "plots" / "loss.png")
    put(tmp_path / ".c.removing" / "thesis.tex")
    before = tree(tmp_path)
    with caplog.at_level(logging.WARNING, "dmp"):
        assert keep_last(tmp_path, 1) == [tmp_path / "d"]
    assert tree(tmp_path) == {name: found for name, found in before.items() if name.split("/")[0] != "d"}
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert all(words in said for words in ("'notes.txt'", "'plots'", "'thesis.tex'"))


def test_what_cannot_be_read_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "closed"):
        saved(tmp_path / name)
    saved(tmp_path / "deep")
    (tmp_path / "deep" / "dmp.json").write_text("[" * 100_000)
    os.mkfifo(saved(tmp_path / "pipe") / "more")
    (tmp_path / "pipe" / "dmp.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "dmp.json")  # whoever opens it waits
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with caplog.at_level(logging.WARNING, "dmp"):
        assert latest(tmp_path) == tmp_path / "b"
        assert keep_last(tmp_path, 1) == [tmp_path / "a"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "passed over: " in said and "closed" in said and "deep" in said
    assert set(real(tmp_path)) == {"b", "closed", "deep", "pipe"}


# ---- two saves to one path ----


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def left_by(target: Path, **said: object) -> None:
    """A claim of another one."""
    own = claims.take_claim(target)
    about = json.loads(own.path.read_text())
    own.release()
    own.path.write_text(json.dumps({**about, "word": "another", **said}))


@pytest.mark.parametrize("who", ["ended", "its number is another's by now", "of this process", "of a silent host"])
def test_what_the_dead_left_is_taken_over(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SILENT_S", 0.1 if who == "of a silent host" else 1e9)
    monkeypatch.setattr(claims, "_LOOK_S", 0.02)
    said: dict[str, dict[str, object]] = {
        "ended": {"pid": dead_process()},
        "its number is another's by now": {"pid": os.getppid(), "began": "1"},
        "of this process": {},
        "of a silent host": {"place": "elsewhere"},
    }
    left_by(tmp_path / "x", **said[who])
    save_checkpoint(tmp_path / "x", nn.Linear(2, 1))
    assert os.listdir(tmp_path) == ["x"]


def test_a_host_that_makes_signs_of_life_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_LOOK_S", 0.02)
    monkeypatch.setattr(claims, "_BEAT_S", 0.05)
    own = claims.take_claim(tmp_path / "x")
    about = json.loads(own.path.read_text())
    own.path.write_text(json.dumps({**about, "place": "elsewhere"}))
    with pytest.raises(CheckpointError, match="is being saved by process"):
        save_checkpoint(tmp_path / "x", nn.Linear(2, 1))
    own.release()
    save_checkpoint(tmp_path / "x", nn.Linear(2, 1))
    assert os.listdir(tmp_path) == ["x"]


def test_who_lost_the_claim_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "x")
    take_claim = claims.take_claim

    def taken_by_another(target: Path) -> claims.Claim:
        own = take_claim(target)
        own.path.write_text(json.dumps({**json.loads(own.path.read_text()), "word": "another"}))
        return own

    monkeypatch.setattr("dmp.checkpoint.targets.native.take_claim", taken_by_another)
    with pytest.raises(CheckpointError, match="is another save's by now"):
        save_checkpoint(tmp_path / "x", nn.Linear(2, 1))
    assert load_checkpoint(tmp_path / "x", nn.Linear(2, 1)) == "first"


def save_at_once(folder: str, rounds: int) -> list[str]:
    """Each rank is a job of its own; all save to one path again and again."""
    said = []
    for count in range(rounds):
        model = DistributedModelParallel(nn.Linear(200, 100), ShardingEnv.single())
        nn.init.constant_(model.module.weight, dist.get_rank())  # type: ignore[arg-type]
        dist.barrier()
        try:
            save_checkpoint(Path(folder) / f"x{count}", model, extra=dist.get_rank())
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("becomes", ["another", "nothing"])
def test_what_another_save_puts_in_its_place_meanwhile_is_no_strangers(
    becomes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended between two looks at its folder was said to hold files of nobody's."""
    saved(tmp_path / ".x.saving")
    real = replaceable.about_of

    def looked_at_too_late(folder: Path) -> dict[str, object] | None:
        if folder.name == ".x.saving" and not (tmp_path / "x").exists():
            folder.rename(tmp_path / "x")
            if becomes == "another":
                folder.mkdir()
        return real(folder)

    monkeypatch.setattr(replaceable, "about_of", looked_at_too_late)
    assert replaceable.stranger_at(tmp_path / ".x.saving") is None
    assert (tmp_path / "x").is_dir()


def test_of_two_jobs_one_wins_whole_and_the_other_is_told(tmp_path: Path) -> None:
    replies = run_ranks(2, save_at_once, str(tmp_path), 12)
    assert sorted(os.listdir(tmp_path)) == sorted(f"x{count}" for count in range(12))
    for count, said in enumerate(zip(*replies, strict=True)):
        plain = nn.Linear(200, 100)
        rank = load_checkpoint(tmp_path / f"x{count}", plain)
        assert (plain.weight == rank).all()
        assert said[rank] == "" and ("being saved by" in said[1 - rank] or said[1 - rank] == "")
    assert any("being saved by process" in text for said in replies for text in said)


def test_of_two_threads_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    real = os.fsync

    def wait_in_the_first(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread() and (tmp_path / ".x.saving").exists():
            begun.set()
            may_end.wait(30)
        real(fd)

    monkeypatch.setattr(os, "fsync", wait_in_the_first)
    first = threading.Thread(target=saved, args=(tmp_path / "x",))
    first.start()
    assert begun.wait(30)
    with pytest.raises(CheckpointError, match=f"is being saved by process {os.getpid()} on "):
        save_checkpoint(tmp_path / "x", nn.Linear(2, 1), extra="second")
    may_end.set()
    first.join()
    assert load_checkpoint(tmp_path / "x", nn.Linear(2, 1)) == "first"
    assert os.listdir(tmp_path) == ["x"]


# ---- what else writes ----


def test_convert_and_export_leave_what_is_there(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    put(tmp_path / ".out.saving")
    put(tmp_path / ".dear.saving" / "a")
    put(tmp_path / "folder" / ".model.safetensors.saving")
    before = tree(tmp_path)
    convert(source, tmp_path / "out", "torch")
    convert(source, tmp_path / "folder", "safetensors")
    with pytest.raises(CheckpointError, match=r"\.dear\.saving holds 'a'"):
        convert(source, tmp_path / "dear", "dmp")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is there already"):
        export_safetensors(tmp_path / "folder", nn.Linear(2, 1))
    after = tree(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == {"out", "folder/model.safetensors"}


def test_the_folder_of_a_run_names_its_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no dmp\.json, \.metadata, model\.safetensors or .*index\.json$"):
        load_checkpoint(tmp_path, nn.Linear(2, 1))
    for second, step in enumerate((10, 20, 30, 40)):
        os.utime(saved(tmp_path / f"step-{step}") / "dmp.json", (second, second))
    put(tmp_path / "plots" / "loss.png")
    with pytest.raises(CheckpointError, match=r"'step-40', 'step-30', 'step-20' and 1 more; .*: .*/step-40$"):
        load_checkpoint(tmp_path, nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match=r"give one of these: .*/step-40$"):
        convert(tmp_path, tmp_path / "out", "torch")
