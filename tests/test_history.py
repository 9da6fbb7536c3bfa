"""Folders of checkpoints: the newest whole one is found, older ones go, and nothing that is not ours is touched."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dmp import keep_last, latest, load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of a plain module; the tests copy it."""
    path = tmp_path_factory.mktemp("history") / "saved"
    save_checkpoint(path, nn.Linear(2, 1), extra=1)
    return path


class Folder:
    """A folder that a test fills with copies of one checkpoint, as if each was saved at a second of its own."""

    def __init__(self, root: Path, whole: Path) -> None:
        self.root, self.whole = root, whole

    def put(self, name: str, second: int | None) -> Path:
        """A copy; None: as the first version wrote it, of which nobody knows when it was saved."""
        path = self.root / name
        shutil.copytree(self.whole, path)
        about, checksums = (json.loads((path / file).read_text()) for file in ("dmp.json", "checksums.json"))
        if second is None:
            del about["saved_ns"]
            about["version"] = 1
        else:
            about["saved_ns"] = second * 10**9
        text = json.dumps(about).encode()
        (path / "dmp.json").write_bytes(text)
        (path / "checksums.json").write_text(json.dumps({**checksums, "dmp.json": zlib.crc32(text)}))
        for written in (*path.iterdir(), path):
            os.utime(written, (second or 0, second or 0))
        return path

    def names(self) -> set[str]:
        return set(os.listdir(self.root))


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Folder:
    root = tmp_path / "checkpoints"
    root.mkdir()
    return Folder(root, model_folder)


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    assert keep_last(tmp_path / "absent", 1) == keep_last(tmp_path, 1) == []
    assert not (tmp_path / "absent").exists()


def test_newest_is_the_last_that_was_saved(tmp_path: Path) -> None:
    """Whatever the names; a save onto an existing path makes that the newest."""
    module = nn.Linear(2, 1)
    for count, name in enumerate(("b", "a", "c", "a")):
        save_checkpoint(tmp_path / name, module, extra=count)
        path = latest(tmp_path)
        assert path == tmp_path / name
        assert load_checkpoint(path, nn.Linear(2, 1)) == count


def test_time_comes_before_name_and_name_decides_a_tie(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.put("step-9", None)
    folder.put("step-10", None)
    assert latest(folder.root) == folder.root / "step-10"
    folder.put("a", 5)
    folder.put("z", 4)
    assert latest(folder.root) == folder.root / "a"
    folder.put("a2", 5)
    monkeypatch.chdir(folder.root)
    assert latest(".") == folder.root / "a2"


def cut(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])


SPOILERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no metadata": (lambda path: (path / ".metadata").unlink(), "cut short"),
    "cut data": (cut, "cut short"),
    "no data": (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
    "bad objects": (lambda path: (path / "objects.pt").write_bytes(b"junk"), "objects.pt"),
    "bad dmp.json": (lambda path: (path / "dmp.json").write_text("{"), "dmp.json cannot be read"),
    "no dmp.json": (lambda path: (path / "dmp.json").unlink(), "no dmp.json"),
    "being written": (lambda path: path.rename(path.with_name(f".{path.name}.saving")), "cut short, or still runs"),
}


@pytest.mark.parametrize("how", SPOILERS)
def test_half_ones_are_passed_over_and_named(how: str, folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    spoil, why = SPOILERS[how]
    folder.put("old", 1)
    folder.put("good", 2)
    spoil(folder.put("bad", 3))
    with caplog.at_level(logging.WARNING, "dmp"):
        assert latest(folder.root) == folder.root / "good"
    (record,) = caplog.records
    assert record.name == "dmp" and "bad" in record.getMessage() and why in record.getMessage()
    before = folder.names()
    assert keep_last(folder.root, 1) == [folder.root / "old"]
    assert folder.names() == before - {"old"}  # the damaged one may be mended, or be written now


def test_an_interrupted_exchange_counts(folder: Folder) -> None:
    """Killed between the two renames: what lay at x has the name of what is replaced."""
    folder.put("other", 1)
    folder.put(".x.replaced", 2)
    assert latest(folder.root) == folder.root / "x"
    assert load_checkpoint(folder.root / "x", nn.Linear(2, 1)) == 1
    assert keep_last(folder.root, 1) == [folder.root / "other"]
    folder.put("newer", 3)
    assert keep_last(folder.root, 1) == [folder.root / ".x.replaced"]
    assert folder.names() == {"newer"}


def test_what_is_not_ours_is_neither_found_nor_removed(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    root = folder.root
    state = {"weight": torch.zeros(2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save(state, checkpoint_id=root / "torch", no_dist=True)
    torch.save(state, root / "file.pt")
    for name in ("hugging-face", ".cache", ".my.saving", ".my.replaced", ".my.removing"):
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(b"\0")
    for name in ("foreign", ".foreign.removing"):
        (root / name).mkdir()
        (root / name / "dmp.json").write_text('{"format": "another"}')
    folder.put(".torch.replaced", 1)  # for loading, what is at `torch` counts
    elsewhere = Folder(tmp_path, folder.whole).put("elsewhere", 9)
    (root / "best").symlink_to(elsewhere)
    theirs = folder.names()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dmp"):
        assert latest(root) is None
        assert keep_last(root, 1) == []
    assert caplog.records == []
    folder.put("a", 1)
    folder.put("b", 2)
    assert latest(root) == root / "b"
    assert keep_last(root, 1) == [root / "a"]
    assert folder.names() == theirs | {"b"}
    assert load_checkpoint(root / "best", nn.Linear(2, 1)) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_none_to_keep_is_an_error(count: int, folder: Folder) -> None:
    folder.put("a", 1)
    with pytest.raises(ValueError, match=f"at least 1, got {count}"):
        keep_last(folder.root, count)
    assert folder.names() == {"a"}


def test_keeps_the_newest(folder: Folder) -> None:
    root = folder.root
    for second, name in enumerate(("step-30", "step-4", "step-20", "step-10")):
        folder.put(name, second)
    assert keep_last(root, 4) == keep_last(root, 9) == []
    assert keep_last(root, 2) == [root / "step-4", root / "step-30"]
    assert folder.names() == {"step-20", "step-10"}
    assert latest(root) == root / "step-10"


def test_what_killed_saves_left_goes(folder: Folder) -> None:
    """One that was written to after the newest whole one was begun may be being written now."""
    folder.put(".a.saving", 1)
    folder.put("a", 2)
    folder.put(".a.replaced", 1)
    assert keep_last(folder.root, 1) == []  # beside the newest: they may be changing places
    (folder.root / ".b.saving").mkdir()  # killed before its first file
    os.utime(folder.root / ".b.saving", (1, 1))
    folder.put("c", 3)
    folder.put(".d.saving", 4)
    now_written = folder.put(".e.saving", 1)
    os.utime(next(now_written.glob("*.distcp")), (4, 4))
    removed = keep_last(folder.root, 2)
    assert {path.name for path in removed} == {".a.saving", ".b.saving", ".a.replaced"}
    assert folder.names() == {"a", "c", ".d.saving", ".e.saving"}


def test_a_save_that_runs_stays(tmp_path: Path) -> None:
    """By the clocks of real saves and files."""
    save_checkpoint(tmp_path / "a", nn.Linear(2, 1))
    save_checkpoint(tmp_path / "b", nn.Linear(2, 1))
    time.sleep(0.02)  # files' times have steps of milliseconds
    (tmp_path / ".c.saving").mkdir()
    assert keep_last(tmp_path, 1) == [tmp_path / "a"]
    assert set(os.listdir(tmp_path)) == {"b", ".c.saving"}
    time.sleep(0.02)
    save_checkpoint(tmp_path / "d", nn.Linear(2, 1))
    assert set(keep_last(tmp_path, 1)) == {tmp_path / "b", tmp_path / ".c.saving"}


def by_what_tells_that_it_is_ours(path: Path) -> bool:
    return path.name not in ("dmp.json", "objects.pt")


class Killed(BaseException):
    """Stands for the end of the process: nothing in the code under test catches it."""


def test_a_removal_killed_anywhere_is_ended_by_the_next(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each change of the file system in turn, and in the order in which it would be hardest to go on."""
    root = folder.root
    entries = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(entries(path), key=by_what_tells_that_it_is_ours)))
    changes = [(os, "rename"), (Path, "unlink"), (Path, "rmdir")]
    steps = 0

    def counted(real: Callable[..., None], limit: int) -> Callable[..., None]:
        def change(*args: object, **kwargs: object) -> None:
            nonlocal steps
            steps += 1
            if steps > limit:
                raise Killed
            real(*args, **kwargs)

        return change

    for limit in range(100):
        for second, name in enumerate(("a", "b", "c")):
            folder.put(name, second)
        folder.put(".a.replaced", 0)
        steps = 0
        with monkeypatch.context() as patch:
            for owner, name in changes:
                patch.setattr(owner, name, counted(getattr(owner, name), limit))
            try:
                keep_last(root, 1)
                finished = True
            except Killed:
                finished = False
        assert latest(root) == root / "c"
        for name in folder.names() - {"a", "b", "c", ".a.replaced"}:
            assert name in (".a.removing", ".b.removing")
        for name in folder.names() & {"a", "b", "c"}:
            load_checkpoint(root / name, nn.Linear(2, 1))
        keep_last(root, 1)
        assert folder.names() == {"c"}
        shutil.rmtree(root / "c")
        if finished:
            break
    assert limit > 15  # three folders, each renamed and emptied
