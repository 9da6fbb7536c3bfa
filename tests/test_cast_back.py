"""A wrapped model that is cast to another dtype and back: gradients are means over the ranks as before. One that
casts a part of itself while it runs is told."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv
from sharders import FSDPWrapper, TensorParallelSharder
from tests.beside_plain import trains
from tests.equality import env_of
from tests.ranks import mesh, run_ranks


def _cast(model: nn.Module, what: str) -> None:
    if what in ("a weight", "a bias"):
        p = getattr(model.module[2], what.split()[1])  # type: ignore[index]
        p.data = p.data.float()
        p.data = p.data.double()
        return
    part = model if what == "the model" else model.module[2]  # type: ignore[index]
    part.float().double()


def cast_and_back(what: str) -> None:
    env = env_of("dp2")
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    model = DistributedModelParallel(module, env=env)
    for step in range(3):
        if step:  # as torch does it, in place: the parameters stay the same objects
            _cast(model, what)
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).double()
        model(x.chunk(2)[env.data_rank]).pow(2).mean().backward()
        plain(x).pow(2).mean().backward()
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, msg=lambda m, at=(step, name): f"{at}: {m}")


@pytest.mark.parametrize("what", ["the model", "a part", "a weight", "a bias"])
def test_a_model_cast_and_back_averages_gradients(what: str) -> None:
    run_ranks(2, cast_and_back, what)


class Routed(nn.Module):
    """Casts a part of itself, once and for all, when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.last = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        weights = self.router(x.float()).softmax(-1).to(x.dtype)
        return self.last(self.first(x).relu()) * weights[..., :1]  # type: ignore[no-any-return]


def casts_inside(axis: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    split = [TensorParallelSharder({"first": "colwise", "last": "rowwise"} if axis == "tp" else {})]
    model = DistributedModelParallel(Routed().double(), env, sharders=split)
    with torch.no_grad():
        model(torch.ones(4, 8).double())
    model = DistributedModelParallel(Routed().double(), env, sharders=split)
    with pytest.raises(ShardError, match=r"'router.(weight|bias)' was cast from torch.float64 to torch.float32 by the"):
        model(torch.ones(4, 8).double())
    if axis == "shard":
        mixed = FSDPWrapper(mixed_precision=torch.bfloat16)
        model = DistributedModelParallel(Routed(), env, sharders=split, data_parallel_wrapper=mixed)
        kept = DistributedModelParallel(nn.Sequential(nn.Linear(8, 8)), env, data_parallel_wrapper=mixed)
        for _ in range(2):  # weights of the root stay whole, in bfloat16, from a forward to its backward pass
            kept(torch.ones(4, 8)).float().sum().backward()
        with pytest.raises(ShardError, match=r"'router.*was cast from torch.bfloat16 to torch.float32.*torch.autocast"):
            model(torch.ones(4, 8))
        model = DistributedModelParallel(Routed(), env, sharders=split)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(4, 8)).float().sum().backward()
    routed, whole = Routed().double(), Routed().double()
    routed.router.float()
    model = DistributedModelParallel(routed, env, sharders=split)
    trains(model, whole, env, lambda g: torch.randn(env.data_size, 4, 8, generator=g).double())


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_what_a_forward_casts_is_told_before_gradients_part(axis: str) -> None:
    """As Switch Transformers' routers: on copies gradients were each rank's own, in silence, and where weights are
    split torch told of them in the backward pass, or we at the second step."""
    run_ranks(2, casts_inside, axis)
