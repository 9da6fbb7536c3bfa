"""Gradient clipping by the norm of the whole model: our own function, and torch's over a wrapped model's parameters.

[Note: torch's clipping]
Trainers call `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which took the norm of one rank's pieces. Each
of torch's clipping functions is a decorator's wrapper around a body; from the first wrapping on the bodies here stand
in their place, so that a function does the same under every name that it was imported by. They look for gradients and
parameters of wrapped models, and leave others to torch's bodies.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import live_models as live
from dmp.calls import alone
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.foreign import type_name
from dmp.layouts.shard import is_replicated
from dmp.places import is_dtensor
from dmp.put_around import put_inside
from dmp.ranks import entry, numbers_of_all
from dmp.state.by_hand import refuse_parts
from dmp.state.drawn import draw_parts_apart
from dmp.state.find_wrapped import env_of, joint_plan
from dmp.state.keyed_clipping import check_clipping
from dmp.state.kinds import tell_kinds_apart
from dmp.state.local_chunks import sharded_parameters
from dmp.state.numbers import say_of_shares
from dmp.wrap.earlier.earlier_optimizers import successors

torch_clip: Any = importlib.import_module("torch.nn.utils.clip_grad")  # whose private names it does not export
_EPS = 1e-6  # as torch's
_NAME = "clip_grad_norm_"
_norm_of: Callable[..., torch.Tensor] = torch_clip._get_total_norm.__wrapped__  # torch's own body


@alone("clip_grad_norm_")
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients in place so that the norm of the whole model's gradient is at most `max_norm`.

    The norm is the unsharded model's, whatever the plan: pieces of tables are added up, what several ranks hold counts
    once. Covers every parameter that has a `.grad`; tables updated in the backward pass are outside: they never have
    one. Collective over `model.env`: one small exchange. `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`
    does the same, and takes other norms.

    Args:
        model: a `DistributedModelParallel`, or a module with some inside, whose other gradients are the same on every
            rank (as under DistributedDataParallel).
        max_norm: of the whole gradient.

    Returns:
        The 2-norm before clipping, a plain 0-D tensor, the same on every rank: float64 where the model has parameters
        of float64, else float32.

    Raises:
        ShardError: a `max_norm` that is negative or no number, sparse gradients.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> clip_grad_norm_(model, 1.0)
        tensor(1.7321)
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ShardError(f"expected max_norm to be a number of at least 0; got {max_norm!r}")
    if not isinstance(model, nn.Module):
        raise ShardError(
            f"dmp.clip_grad_norm_ takes the model; got {type_name(model)}. Of the model's parameters "
            "torch.nn.utils.clip_grad_norm_ takes the same norm"
        )
    env = env_of(model)
    with entry(_NAME, env.everyone), torch.no_grad():
        shares: dict[int, tuple[torch.Tensor, int]] = {}

        def own() -> Iterable[tuple[torch.Tensor, int]]:
            shares.update(_shares(model, env, [p.grad for p in model.parameters()]))
            return shares.values()

        norm = _whole_norm(own, 2.0, env).to(_dtype_of_norm(model.parameters()))
        scale = (max_norm / (norm + _EPS)).clamp(max=1.0)
        for grad, _ in shares.values():
            grad.mul_(scale.to(grad.device))
    return norm


def _shares(model: nn.Module, env: ShardingEnv, asked: Iterable[Any]) -> dict[int, tuple[torch.Tensor, int]]:
    """id of each gradient that is asked for, or weight -> what this rank holds of it, a view, and how many ranks hold
    the same."""
    plan, sharded, ids = joint_plan(model), sharded_parameters(model), {id(tensor) for tensor in asked}
    shares: dict[int, tuple[torch.Tensor, int]] = {}
    for name, parameter in model.named_parameters():
        found = [t for t in (parameter.grad, parameter) if t is not None and id(t) in ids]
        if not found:
            continue
        copies = env.size
        if name in sharded:
            size = sharded[name][1].size()
            if name not in plan or not is_replicated(plan[name].layout.shards(size, env), size):
                copies = env.size // env.table_size
        shares.update((id(t), _local(t.detach(), copies, env.size)) for t in found)
    return shares


def _whole_norm(
    shares: Callable[[], Iterable[tuple[torch.Tensor, int]]], norm_type: float, env: ShardingEnv
) -> torch.Tensor:
    """Over all ranks, float64, 0-D on the env's device. One small exchange.

    What several ranks hold each of them counts in part, so that one sum over all ranks is right for everything.
    """

    def own() -> torch.Tensor:
        by_copies: dict[int, list[torch.Tensor]] = {}
        for grad, copies in shares():
            if grad.numel():
                by_copies.setdefault(copies, []).append(grad)
        total = torch.zeros((), dtype=torch.float64, device=env.device)
        for copies, grads in by_copies.items():
            norm = _norm_of(grads, norm_type).to(total)
            total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type / copies
        return total

    group = env.everyone
    if group is not None and env.device.type == "cpu":
        every = numbers_of_all(_NAME, lambda: float(own()), group)  # what fails on one rank fails on all
        total = torch.tensor(max(every) if math.isinf(norm_type) else sum(every), dtype=torch.float64)
    else:
        total = own()
    if group is not None and env.device.type != "cpu":  # without waiting for the device
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _local(grad: torch.Tensor, copies: int, size: int) -> tuple[torch.Tensor, int]:
    """What this rank holds of a gradient, as a view, and how many ranks hold the same."""
    if grad.is_sparse:
        raise ShardError("clip_grad_norm_ does not take sparse gradients, as torch's does not")
    if not is_dtensor(grad):
        return grad.as_subclass(torch.Tensor), copies
    parts = 1
    for placement, axis_size in zip(grad.placements, grad.device_mesh.shape, strict=True):
        if placement.is_partial():
            raise ShardError(f"clip_grad_norm_ met a gradient whose sum is still open: {grad.placements}")
        parts *= 1 if placement.is_replicate() else axis_size
    return grad.to_local(), size // parts


# Torch's bodies, see [Note: torch's clipping].


def _total_norm(
    own: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """As torch's; gradients of a wrapped model, and its weights, count over all ranks of its mesh."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norms: list[torch.Tensor] = []
    rest = {id(tensor): tensor for tensor in tensors}
    for model in live.models if tensors else ():
        shares = _shares(model, model.env, rest.values())
        if shares:
            if not norm_type > 0:
                raise ShardError(f"a wrapped model's gradients have norms of order p > 0 or inf; got {norm_type=}")
            norms.append(_whole_norm(shares.values, float(norm_type), model.env))
            rest = {key: tensor for key, tensor in rest.items() if key not in shares}
    if not norms:
        return own(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
    if rest:
        norms.append(_norm_of(list(rest.values()), norm_type, False, foreach).to(norms[0]))
    total = _norm_of(norms, norm_type, error_if_nonfinite).to(_dtype_of_norm(tensors))
    return total.to(tensors[0].device)


def _dtype_of_norm(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _of_successors(own: Callable[..., Any], parameters: Any, *args: Any, **options: Any) -> Any:
    """The same, where an optimizer from before wrapping gives its old parameters, see earlier_optimizers.py."""
    found = successors([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    return own((p for p in found) if isinstance(parameters, GeneratorType) else found, *args, **options)


def _prepare() -> None:
    tell_kinds_apart()
    refuse_parts()
    for function in (torch_clip.clip_grad_norm_, torch_clip.clip_grad_value_, torch_clip._clip_grads_with_norm_):
        put_inside(function, _of_successors)
    put_inside(torch_clip._get_total_norm, _total_norm)


live.at_first_wrap(_prepare)
live.stand_in("torchrec.optim.clipping", "GradientClippingOptimizer", "__init__", check_clipping)
for prepared in (say_of_shares, draw_parts_apart):
    live.when_imported("torch.distributed.tensor", prepared)
