"""`GradScaler`: the same numbers as one process, and a step that one rank must skip is skipped by all."""

from __future__ import annotations

import math

import pytest
import torch

from dmp import DistributedModelParallel, GradScaler, ShardError, ShardingEnv, full_state_dict
from tests.equality import attach, make_module
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, batch, compare, end_of, loss_of, make


def _scaled(mesh: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    oracle = make("llama_tied")
    model = DistributedModelParallel(make("llama_tied"), env)
    plain, mine = (torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (oracle, model))
    scaler = GradScaler(model, init_scale=1024.0)
    for step in range(3):
        batches = [batch(r, step) for r in range(env.data_size)]
        plain.zero_grad()
        (sum(loss_of(oracle, *b) for b in batches) / env.data_size).backward()  # type: ignore[union-attr]
        plain.step()
        mine.zero_grad()
        scaler.scale(loss_of(model, *batches[env.data_rank])).backward()
        scaler.step(mine)
        scaler.update()
    compare(model, mine, end_of(oracle, plain))
    before = full_state_dict(model)
    scaler.scale(loss_of(model, *batches[env.data_rank])).backward()
    if env.rank == env.size - 1:  # an overflow in what this rank alone holds
        grad = next(p.grad for p in model.parameters() if p.grad is not None)
        (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = math.inf
    scaler.step(mine)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(v, before[k]) for k, v in full_state_dict(model).items())


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "fsdp2", "fsdp2xtp2", "hsdp2x2", "replicate2xtp2"])
def test_a_step_is_skipped_by_all_or_none(mesh: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), _scaled, mesh)


def test_tables_updated_in_the_backward_pass_are_refused() -> None:
    module = make_module("ebc")
    attach(module, "sgd")
    model = DistributedModelParallel(module)
    with pytest.raises(ShardError, match="still scaled"):
        GradScaler(model)
    assert not GradScaler(model, enabled=False).is_enabled()
