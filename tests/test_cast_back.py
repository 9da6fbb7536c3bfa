"""A wrapped model that is cast to another dtype and back: gradients are means over the ranks as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel
from tests.equality import env_of
from tests.ranks import run_ranks


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
