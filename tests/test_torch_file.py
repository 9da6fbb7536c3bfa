"""`torch.save` files as people write them: the keys they use, and optimizer state by name or by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import CheckpointError, DistributedModelParallel, load_checkpoint, table_wise
from tests.ranks import mesh, run_ranks

KEYS = [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict"), ("state_dict", "optimizer")]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(module: nn.Module, parameters: Any) -> torch.optim.Optimizer:
    groups = list(parameters)
    optimizer = torch.optim.AdamW([{"params": groups[:2]}, {"params": groups[2:], "lr": 0.7}], lr=0.3)
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys[0])
def test_named_state_is_found(keys: tuple[str, str], tmp_path: Path) -> None:
    saved, loaded = model(0), model(1)
    optimizer = trained(saved, reversed(list(saved.named_parameters())))  # the order says nothing
    torch.save(
        {keys[0]: saved.state_dict(), keys[1]: optimizer.state_dict(), "extra": {"epoch": 3}}, tmp_path / "all.pt"
    )
    own = torch.optim.AdamW([{"params": loaded[1].parameters()}, {"params": loaded[0].parameters()}], lr=0.1)
    assert load_checkpoint(tmp_path / "all.pt", loaded, own) == {"epoch": 3}
    assert [group["lr"] for group in own.param_groups] == [0.3, 0.7]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name))
        for key, value in optimizer.state[saved.get_parameter(name)].items():
            assert torch.equal(own.state[parameter][key], value)


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys[0])
def test_state_by_number_is_not_guessed(
    keys: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, loaded = model(0), model(1)
    optimizer = trained(saved, saved.parameters())
    torch.save({keys[0]: saved.state_dict(), keys[1]: optimizer.state_dict()}, tmp_path / "all.pt")
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"goes by number.*pass no optimizer to load the weights alone"):
        load_checkpoint(tmp_path / "all.pt", loaded, torch.optim.AdamW(loaded.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    caplog.clear()
    load_checkpoint(tmp_path / "all.pt", loaded)
    assert "goes by number" in caplog.text
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in loaded.state_dict().items())


class _Unknown:
    pass


def test_what_one_rank_had_is_named_and_nothing_is_run(tmp_path: Path) -> None:
    """torch's own text is of thirty lines, and advises to allow the class."""
    model = nn.Linear(2, 1)
    torch.save({"weight": _Unknown(), "bias": torch.zeros(1)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"file.pt holds an object of .*_Unknown, which is not looked up or run"):
        load_checkpoint(tmp_path / "file.pt", model)
    _Unknown.__module__, _Unknown.__qualname__ = "torch.distributed._shard.sharded_tensor.api", "ShardedTensor"
    with mock.patch("torch.distributed._shard.sharded_tensor.api.ShardedTensor", _Unknown):
        torch.save({"weight": _Unknown(), "bias": torch.zeros(1)}, tmp_path / "rank0.pt")
    with pytest.raises(CheckpointError, match=r"holds a ShardedTensor: what one rank had .* load the folder") as error:
        load_checkpoint(tmp_path / "rank0.pt", model)
    assert "add_safe_globals" not in str(error.value)


def _fully_sharded(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    saved, path = fully_shard(nn.Linear(4, 2), mesh=mesh((2,))), folder / f"rank{dist.get_rank()}.pt"
    torch.save(saved.state_dict(), path)
    load_checkpoint(path, nn.Linear(4, 2))


def test_what_one_rank_had_of_split_weights(tmp_path: Path) -> None:
    """torch reads DTensors, without what is in them."""
    for error in run_ranks(2, _fully_sharded, tmp_path, expect=CheckpointError):
        assert "holds a DTensor: what one rank had of a sharded model" in str(error)


def read_by_torch(path: Path) -> str:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

    model = DistributedModelParallel(nn.EmbeddingBag(6, 4), plan={"weight": table_wise(1)})
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(
            model.state_dict(),
            checkpoint_id=path,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
        )
    return str(error.value)


def test_torchs_reader_says_what_reads_into_tables(tmp_path: Path) -> None:
    """Rank 1 has a part to ask for, and rank 0 none: it waited for the other for a minute."""
    torch.save(nn.EmbeddingBag(6, 4).state_dict(), tmp_path / "all.pt")
    assert all(
        "load_checkpoint(path, model) reads" in text for text in run_ranks(2, read_by_torch, tmp_path / "all.pt")
    )
