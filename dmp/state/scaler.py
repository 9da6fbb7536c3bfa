"""`GradScaler`: gradient scaling for float16 that is right whatever the weights are split over.

torch's own asks the ranks of one DTensor's mesh whether a gradient overflowed: on a mesh of several axes some ranks
skip a step that others take. It also refuses optimizers over tables and DTensors together.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dmp.errors import ShardError
from dmp.places import local_of
from dmp.ranks import entry, numbers_of_all
from dmp.state.find_wrapped import env_of, fused_parameters
from dmp.wrap.earlier_optimizers import follow
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
            name = next(iter(fused))
            raise ShardError(
                f"{name!r} is updated in the backward pass, where its gradient is still scaled: its optimizer would "
                "take steps that are too long. Leave such tables without an in-backward optimizer, or train in "
                "bfloat16, which needs no scaling"
            )
        self._env = env_of(model)
        super().__init__(self._env.device_type, **options)

    # Private in torch: the one place where gradients are looked at.
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        everyone = self._env.everyone
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
