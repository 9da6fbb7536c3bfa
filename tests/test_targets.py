"""A kind of checkpoint of another package: a source and a target of a few lines each, found by entry point."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmp import CheckpointError, load_checkpoint, registry, save_checkpoint
from dmp import __main__ as command_line
from dmp.chunked import ChunkedTensor, as_chunks


class NpyFolder:
    """A folder with a file for each weight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self.shapes = {f"model.{f.stem}": (np.load(f).shape, torch.float32) for f in path.glob("*.npy")}

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[Any]:
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(torch.from_numpy(np.load(self.path / f"{key.removeprefix('model.')}.npy")))


def open_npy(path: Path) -> NpyFolder | None:
    ASKED.append(path)
    return NpyFolder(path) if list(path.glob("*.npy")) else None


class NpyTarget:
    weights_only = True

    def check(self, path: Path) -> None:
        if path.exists():
            raise CheckpointError(f"{path} is there already")

    def write(self, source: Any, path: Path) -> None:
        path.mkdir()
        for key in source.shapes:
            if key.startswith("model."):
                size, dtype = source.shapes[key]
                value = torch.empty(size, dtype=dtype)
                source.read({key: as_chunks(value)})
                np.save(path / f"{key.removeprefix('model.')}.npy", value.numpy())


ASKED: list[Path] = []


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip leaves a package: what it gives is said in a file beside it."""
    about = tmp_path / "site" / "npy_folders-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: npy-folders\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[dmp.sources]\nnpy = {__name__}:open_npy\n[dmp.targets]\nnpy = {__name__}:NpyTarget\ndmp = nowhere:Missing\n"
    )
    monkeypatch.syspath_prepend(about.parent)
    registry._points.cache_clear()
    ASKED.clear()
    yield
    registry._points.cache_clear()


def test_through_convert_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ours, theirs, back = (str(tmp_path / name) for name in ("ours", "theirs", "back"))
    save_checkpoint(ours, model, optimizer)
    assert command_line.main(["convert", ours, theirs, "--to", "npy"]) == 0
    assert "2 weights" in (said := capsys.readouterr().out) and "were left out" in said
    assert {path.name for path in Path(theirs).iterdir()} == {"weight.npy", "bias.npy"}
    assert command_line.main(["convert", ours, theirs, "--to", "npy"]) == 1
    assert ASKED == []  # ours knew what lay there

    loaded = nn.Linear(3, 2)
    load_checkpoint(theirs, loaded)
    assert torch.equal(loaded.weight, model.weight)
    assert command_line.main(["convert", theirs, back]) == 0  # to ours, whatever another package calls "dmp"
    load_checkpoint(back, nn.Linear(3, 2))
    assert [Path(theirs)] * 2 == ASKED


def test_what_nobody_knows(tmp_path: Path) -> None:
    """Each package is asked, and the errors are those without one."""
    (tmp_path / "junk").mkdir()
    (tmp_path / "file").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="junk is no checkpoint: it has no dmp"):
        load_checkpoint(tmp_path / "junk", nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"file cannot be read as a torch\.save file.*no zip archive"):
        load_checkpoint(tmp_path / "file", nn.Linear(1, 1))
    assert [tmp_path / "junk", tmp_path / "file"] == ASKED
