"""Copies of tables on a replicate axis: equal to the bit with shared gradients, averaged where an interval is set."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import ChunkedTensor, DistributedModelParallel, ShardError, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingBagCollectionSharder, EmbeddingBagSharder, EmbeddingCollectionSharder
from tests.equality import LR, attach, env_of, loss_of, make_batch, make_module
from tests.ranks import run_ranks


def _local(model: nn.Module) -> list[torch.Tensor]:
    values = model.state_dict().values()
    return [c for v in values for c in (v.chunks if isinstance(v, ChunkedTensor) else [v])]


def _bits_equal_over(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, flat, group=group)
    return all(torch.equal(o, flat) for o in others)


def _shared(mesh: str) -> None:
    env = env_of(mesh)
    module = make_module("ebc")
    attach(module, "rowwise_adagrad")
    layouts = [row_wise(), table_wise(0), row_wise(), data_parallel(), table_wise(env.table_size - 1)]
    plan = dict(zip((n for n, _ in module.named_parameters()), layouts, strict=True))
    model = DistributedModelParallel(module, env=env, plan=plan)
    for step in range(4):
        loss_of(model(*make_batch("ebc", env.rank, step))).backward()
        assert _bits_equal_over(env.group("replicate"), _local(model))


@pytest.mark.parametrize(("mesh", "world"), [("replicate2", 2), ("replicate2xshard2", 4), ("shard2xreplicate2", 4)])
@pytest.mark.sampled(3)
def test_copies_stay_equal_to_the_bit(mesh: str, world: int) -> None:
    run_ranks(world, _shared, mesh)


def _averaged(mesh: str, interval: int) -> None:
    """Each copy trains on its own samples; every `interval` updates all become their mean."""
    env = env_of(mesh)
    module = make_module("ebc")
    attach(module, "sgd")
    plan = {n: row_wise() if i % 2 else data_parallel() for i, (n, _) in enumerate(module.named_parameters())}
    sharder = EmbeddingBagCollectionSharder(sync_interval=interval)
    model = DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder])
    replicas = [[r for r in range(env.size) if env.replica_of(r) == c] for c in range(env.size // env.table_size)]
    plain = [make_module("ebc") for _ in replicas]
    for step in range(2 * interval):
        for one, ranks in zip(plain, replicas, strict=True):
            batches = [b for b in (make_batch("ebc", r, step) for r in ranks) if b[0].stride()]  # type: ignore[attr-defined]
            total = sum((loss_of(one(*copy.deepcopy(b))) for b in batches), torch.zeros((), requires_grad=True))
            (total / len(ranks)).backward()
            with torch.no_grad():
                for p in one.parameters():
                    p -= LR * (0 if p.grad is None else p.grad)
                    p.grad = None
        is_time = (step + 1) % interval == 0
        if is_time:
            with torch.no_grad():
                for together in zip(*(one.parameters() for one in plain), strict=True):
                    mean = torch.stack(list(together)).mean(0)
                    for p in together:
                        p.copy_(mean)
        loss_of(model(*make_batch("ebc", env.rank, step))).backward()
        expected = dict(plain[env.replica_of(env.rank)].named_parameters())
        for name, value in model.state_dict().items():
            whole = isinstance(value, ChunkedTensor)
            for chunk, at in zip(value.chunks, value.offsets, strict=True) if whole else [(value, (0, 0))]:
                part = expected[name].detach()[at[0] : at[0] + len(chunk)]
                torch.testing.assert_close(chunk.detach(), part, atol=1e-5, rtol=1e-5)
        if env.axes("replicate"):
            assert _bits_equal_over(env.group("replicate"), _local(model)) == is_time


@pytest.mark.parametrize(("mesh", "world"), [("replicate2", 2), ("replicate2xshard2", 4)])
@pytest.mark.sampled(2)
def test_copies_are_averaged_every_interval(mesh: str, world: int) -> None:
    run_ranks(world, _averaged, mesh, 3)


def test_an_interval_needs_in_backward_optimizers() -> None:
    module = nn.Sequential(nn.EmbeddingBag(4, 4, mode="sum"))
    sharder = EmbeddingBagSharder(sync_interval=2)
    with pytest.raises(ShardError, match="no in-backward optimizer"):
        DistributedModelParallel(module, plan={"0.weight": table_wise(0)}, sharders=[sharder])


def _bits(mesh: str, kind: str, interval: int) -> bytes:
    """What is left of a run on this rank: results, weights and optimizer state."""
    env, module = env_of(mesh), make_module(kind)
    attach(module, "adagrad")
    layouts = [row_wise(), table_wise(0), column_wise([0, 1]), data_parallel(), table_wise(env.table_size - 1)]
    plan = dict(zip((n for n, _ in module.named_parameters()), layouts, strict=False))
    sharders = [s(sync_interval=interval) for s in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)]
    model = DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)
    digest = hashlib.sha256()
    for step in range(5):
        loss = loss_of(model(*make_batch(kind, env.data_rank, step)))
        loss.backward()
        digest.update(loss.detach().numpy().tobytes())
    for states in model.fused_optimizer.state_dict()["state"].values():
        for value in states.values():
            for chunk in value.chunks if isinstance(value, ChunkedTensor) else [torch.as_tensor(value)]:
                digest.update(chunk.numpy().tobytes())
    for chunk in _local(model):
        digest.update(chunk.detach().contiguous().numpy().tobytes())
    return digest.digest()


@pytest.mark.parametrize(
    ("mesh", "kind", "interval"),
    [("replicate2xshard2", "ebc", 1), ("replicate2xshard2", "ec", 2), ("dp4", "ebc", 1), ("host2xlocal2", "ebc", 1)],
)
@pytest.mark.sampled(6)
def test_the_same_run_gives_the_same_bits(mesh: str, kind: str, interval: int) -> None:
    assert run_ranks(4, _bits, mesh, kind, interval) == run_ranks(4, _bits, mesh, kind, interval)
