"""`GradScaler`: the same numbers as one process, and a step that one rank must skip is skipped by all."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, GradScaler, ShardError, ShardingEnv, full_state_dict, row_wise
from tests.equality import attach, make_batch, make_module
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
@pytest.mark.sampled(6)
def test_a_step_is_skipped_by_all_or_none(mesh: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), _scaled, mesh)


def _torchs(axis: str, fused: bool) -> list[float]:
    """Torch's own scaler; in the second step one rank's chunk of a table overflows."""
    module = nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum"), nn.Linear(4, 2))
    model = DistributedModelParallel(
        module, ShardingEnv.from_mesh(mesh_of((2,), (axis,))), plan={"0.weight": row_wise()}
    )
    rank, scaler = model.env.rank, torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scales, weights = [], [full_state_dict(model)]
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(8).view(4, 2)[2 * rank : 2 * rank + 2]).sum()
        scaler.scale(loss).backward()
        if step == 1 and rank == 0:
            model.module[0].weight.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(full_state_dict(model))
    same = [all(torch.equal(old[k], new[k]) for k in new) for old, new in pairwise(weights)]
    assert same == [False, True, False]
    of_all = [torch.empty_like(weights[3]["1.weight"]) for _ in range(2)]
    dist.all_gather(of_all, weights[3]["1.weight"])
    assert torch.equal(*of_all)
    return scales


@pytest.mark.parametrize(("axis", "fused"), [("dp", False), ("dp", True), ("shard", False)])
def test_torchs_own_scaler_decides_for_all_ranks(axis: str, fused: bool) -> None:
    assert run_ranks(2, _torchs, axis, fused) == [[64.0, 32.0, 32.0]] * 2


def test_torchs_own_scaler_leaves_others_alone_and_refuses_tables_that_a_backward_updates() -> None:
    module = make_module("bag")
    attach(module, "sgd")
    model, other, scaler = (
        DistributedModelParallel(module),
        nn.Linear(2, 1),
        torch.amp.GradScaler("cpu", init_scale=2.0),
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = other.bias.detach().clone()
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert torch.allclose(other.bias, before - 0.1)
    loss = model(*make_batch("bag", 0, 0)).sum()
    for outputs in (loss, (loss, loss), iter([loss])):
        with pytest.raises(ShardError, match="'weight' is updated in the backward pass, where its gradient is still"):
            scaler.scale(outputs)
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss


def test_tables_updated_in_the_backward_pass_are_refused() -> None:
    module = make_module("ebc")
    attach(module, "sgd")
    model = DistributedModelParallel(module)
    with pytest.raises(ShardError, match="still scaled"):
        GradScaler(model)
    assert not GradScaler(model, enabled=False).is_enabled()
