"""`clip_grad_norm_`: the unsharded model's norm under every layout and mesh, and one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from dmp import DistributedModelParallel, ShardError, ShardingEnv, row_wise
from dmp.chunked import as_chunks, chunk_views
from dmp.state.clip import clip_grad_norm_
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap.values.whole import gather
from tests.ranks import mesh, run_ranks
from tests.test_state import GLOBAL_BATCH, TABLES, WORLDS, batch, build, make, my_batch, prod

MAX_NORM = 0.05


def expected(kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Norm and clipped gradients of the plain model on the global batch; tables updated in the backward pass apart."""
    module = make(kind)
    module(batch(0)).square().mean().backward()
    parameters = {n: p for n, p in module.named_parameters() if kind == "none" or n not in TABLES}
    norm = nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
    return norm, {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def clipped(
    layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(layout, kind, shape, names)
    model(my_batch(0, model.env)).square().mean().backward()
    model.env.group()
    with CommDebugMode() as comms:
        norm = clip_grad_norm_(model, MAX_NORM)
    assert comms.get_total_counts() == (1 if model.env.size > 1 else 0)
    assert type(norm) is torch.Tensor and norm.shape == ()
    grads = {n: as_chunks(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for name, (parameter, chunked) in sharded_parameters(model).items():
        if parameter.grad is not None:
            grads[name] = chunk_views(parameter.grad, parameter, chunked)
    return norm, gather(grads, model.env)


@pytest.mark.parametrize(
    ("layout", "kind", "world"),
    [
        ("row_wise", "none", "2"),
        ("mixed", "none", "4"),
        ("mixed", "adagrad", "2"),
        ("grid", "none", "2x2"),
        ("data_parallel", "none", "2x2"),
        ("table_row_wise", "none", "hosts"),
        ("uneven", "none", "4"),
        ("table_wise", "none", "1"),
    ],
)
@pytest.mark.sampled(4)
def test_norm_and_gradients_are_the_unsharded_models(layout: str, kind: str, world: str) -> None:
    assert GLOBAL_BATCH % 4 == 0
    norm, grads = expected(kind)
    shape, names = WORLDS[world]
    for got_norm, got in run_ranks(prod(shape), clipped, layout, kind, shape, names):
        torch.testing.assert_close(got_norm, norm)
        assert got.keys() == grads.keys()
        for name in grads:
            torch.testing.assert_close(got[name], grads[name], msg=lambda m, n=name: f"{n}: {m}")


def clipped_dtensors() -> torch.Tensor:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = mesh((2, 2), ("dp_shard", "tp"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1), nn.Tanh())
    parallelize_module(module, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=both["dp_shard"])
    module(torch.ones(3, 6)).sum().backward()
    return clip_grad_norm_(module, 1e9)


def test_dtensors_of_two_meshes() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1), nn.Tanh())
    module(torch.ones(3, 6)).sum().backward()
    norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    for got in run_ranks(4, clipped_dtensors):
        torch.testing.assert_close(got, norm)


def sparse_on_one_rank() -> None:
    env = ShardingEnv.from_mesh(mesh((2,)))
    model = DistributedModelParallel(nn.Linear(2, 1), env=env, plan={})
    model(torch.ones(1, 2)).sum().backward()
    if env.rank:
        weight = model.module.weight
        weight.grad = None
        weight.grad = torch.zeros_like(weight).to_sparse()
    clip_grad_norm_(model, 1.0)


def test_what_fails_on_one_rank_is_raised_on_all() -> None:
    told = run_ranks(2, sparse_on_one_rank, expect=ShardError)
    assert "rank 1" in str(told[0]) and all("sparse" in str(error) for error in told), told


def test_small_gradients_stay() -> None:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
    before = module.weight.grad.clone()
    model = DistributedModelParallel(module, ShardingEnv.single(), plan={}, sharders=[])
    assert float(clip_grad_norm_(model, 100.0)) == pytest.approx(3**0.5)
    assert torch.equal(module.weight.grad, before)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1", None])
def test_what_is_no_norm_is_refused(bad: Any) -> None:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ShardError, match="expected max_norm to be a number of at least 0"):
        clip_grad_norm_(module, bad)
    clip_grad_norm_(module, 0)
    assert module.weight.grad is not None and not module.weight.grad.any()


def with_an_open_sum() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    axis, module = mesh((2,), ("dp",)), nn.Linear(2, 1, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 2), axis, [Replicate()]))
    module.weight.grad = DTensor.from_local(torch.ones(1, 2), axis, [Partial()])
    clip_grad_norm_(module, 1.0)


def test_a_gradient_whose_sum_is_open_is_refused() -> None:
    assert all("sum is still open" in str(error) for error in run_ranks(2, with_an_open_sum, expect=ShardError))


def clipped_doubles() -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum"), nn.Linear(4, 1)).double()
    model = DistributedModelParallel(module, plan={"0.weight": row_wise()})
    model(torch.arange(6).view(3, 2)).square().mean().backward()
    norm = clip_grad_norm_(model, MAX_NORM)
    return norm, [p.grad for p in model.module[1].parameters()]


def test_a_float64_model_is_clipped_in_its_own_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum"), nn.Linear(4, 1)).double()
    module(torch.arange(6).view(3, 2)).square().mean().backward()
    expected_norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    for norm, grads in run_ranks(2, clipped_doubles):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-14, atol=0)  # its dtype too
        for got, parameter in zip(grads, module[1].parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-14, atol=0)
