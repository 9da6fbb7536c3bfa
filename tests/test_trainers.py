"""What trainers and their libraries do to a model, beside dmp: right, or refused by name."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from dmp import CheckpointError, DistributedModelParallel, ShardError, ShardingEnv, export_safetensors
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import TABLES, wrap


def filtered(optimizer: str | None) -> tuple[list[str], list[str]]:
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model = wrap(optimizer=optimizer)
    for each in (model, wrap(ShardingEnv.single(), optimizer=optimizer).copy()):
        dense = dict(in_backward_optimizer_filter(each.named_parameters()))
        fused = dict(in_backward_optimizer_filter(each.named_parameters(), include=True))
        assert dense.keys() | fused.keys() == dict(each.named_parameters()).keys()
        assert fused.keys() == (set(TABLES) if optimizer else set())
    torch.optim.AdamW(dense.values())
    return list(dense), list(fused)


@pytest.mark.parametrize("optimizer", [None, "rowwise_adagrad"])
def test_torchrecs_filter_tells_tables_that_are_updated_in_the_backward_pass(optimizer: str | None) -> None:
    run_ranks(2, filtered, optimizer)


def saved(folder: str) -> None:
    """As Transformers' Trainer does it: `state_dict` and `save_file` on rank 0 alone, of dense weights alone."""
    import safetensors.torch

    takers = {"peft.utils.other": "storage_ptr", "accelerate.utils.other": "id_tensor_storage"}
    for each, function in takers.items():  # which have taken the function, or another like it
        vars(sys.modules.setdefault(each, types.ModuleType(each)))[function] = id
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    model = DistributedModelParallel(nn.Sequential(nn.Linear(4, 2)), env)
    for each, function in takers.items():
        with pytest.raises(ShardError, match=r"PEFT's save_pretrained\(path, state_dict=whole\) on rank 0"):
            getattr(sys.modules.pop(each), function)(model.state_dict()["0.weight"])
    if env.rank == 0:
        with pytest.raises(ShardError, match=r"rank's chunks alone.*export_safetensors.*Trainer.*save_model"):
            safetensors.torch.save_file(dict(model.state_dict()), f"{folder}/alone")
    export_safetensors(folder, model)
    assert safetensors.torch.load_file(f"{folder}/model.safetensors")["0.weight"].shape == (2, 4)
    safetensors.torch.save({"plain": torch.ones(2)})


def test_what_a_trainer_writes_on_one_rank_is_refused_in_words(tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path))


def loaded() -> None:
    """As Transformers' Trainer resumes: `strict` second, where TorchRec's wrapper has a prefix."""
    model = wrap()
    given = {"over.weight": torch.ones(6, 20), "new": torch.ones(1)}
    keys = model.load_state_dict(given, False)  # type: ignore[arg-type]
    assert keys.unexpected_keys == ["new"] and "over.bias" in keys.missing_keys
    assert torch.equal(model.module.over.weight, torch.ones(6, 20))
    with pytest.raises(CheckpointError, match="new"):
        model.load_state_dict(given, True)  # type: ignore[arg-type]


def test_strict_may_come_second_as_in_torch() -> None:
    run_ranks(2, loaded)
