"""The state of TorchRec's optimizer wrappers: through torch's distributed checkpoint, and through ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dmp
from dmp import DistributedModelParallel, ShardError, ShardingEnv
from tests.ranks import mesh, run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, model_of, wrapper
from tests.torchrec_dropin.test_optimizers import dense_of, train

pytestmark = IGNORED
NAMES = [f"ebc.embedding_bags.t{i}.weight" for i in range(2)]
PLANS: dict[str, Any] = {
    "one": {NAMES[0]: dmp.row_wise(), NAMES[1]: dmp.table_wise(1)},
    "columns": {NAMES[0]: dmp.column_wise([1, 0]), NAMES[1]: dmp.row_wise()},
    "copies": {NAMES[0]: dmp.data_parallel(), NAMES[1]: dmp.table_wise(0)},
}


def build(DistributedModelParallel: Any, in_backward: Any, **options: Any) -> tuple[Any, Any]:
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    model = DistributedModelParallel(module=model_of(in_backward, lr=LR), device=torch.device("cpu"), **options)
    dense = dense_of(model, torch.optim.Adagrad)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=8, value=0.1)]
    if in_backward is None:
        return model, CombinedOptimizer([model.fused_optimizer, WarmupOptimizer(dense, stages, lr=LR)])
    combination = CombinedOptimizer([("", WarmupOptimizer(model.fused_optimizer, stages, lr=LR)), ("", dense)])
    return model, combination


def resume(DistributedModelParallel: Any, path: str, in_backward: Any, **other: Any) -> None:
    """Two steps, a save, two more; another model loads and takes the same two."""
    model, opt = build(DistributedModelParallel, in_backward)
    train(model, opt, 2)
    dcp.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, checkpoint_id=path)
    expected = train(model, opt, 2)
    model, opt = build(DistributedModelParallel, in_backward, **other)
    train(model, opt, 1)  # so that there is state to load into, as theirs asks for
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    torch.testing.assert_close(train(model, opt, 2), expected, rtol=1e-5, atol=1e-6)


def _resumed(path: str) -> None:
    for in_backward in (torch.optim.Adagrad, None):
        for name, plan in PLANS.items():
            resume(wrapper("dmp"), f"{path}/{name}{in_backward is None}", in_backward, plan=plan)


def test_through_torchs_checkpoint_on_any_plan(tmp_path: Path) -> None:
    run_ranks(2, _resumed, str(tmp_path))


def _with_ours(path: str) -> None:
    for in_backward in (torch.optim.Adagrad, None):
        folder = f"{path}/{in_backward is None}"
        model, opt = build(wrapper("dmp"), in_backward)
        train(model, opt, 2)
        dmp.save_checkpoint(folder, model, opt)
        expected = train(model, opt, 2)
        model, opt = build(wrapper("dmp"), in_backward, plan=PLANS["columns"])
        dmp.load_checkpoint(folder, model, opt)
        torch.testing.assert_close(train(model, opt, 2), expected, rtol=1e-5, atol=1e-6)


def test_through_our_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _with_ours, str(tmp_path))


def _saved(path: str) -> list[torch.Tensor]:
    model, opt = build(wrapper("dmp"), torch.optim.Adagrad)
    train(model, opt, 2)
    dcp.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, checkpoint_id=path)
    dmp.save_checkpoint(path + "2", model, opt)
    return train(model, opt, 2)


def _loaded(path: str) -> list[torch.Tensor]:
    """On another mesh: two shard ranks by two replicas; the batches are those of two ranks."""
    env = ShardingEnv.from_mesh(mesh((2, 2), ("replicate", "shard")))
    losses = []
    for ours in (False, True):
        model, opt = build(DistributedModelParallel, torch.optim.Adagrad, env=env, plan=PLANS["columns"])
        state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
        if ours:
            dmp.load_checkpoint(path + "2", model, opt)
        else:
            train(model, opt, 1, rank=dist.get_rank() % 2)
            state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["optimizer"])
        losses += train(model, opt, 2, rank=dist.get_rank() % 2)
    return losses


def test_on_another_mesh(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    expected = run_ranks(2, _saved, path)
    for rank, losses in enumerate(run_ranks(4, _loaded, path)):
        torch.testing.assert_close(losses, [*expected[rank % 2]] * 2, rtol=1e-5, atol=1e-6)


def _refused() -> list[str]:
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

    told = []
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))  # dense weights are sharded
    for which, options in ((env, {}), (None, {"track_grad_norm": True})):
        model = DistributedModelParallel(model_of(), env=which, plan=PLANS["one"])
        with pytest.raises(ShardError) as error:
            GradientClippingOptimizer(dense_of(model), clipping=GradientClipping.NORM, **options)
        told.append(str(error.value))
        GradientClippingOptimizer(dense_of(model), clipping=GradientClipping.VALUE)
    return told


def test_a_norm_that_would_be_another_is_refused() -> None:
    for of_dtensors, of_chunks in run_ranks(2, _refused):
        assert "(DTensors), whose gradients it passes over: call dmp.clip_grad_norm_" in of_dtensors
        assert "tables of which a rank has chunks" in of_chunks
