"""What trainers and their libraries do to a model, beside dmp: right, or refused by name."""

from __future__ import annotations

import pytest
import torch

from dmp import CheckpointError, ShardingEnv
from tests.ranks import run_ranks
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
