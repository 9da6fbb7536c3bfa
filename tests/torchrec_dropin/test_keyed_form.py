"""`model.fused_optimizer` in the form of TorchRec's keyed optimizers, member by member; one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dmp import DistributedModelParallel, ShardError
from tests.torchrec_dropin.scripts import IGNORED, LR, batch, model_of
from tests.torchrec_dropin.test_optimizers import dense_of

pytestmark = IGNORED
TABLES = [f"ebc.embedding_bags.t{i}.weight" for i in range(2)]


def made(in_backward: Any = torch.optim.Adam) -> tuple[DistributedModelParallel, Any]:
    from torchrec.optim.keyed import CombinedOptimizer

    model = DistributedModelParallel(model_of(in_backward, lr=LR))
    return model, CombinedOptimizer([model.fused_optimizer, dense_of(model)])


def step(model: DistributedModelParallel, opt: Any) -> None:
    opt.zero_grad()
    model(batch(0, 0)).backward()
    opt.step()


def test_parameters_and_state() -> None:
    from torchrec.optim.fused import FusedOptimizer

    model, opt = made()
    fused = model.fused_optimizer
    assert fused is model.fused_optimizer and isinstance(fused, FusedOptimizer) and "FusedOptimizer" in repr(fused)
    assert list(fused.params) == TABLES and list(fused.state) == list(fused.params.values())
    assert fused.defaults["_save_param_groups"] is False
    step(model, opt)
    state = fused.state[fused.params[TABLES[0]]]
    assert state["step"] == 1 and state["exp_avg"].abs().sum() > 0  # live
    with pytest.raises(TypeError):
        state["step"] = 0  # type: ignore[index]
    with pytest.raises(ShardError, match=f"the state of '{TABLES[0]}' is the model's"):
        fused.state[fused.params[TABLES[0]]] = {}
    with pytest.raises(ShardError, match="settled when a model is wrapped"):
        fused.add_param_group({"params": []})


def test_what_combined_optimizers_hand_on() -> None:
    model, opt = made()
    step(model, opt)
    opt.set_optimizer_step(7)
    assert all(state["step"] == 7 for state in model.fused_optimizer.state.values())
    model.fused_optimizer.update_hyper_parameters({"lr": 0.5, "beta1": 0.8})
    assert [(g["lr"], g["betas"]) for g in model.fused_optimizer.param_groups] == [(0.5, (0.8, 0.999))]
    with pytest.raises(ShardError, match=r"got \['momentum'\]; the tables' optimizer has"):
        model.fused_optimizer.update_hyper_parameters({"lr": 0.1, "momentum": 0.8})
    assert model.fused_optimizer.param_groups[0]["lr"] == 0.5
    opt.init_state()  # theirs gives every parameter a gradient of zeros and steps
    opt.zero_grad()
    assert all(p.grad is None for p in model.fused_optimizer.params.values())


def test_param_groups_in_state_dicts() -> None:
    model, opt = made()
    step(model, opt)
    opt.save_param_groups(True)
    model.fused_optimizer.param_groups[0]["lr"] = 0.25
    saved = copy.deepcopy(opt.state_dict())
    assert [g["lr"] for g in saved["param_groups"]] == [0.25, LR]
    other, loaded = made()
    step(other, loaded)
    loaded.save_param_groups(True)
    loaded.load_state_dict(saved)
    assert other.fused_optimizer.param_groups[0]["lr"] == 0.25
    torch.testing.assert_close(loaded.state_dict()["state"], saved["state"], rtol=0, atol=0)


def test_a_schedule_of_its_own_is_in_our_state_dict() -> None:
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    model, _ = made()
    opt = WarmupOptimizer(model.fused_optimizer, stages, lr=1.0)
    for _ in range(3):
        step(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    assert saved["state"]["__warmup"]["warmup"].tolist() == [3, 0] and saved["param_groups"][0]["lr"] == 0.75
    other, _ = made()
    with pytest.raises(RuntimeError, match="unknown parameter '__warmup'"):
        other.fused_optimizer.load_state_dict(saved)
    again = WarmupOptimizer(other.fused_optimizer, stages, lr=1.0)
    again.load_state_dict(saved)
    step(other, again)
    assert other.fused_optimizer.param_groups[0]["lr"] == 1.0  # after four
