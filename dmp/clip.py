"""Gradient clipping by the norm of the whole model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.gather import env_of, sharded_parameters
from dmp.layout import is_replicated
from dmp.wrapper import DistributedModelParallel

_EPS = 1e-6  # as torch's


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients in place so that the norm of the whole model's gradient is at most `max_norm`.

    The norm is the unsharded model's, whatever the plan: pieces of tables are added up, what several ranks hold counts
    once. Covers every parameter that has a `.grad`; tables updated in the backward pass are outside: they never have
    one. Collective over `model.env`: one all-reduce.

    Returns:
        The 2-norm before clipping, a plain 0-D float32 tensor, the same on every rank.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> clip_grad_norm_(model, 1.0)
        tensor(1.7321)
    """
    env = env_of(model)
    by_copies: dict[int, list[torch.Tensor]] = {}
    whole = _replicated_names(model, env)
    pieces = sharded_parameters(model).keys() - whole
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            copies = env.size // env.table_size if name in pieces else env.size
            grad, copies = _local(parameter.grad, copies, env.size)
            by_copies.setdefault(copies, []).append(grad)
    # What several ranks hold each of them counts in part, so that one sum over all ranks is right for everything.
    total = torch.zeros((), dtype=torch.float64, device=env.device)
    for copies, grads in by_copies.items():
        total += nn.utils.get_total_norm(grads).to(total) ** 2 / copies
    if env.size > 1 and env.group() is not None:
        dist.all_reduce(total, group=env.group())
    norm = total.sqrt().float()
    scale = (max_norm / (norm + _EPS)).clamp(max=1.0)
    for grads in by_copies.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return norm


def _replicated_names(model: nn.Module, env: ShardingEnv) -> set[str]:
    """Parameters that a sharded module holds whole on every table rank."""
    if not isinstance(model, DistributedModelParallel):
        return set()
    return {
        name
        for name, (_, chunked) in sharded_parameters(model).items()
        if name in model.plan and is_replicated(model.plan[name].layout.shards(chunked.size(), env), chunked.size())
    }


def _local(grad: torch.Tensor, copies: int, size: int) -> tuple[torch.Tensor, int]:
    """This rank's part of a gradient, as a view, and how many ranks hold the same part."""
    if grad.is_sparse:
        raise ShardError("clip_grad_norm_ does not take sparse gradients, as torch's does not")
    placements = getattr(grad, "placements", None)
    if placements is None:
        return grad, copies
    parts = 1
    for placement, axis_size in zip(placements, grad.device_mesh.shape, strict=True):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise ShardError(f"clip_grad_norm_ met a gradient whose sum is still open: {placements}")
        parts *= 1 if placement.is_replicate() else axis_size
    return grad.to_local(), size // parts  # type: ignore[attr-defined]
