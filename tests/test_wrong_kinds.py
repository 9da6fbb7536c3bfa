"""What a habit from elsewhere hands to our functions in the model's place, or the path's: an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel
from planner import ShardingPlanner

HANDED: dict[str, tuple[Callable[[Any, Any, str], Any], str]] = {
    "parameters to clip": (
        lambda m, o, path: dmp.clip_grad_norm_(m.parameters(), 1.0),
        "takes the model; got generator. Of the model's parameters torch.nn.utils.clip_grad_norm_ takes the same norm",
    ),
    "a device to a scaler": (lambda m, o, path: dmp.GradScaler("cuda"), "a torch.nn.Module around it; got str"),
    "state to be gathered": (lambda m, o, path: dmp.full_state_dict(m.state_dict()), "got collections.OrderedDict"),
    "state to be saved": (lambda m, o, path: dmp.save_checkpoint(path, m.state_dict()), "got collections.OrderedDict"),
    "the path last": (lambda m, o, path: dmp.save_checkpoint(m, path), "save_checkpoint(path, model, ...): expected a"),
    "a file to load": (lambda m, o, path: dmp.load_checkpoint(m, path), "expected a path first; got dmp.wrap.wrapper"),
    "optimizer first": (lambda m, o, path: dmp.full_optimizer_state_dict(o, m), "got torch.optim.sgd.SGD"),
    "optimizer in a pipeline": (lambda m, o, path: dmp.TrainPipeline(o, m), "got torch.optim.sgd.SGD"),
    "a planner as the plan": (
        lambda m, o, path: DistributedModelParallel(nn.Linear(2, 1), plan=ShardingPlanner()),
        "a planner is passed as planner=",
    ),
    "the model last": (
        lambda m, o, path: dmp.verify(nn.Linear(2, 1), m, 0),
        "expected the unsharded module second; got",
    ),
    "weights to verify": (lambda m, o, path: dmp.verify(m, m.state_dict(), 0), "the unsharded module second; got"),
}


@pytest.mark.parametrize("name", HANDED)
def test_what_was_expected_is_said(name: str, tmp_path: Path) -> None:
    model = DistributedModelParallel(nn.Linear(2, 1))
    call, words = HANDED[name]
    with pytest.raises(dmp.DmpError) as error:
        call(model, torch.optim.SGD(model.parameters(), 0.1), str(tmp_path / "saved"))
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())
