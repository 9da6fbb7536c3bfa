"""A wrapped model is trained beside the plain one, which gets the batches of all data ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dmp import ShardingEnv, full_state_dict


def trains(
    model: nn.Module,
    whole: nn.Module,
    env: ShardingEnv,
    batch: Callable[[torch.Generator], torch.Tensor],
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    steps: int = 3,
) -> None:
    """Results at each step, and all values at the end, are the same.

    Args:
        batch: gives those of a step, (data ranks, ...).
        kind: the optimizer.
    """
    optimizers = [kind(m.parameters(), lr=0.1) for m in (model, whole)]
    for step in range(steps):
        xs = batch(torch.Generator().manual_seed(step))
        got, wanted = model(xs[env.data_rank]), [whole(x) for x in xs]
        torch.testing.assert_close(got, wanted[env.data_rank])
        got.square().mean().backward()
        torch.stack(wanted).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")
