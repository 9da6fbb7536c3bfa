"""Where a checkpoint is to lie: what is no folder that all ranks see is an error."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import CheckpointError, DistributedModelParallel, RanksError, row_wise
from dmp.checkpoint.convert import convert
from tests.ranks import run_ranks


class OfStore:
    """A path as libraries for object stores have them: as a path, what was fetched."""

    def __fspath__(self) -> str:
        return "/tmp/fetched"

    def __str__(self) -> str:
        return "s3://bucket/step-1"


URLS: tuple[Any, ...] = ("s3://bucket/step-1", Path("gs://bucket/step-1"), "file:///saved", OfStore())


@pytest.mark.parametrize("url", URLS, ids=str)
def test_urls(url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    calls = (
        lambda: dmp.save_checkpoint(url, model),
        lambda: dmp.load_checkpoint(url, model),
        lambda: dmp.export_safetensors(url, model),
        lambda: dmp.latest(url),
        lambda: dmp.keep_last(url, 1),
        lambda: convert(tmp_path, url, "dmp"),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=r"got the URL '\w+:/.*Mount the store"):
            call()
    assert not list(tmp_path.iterdir())


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    dmp.save_checkpoint("~/runs/step-1", nn.Linear(2, 1))
    assert dmp.latest("~/runs") == tmp_path / "home" / "runs" / "step-1"
    dmp.save_checkpoint("~step-2", nn.Linear(2, 1))  # nobody's home: a name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "~step-2"]


def saved_and_loaded(place: str) -> bool:
    model = DistributedModelParallel(nn.EmbeddingBag(8, 4), plan={"weight": row_wise()})
    whole = dmp.full_state_dict(model)["weight"]
    dmp.save_checkpoint(place, model)
    torch.nn.init.zeros_(model.module.weight)
    dmp.load_checkpoint(place, model)
    dmp.export_safetensors(f"{place}-exported", model)
    return dmp.latest(os.path.dirname(place)) == Path(place) and torch.equal(
        dmp.full_state_dict(model)["weight"], whole
    )


def test_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    """In a folder named in another encoding, and where the locale is C."""
    assert all(run_ranks(2, saved_and_loaded, os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))


def no_path_on_one() -> list[str]:
    model, rank = DistributedModelParallel(nn.Linear(2, 1)), torch.distributed.get_rank()
    calls: dict[str, Any] = {
        "save": lambda: dmp.save_checkpoint("s3://bucket/a" if rank else "/tmp/nowhere/a", model),
        "load": lambda: dmp.load_checkpoint(None if rank else "/tmp/nowhere/a", model),
        "export": lambda: dmp.export_safetensors("s3://bucket/a" if rank else "/tmp/nowhere/a", model),
    }
    found = []
    for call in calls.values():
        begun = time.monotonic()
        try:
            call()
            found.append("nothing")
        except (CheckpointError, RanksError) as error:
            found.append(str(error))
        assert time.monotonic() - begun < 15
    return found


def test_one_rank_without_a_path_is_told_to_all() -> None:
    """A rank that raised by itself left the others waiting until it had ended."""
    others, here = run_ranks(2, no_path_on_one, timeout=60)
    for words, theirs, own in zip(("s3:", "expected a path", "s3:"), others, here, strict=True):
        assert words in theirs and words in own, (theirs, own)


def saves_on_own_disks(folder: str, asynchronous: bool) -> list[str]:
    rank = torch.distributed.get_rank()
    here, before = Path(folder) / str(rank), Path.cwd()
    here.mkdir()
    os.chdir(here)  # one path, and on each rank another folder
    try:
        model = DistributedModelParallel(nn.Embedding(10, 4), plan={"weight": row_wise()})
        pending = dmp.save_checkpoint("/proc/self/cwd/saved/step-1", model, asynchronous=asynchronous)
        if pending is not None:
            pending.wait()
    finally:
        os.chdir(before)
    return []


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="a path that means another folder in each process")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_host_its_own_disk(asynchronous: bool, tmp_path: Path) -> None:
    errors = run_ranks(2, saves_on_own_disks, str(tmp_path), asynchronous, expect=CheckpointError)
    for error in errors:
        assert "not there for rank 0, such as __1_" in str(error) and "that every rank sees" in str(error)
    assert not (tmp_path / "0" / "saved" / "step-1").exists()
