"""Weights whose values lie in another order of dims (channels last, a transposed weight) are kept, saved and read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    export_safetensors,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
    to_unsharded,
)
from dmp.__main__ import main
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    """A table, channels last, a transposed weight, and a buffer of rows that lie apart."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.EmbeddingBag(20, 8, mode="sum")
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.over = nn.Linear(4, 2)
        self.over.weight = nn.Parameter(torch.randn(4, 2).t())
        self.register_buffer("scale", torch.rand(2, 6)[:, ::3])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.conv(self.rows(ids).view(-1, 2, 2, 2)).flatten(1)) @ self.scale
        return out


def same(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


def goes_everywhere(folder: str, name: str) -> None:
    path, env = Path(folder), ShardingEnv.from_mesh(mesh((2,), (name,)))
    model, optimizers = DistributedModelParallel(Net(), env), []
    same(full_state_dict(model), Net().state_dict())
    other = DistributedModelParallel(Net(1), env)
    for each in (model, other):
        optimizers.append(torch.optim.Adam(each.parameters()))
        each(torch.arange(6).view(3, 2)).square().sum().backward()
        optimizers[-1].step()
    wanted = full_state_dict(model)
    save_checkpoint(path / "ours", model, optimizers[0])
    pending = save_checkpoint(path / "behind", model, asynchronous=True)
    assert pending is not None
    pending.wait()
    export_safetensors(path / "hugging_face", model)
    for kind in ("hugging_face", "behind", "ours"):
        load_checkpoint(path / kind, other, optimizers[1] if kind == "ours" else None)
        same(full_state_dict(other), wanted)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
    for twin in (copy.deepcopy(model), to_unsharded(model)):
        same(full_state_dict(twin), wanted)


@pytest.mark.parametrize("name", ["dp", "shard"])
@pytest.mark.sampled(2)
def test_saved_exported_and_read(name: str, tmp_path: Path) -> None:
    run_ranks(2, goes_everywhere, str(tmp_path), name)
    plain = Net(2)
    load_checkpoint(tmp_path / "ours", plain)
    wanted = plain.state_dict()
    for kind in ("safetensors", "torch"):
        assert main(["convert", str(tmp_path / "ours"), str(tmp_path / f"as.{kind}"), "--to", kind]) == 0
        read = Net(3)
        load_checkpoint(tmp_path / f"as.{kind}", read)
        same(read.state_dict(), wanted)


def test_what_was_saved_as_it_lay_is_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older saves left such weights in their order, and were called damaged."""
    saved: Any = Net()
    monkeypatch.setattr("dmp.chunked._alone", lambda piece: piece)
    save_checkpoint(tmp_path / "saved", saved)
    read = Net(1)
    load_checkpoint(tmp_path / "saved", read)
    same(read.state_dict(), saved.state_dict())
    values = saved.over.weight.detach().t().contiguous().numpy().tobytes()
    (file,) = (file for file in (tmp_path / "saved").glob("*.distcp") if values in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(values) + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged.*'model.over.weight'"):
        load_checkpoint(tmp_path / "saved", read)


def test_an_expanded_buffer_is_named_before_anything_is_read(tmp_path: Path) -> None:
    """It can be saved, and not be filled: what came before it in the checkpoint had been."""
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(1).expand(3))
    save_checkpoint(tmp_path / "saved", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CheckpointError, match=r"'scale' of the model is expanded.*\.clone\(\)"):
        load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(model.weight, before["weight"] + 1)


def test_a_dtype_that_safetensors_has_not(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"'weight' has dtype torch.complex128, which safetensors files have no"):
        export_safetensors(tmp_path / "hf", model)
    assert not (tmp_path / "hf").exists()
