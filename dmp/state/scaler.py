"""`GradScaler`: gradient scaling for float16 that is right whatever the weights are split over.

torch's own asks the ranks of one DTensor's mesh whether a gradient overflowed: on a mesh of several axes some ranks
skip a step that others take, and so where a table's chunk overflows on one rank: copies of dense weights part without
a word. It also refuses optimizers over tables and DTensors together.

[Note: torch's scaler] Programs that were written for DDP use `torch.amp.GradScaler`. From the first wrapping on, what
it does over a wrapped model's parameters is what is here; others' are left to torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dmp import live_models as live
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.nested import tensors_of
from dmp.places import local_of
from dmp.put_around import put_around
from dmp.ranks import entry, numbers_of_all
from dmp.state.find_wrapped import env_of, fused_parameters
from dmp.wrap.earlier.earlier_optimizers import follow
from dmp.wrap.wrapper import DistributedModelParallel


class GradScaler(torch.amp.GradScaler):
    """As `torch.amp.GradScaler`, for a wrapped model: a step is skipped on all ranks when one met an overflow.

    One all-reduce of a number for each `unscale_` (or `step` without it).

    Args:
        model: the wrapped model whose gradients are scaled, or a module with some inside.
        options: of `torch.amp.GradScaler` (`init_scale`, `growth_interval`, ...).

    Raises:
        ShardError: tables updated in the backward pass, which would take scaled gradients before anything is unscaled.

    Example:
        >>> model = DistributedModelParallel(torch.nn.Linear(2, 1))
        >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(model)
        >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(self, model: DistributedModelParallel | torch.nn.Module, **options: Any) -> None:
        fused = fused_parameters(model)
        if fused and options.get("enabled", True):
            raise _refusal(next(iter(fused)))
        super().__init__(env_of(model).device_type, **options)


def _refusal(name: str) -> ShardError:
    return ShardError(
        f"{name!r} is updated in the backward pass, where its gradient is still scaled: its optimizer would "
        "take steps that are too long. Leave such tables without an in-backward optimizer, or train in "
        "bfloat16, which needs no scaling"
    )


def _unscale_together(
    env: ShardingEnv,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Unscale this rank's gradients, and learn whether any rank's are not finite."""
    everyone = env.everyone
    with entry("GradScaler.unscale_", everyone):
        unscale = partial(_unscale, optimizer, inv_scale, found_inf, allow_fp16)
        if everyone is not None and found_inf.is_cpu:  # what fails on one rank fails on all
            every = numbers_of_all("GradScaler.unscale_", lambda: float(unscale()), everyone)
            found_inf.fill_(max(every))
        else:
            unscale()
            if everyone is not None:  # without waiting for the device
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=everyone)
    return {found_inf.device: found_inf}


def _unscale(
    optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> torch.Tensor:
    """This rank's gradients, in place; `found_inf`, which becomes 1 where one of them is not finite."""
    follow(optimizer)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("gradients in float16 cannot be unscaled: keep the weights in float32")
            local = local_of(grad)
            by_dtype.setdefault(local.dtype, []).append(local._values() if local.is_sparse else local)
    with torch.no_grad():
        for grads in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return found_inf


# Torch's scaler, see [Note: torch's scaler].


def _torchs_unscale(own: Any, scaler: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
    """As torch's; over a wrapped model's parameters with one decision on all its ranks."""
    follow(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in live.models:
        if any(id(p) in held for p in model.parameters()):
            return _unscale_together(model.env, optimizer, inv_scale, found_inf, allow_fp16)
    return own(scaler, optimizer, inv_scale, found_inf, allow_fp16)


def _torchs_scale(own: Any, scaler: Any, outputs: Any) -> Any:
    """As torch's.

    Raises:
        ShardError: its backward pass would update a table, by a gradient that is scaled.
    """
    if scaler.is_enabled():
        fused = {id(p): name for model in live.models for name, p in model.fused_optimizer.params.items()}
        outputs = outputs if isinstance(outputs, torch.Tensor | list | tuple) else list(outputs)
        name = _reaches((tensor for _, tensor in tensors_of(outputs)), fused) if fused else None
        if name is not None:
            raise _refusal(name)
    return own(scaler, outputs)


def _reaches(losses: Iterable[torch.Tensor], parameters: dict[int, str]) -> str | None:
    """The name of the first of these parameters that a backward pass comes to."""
    nodes: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in parameters:
            return parameters[id(node.variable)]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return None


def _prepare() -> None:
    # Private in torch: the one place where gradients are looked at.
    put_around(torch.amp.GradScaler, "_unscale_grads_", _torchs_unscale)
    put_around(torch.amp.GradScaler, "scale", _torchs_scale)


live.at_first_wrap(_prepare)
