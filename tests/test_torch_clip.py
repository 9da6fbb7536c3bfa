"""`torch.nn.utils.clip_grad_norm_` over a wrapped model's parameters: the whole model's norm, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm  # before anything is wrapped

from dmp import DistributedModelParallel, ShardError, ShardingEnv, table_wise
from dmp.chunked import as_chunks, chunk_views
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap.values.whole import gather
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import TABLES, Net, batch, loss_of, mixed

MAX_NORM = 0.01


def in_two_steps(parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    parameters = list(parameters)
    total = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "from": clip_grad_norm_,
    "by name": lambda *args: torch.nn.utils.clip_grad_norm_(*args),
    "two steps": in_two_steps,
}


def clipped(
    shape: tuple[int, ...], names: tuple[str, ...], way: str, norm_type: float, plan: Any, which: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module = Net()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model = DistributedModelParallel(module, env, plan=plan)
    loss_of(model, batch(env.data_rank)).backward()
    given: Any = model.parameters()
    if which == "tables":
        given = [p for name, p in model.named_parameters() if name in TABLES]
    elif which == "early":
        given = early.param_groups[0]["params"]
    norm = WAYS[way](given, MAX_NORM, norm_type)
    assert type(norm) is torch.Tensor and norm.shape == () and norm.dtype == torch.float32
    grads = {n: as_chunks(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for name, (parameter, chunked) in sharded_parameters(model).items():
        if parameter.grad is not None:
            grads[name] = chunk_views(parameter.grad, parameter, chunked)
    return norm, gather(grads, env)


def expected(data_size: int, norm_type: float, which: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module = Net()
    for rank in range(data_size):
        (loss_of(module, batch(rank)) / data_size).backward()
    given = [p for name, p in module.named_parameters() if which != "tables" or name in TABLES]
    norm = clip_grad_norm_(given, MAX_NORM, norm_type)
    return norm, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


ONE_RANK = {name: table_wise(0) for name in TABLES}


@pytest.mark.parametrize(
    ("shape", "names", "way", "norm_type", "plan", "which"),
    [
        ((2,), ("dp",), "from", 2.0, mixed(), "all"),
        ((2,), ("dp",), "by name", float("inf"), mixed(), "all"),
        ((2,), ("dp",), "two steps", 1.0, mixed(), "all"),
        ((2,), ("dp",), "from", 2.0, ONE_RANK, "tables"),
        ((2,), ("dp",), "from", 2.0, mixed(), "early"),
        ((2,), ("shard",), "from", 2.0, mixed(), "all"),
        ((2,), ("shard",), "two steps", float("inf"), mixed(), "all"),
        ((2,), ("replicate",), "from", 3.0, mixed(), "all"),
        ((2, 2), ("shard", "tp"), "from", 2.0, mixed(), "all"),
        ((2, 2), ("replicate", "shard"), "by name", 2.0, mixed(), "early"),
    ],
)
@pytest.mark.sampled(4)
def test_norm_and_gradients_are_the_whole_models(
    shape: Any, names: Any, way: str, norm_type: float, plan: Any, which: str
) -> None:
    size = shape[0] * (shape[1] if len(shape) > 1 else 1)
    data_size = shape[0] if "tp" in names else size
    norm, grads = expected(data_size, norm_type, which)
    for got_norm, got in run_ranks(size, clipped, shape, names, way, norm_type, plan, which):
        torch.testing.assert_close(got_norm, norm)
        for name, grad in grads.items():
            torch.testing.assert_close(got[name], grad, msg=lambda m, n=name: f"{n}: {m}")


def beside_others() -> None:
    model = DistributedModelParallel(Net(), plan=mixed())
    loss_of(model, batch(model.env.rank)).backward()
    alone = float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    assert float(clip_grad_norm_(other.parameters(), 100.0)) == pytest.approx(3**0.5)
    both = clip_grad_norm_([*model.parameters(), *other.parameters()], 100.0)
    assert float(both) == pytest.approx((alone**2 + 3) ** 0.5)
    assert float(clip_grad_norm_(other.parameters(), 100.0, error_if_nonfinite=True)) == pytest.approx(3**0.5)
    assert clip_grad_norm_([], 1.0) == 0.0
    users = model.get_parameter("users.weight")
    of_users = clip_grad_norm_(users, 100.0)
    assert users.grad is not None and float(get_total_norm(users.grad)) == pytest.approx(float(of_users)) != 0.0
    with pytest.raises(ShardError, match=r"p > 0 or inf; got norm_type=0"):
        clip_grad_norm_(model.parameters(), 1.0, 0.0)
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad / 0.0 * 0.0
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_others_are_torchs() -> None:
    run_ranks(2, beside_others)
