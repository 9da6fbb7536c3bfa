"""What trainers and their libraries do to a model, beside dmp: right, or refused by name."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    export_safetensors,
    full_optimizer_state_dict,
    full_state_dict,
)
from dmp.state import trainer_saves
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


class Trainer:
    """What Transformers' does of its own: the first rank alone asks for state dicts, and writes."""

    def __init__(self, model: nn.Module, folder: str) -> None:
        self.model, self.folder, self.rank = model, folder, dist.get_rank()
        self.optimizer, self.args = torch.optim.Adam(model.parameters()), SimpleNamespace(save_on_each_node=False)

    def save_model(self, output_dir: str) -> None:
        self._save(output_dir)

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if self.rank == 0:
            torch.save(self.model.state_dict() if state_dict is None else state_dict, f"{output_dir}/model.pt")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.rank == 0:
            torch.save(self.optimizer.state_dict(), f"{output_dir}/optimizer.pt")


def written_by_a_trainer(folder: str, module: str) -> None:
    sys.modules[module] = SimpleNamespace(Trainer=Trainer)  # type: ignore[assignment]
    model = wrap(ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    del sys.modules[module]
    trainer = Trainer(model, folder)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()
    before = full_optimizer_state_dict(model, trainer.optimizer)["state"]
    trainer.save_model(folder)
    trainer._save_optimizer_and_scheduler(folder)
    dist.barrier()
    state = torch.load(f"{folder}/optimizer.pt")
    assert all(type(value) is torch.Tensor for of in state["state"].values() for value in of.values())
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(state)
    torch.testing.assert_close(full_optimizer_state_dict(model, other)["state"], before, rtol=0, atol=0)
    torch.testing.assert_close(torch.load(f"{folder}/model.pt"), full_state_dict(model), rtol=0, atol=0)
    updated, said = wrap(model.env, optimizer="rowwise_adagrad"), []
    with mock.patch.object(trainer_saves, "say_once", lambda text, **_: said.append(text)):
        Trainer._save_optimizer_and_scheduler(trainer, folder)
        assert not said
        trainer.model, trainer.optimizer = updated, torch.optim.Adam(updated.module.over.parameters())
        trainer._save_optimizer_and_scheduler(folder)
    assert "state of their optimizers" in said[0]


def test_what_a_trainer_writes_on_one_rank_is_whole(tmp_path: Path) -> None:
    """Of weights rank 0 was refused, where others went on; of the optimizer it wrote its part, for every rank."""
    run_ranks(2, written_by_a_trainer, str(tmp_path), "transformers.trainer")


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
