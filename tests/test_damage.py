"""Damaged checkpoints: what is wrong is named, on every rank, and the model is as it was."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dmp import CheckpointError, DistributedModelParallel, ShardingEnv, load_checkpoint, row_wise, save_checkpoint
from dmp.state.gather import full_state_dict
from dmp.state.optimizer_state import full_optimizer_state_dict
from tests.ranks import mesh, run_ranks
from tests.survival_jobs import full_disk

ROWS, DIM = 40, 8


class Model(nn.Module):
    """A table and a dense layer, trained for two steps so that its optimizer has state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(ROWS, DIM)
        self.over = nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids))


def trained(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(step, ROWS, 3)).square().mean().backward()
        optimizer.step()
    return optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state = full_optimizer_state_dict(model, optimizer)
    values = {f"{name}/{key}": v for name, of in state["state"].items() for key, v in of.items()}
    rates = {f"lr of {name}": group["lr"] for group in state["param_groups"] for name in group["params"]}
    return {**full_state_dict(model), **values, **rates}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(bool(torch.as_tensor(a[k] == b[k]).all()) for k in a)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_any_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    """Padding between records, and the names in a zip archive's local headers, are the harmless ones."""
    path, rng, raised = tmp_path / "saved", random.Random(0), 0
    saved = Model()
    save_checkpoint(path, saved, trained(saved))
    files = sorted(path.iterdir())
    assert {file.suffix or file.name for file in files} == {".distcp", ".json", ".pt", ".metadata"}
    loaded = Model(1)
    optimizer = trained(loaded, lr=0.5)
    load_checkpoint(path, loaded, optimizer)
    good, fresh = flat(loaded, optimizer), None
    for _ in range(120):
        file = rng.choice(files)
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        model = Model(1)
        own = trained(model, lr=0.5)
        fresh = fresh or flat(model, own)
        expected, said = good, str(path)
        try:
            load_checkpoint(path, model, own)
        except CheckpointError as error:
            expected, said, raised = fresh, str(error), raised + 1
        assert str(path) in said
        assert equal(flat(model, own), expected), f"bit {bit} of {file.name}"
        flip(file, bit)
    assert raised > 80


def place_of(path: Path, values: torch.Tensor) -> tuple[Path, int]:
    """The file with these bytes, and where in it they begin."""
    wanted = values.detach().contiguous().numpy().tobytes()
    files = [path] if path.is_file() else sorted(path.glob("*.distcp"))
    places = [(file, file.read_bytes().find(wanted)) for file in files]
    ((file, at),) = [(file, at) for file, at in places if at >= 0]
    return file, at


def save_ours(path: Path, model: Model) -> None:
    save_checkpoint(path, model)


def save_with_torch(path: Path, model: Model) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)


def save_a_file(path: Path, model: Model) -> None:
    torch.save(model.state_dict(), path)


def load_on_ranks(path: str) -> tuple[bool, str]:
    """Whether the sharded model was left as it was, and what was said."""
    env = ShardingEnv.from_mesh(mesh((2,)))
    model = DistributedModelParallel(Model(1), env, plan={"table.weight": row_wise()})
    before = flat(model, None)
    try:
        load_checkpoint(path, model)
    except CheckpointError as error:
        return equal(flat(model, None), before), str(error)
    return False, "nothing"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [save_ours, save_with_torch, save_a_file], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["table.weight", "over.bias"])
@pytest.mark.sampled(2)
def test_a_flipped_bit_is_named_on_every_rank(save: Callable[..., None], name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "saved", Model()
    save(path, model)
    file, at = place_of(path, model.get_parameter(name))
    flip(file, 8 * (at + 5) + 2)
    for is_unchanged, said in run_ranks(2, load_on_ranks, str(path)):
        assert is_unchanged and f"{file} is damaged" in said and name in said, said


def test_a_file_that_is_lost_between_the_check_and_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "saved", Model()
    save_checkpoint(path, Model(1))
    monkeypatch.setattr(
        "dmp.checkpoint.sources.native.Folder.check", lambda *_: [file.unlink() for file in path.glob("*.distcp")][:0]
    )
    with pytest.raises(CheckpointError, match=r"\.distcp"):
        load_checkpoint(path, model)


@pytest.mark.parametrize(
    "name", ["checksums.json", "tensors.json", ".metadata", "dmp.json", "objects.pt", "plan.json", "*.distcp"]
)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "saved", Model(1)
    save_checkpoint(path, Model())
    gone = next(path.glob(name))
    gone.unlink()
    before = flat(model, None)
    with pytest.raises(CheckpointError, match=re.escape(gone.name)):
        load_checkpoint(path, model)
    assert equal(flat(model, None), before)


def test_a_file_of_another_save_is_none_of_this_one(tmp_path: Path) -> None:
    """Whole, and of the same tensors: it had the same name, and weights of two steps were loaded, in silence."""
    paths, model = [tmp_path / "step-1", tmp_path / "step-2"], Model(1)
    for seed, path in enumerate(paths):
        save_checkpoint(path, Model(seed))
    before = flat(model, None)
    first, second = (sorted(file.name for file in path.glob("*.distcp")) for path in paths)
    assert not set(first) & set(second)
    (paths[0] / first[0]).unlink()
    (paths[1] / second[0]).rename(paths[0] / second[0])
    with pytest.raises(CheckpointError, match=f"{first[0]} is missing"):
        load_checkpoint(paths[0], model)
    assert equal(flat(model, None), before)


@pytest.mark.parametrize("version", [1, 2])
def test_formats_before_are_read(version: int, tmp_path: Path) -> None:
    """The first had no checksums, the first two no tensors.json."""
    path, model = tmp_path / "saved", Model(1)
    saved = Model()
    save_checkpoint(path, saved)
    about = json.dumps({**json.loads((path / "dmp.json").read_text()), "version": version})
    (path / "dmp.json").write_text(about)
    (path / "tensors.json").unlink()
    crcs = json.loads((path / "checksums.json").read_text())
    if version == 1:
        (path / "checksums.json").unlink()
    else:
        del crcs["tensors.json"]
        (path / "checksums.json").write_text(json.dumps({**crcs, "dmp.json": zlib.crc32(about.encode())}))
    load_checkpoint(path, model)
    assert equal(flat(model, None), flat(saved, None))


def test_a_failed_save_in_the_background_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk(100):
        pending = save_checkpoint(tmp_path / "saved", Model(), asynchronous=True)
        assert pending is not None
        with pytest.raises(CheckpointError, match="saved"):
            pending.wait()
    assert "a save in the background failed" in caplog.text and os.strerror(errno.EFBIG) in caplog.text


def different_paths(folder: str) -> list[str]:
    """Each rank has a path of its own making; what each is told."""
    said = []
    env = ShardingEnv.from_mesh(mesh((2,)))
    model = DistributedModelParallel(Model(1), env, plan={"table.weight": row_wise()})
    own = f"{folder}/at-{dist.get_rank()}"
    for call in (save_checkpoint, load_checkpoint):
        try:
            call(own, model)  # type: ignore[operator]
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_ranks_at_different_paths_are_told(tmp_path: Path) -> None:
    for said in run_ranks(2, different_paths, str(tmp_path)):
        assert len(said) == 2 and all("at-0" in text and "at-1" in text and "rank 1" in text for text in said)
    assert not list(tmp_path.iterdir())
