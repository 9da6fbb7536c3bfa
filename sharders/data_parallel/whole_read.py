"""The whole of a split weight that a loss reads past the forward, `p.full_tensor()`: its gradient is averaged.

torch takes what comes back to the whole for the same on all ranks. So it is of a penalty; of what is computed with
samples, as losses that are weighted by a weight, each piece got the gradient of its rank's samples, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from dmp import is_dtensor, ranks

_averages: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {}
"""Mesh of split weights -> what is done to gradients of a whole one."""


def average_whole_read(root: Any, group: dist.ProcessGroup | None, everyone: dist.ProcessGroup | None) -> None:
    """Have gradients of what `full_tensor()` gives of split weights be the mean over the ranks with other samples.

    The mean of what is the same is itself, so that penalties stay as they are.

    Args:
        root: after `fully_shard`.
        group: the ranks with other samples.
        everyone: who is in such a pass together.
    """
    if group is None or group.size() == 1:
        return
    _stand_in()
    average = partial(_mean, group=group, everyone=everyone)
    _averages.update(dict.fromkeys((p.device_mesh for p in root.parameters() if is_dtensor(p)), average))


class _Mean(torch.autograd.Function):
    """Of a gradient, over the ranks; so is that of the mean itself, where the pass makes a graph (`create_graph`)."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, group: dist.ProcessGroup, everyone: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.over = group, everyone
        mean = (gradient / group.size()).contiguous()
        with ranks.take_turn("the average of a gradient of what full_tensor() gave of a split weight", everyone):
            dist.all_reduce(mean, group=group)
        return mean

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _mean(gradient, *ctx.over), None, None


def _mean(gradient: torch.Tensor, group: dist.ProcessGroup, everyone: dist.ProcessGroup | None) -> torch.Tensor:
    mean: torch.Tensor = _Mean.apply(gradient, group, everyone)  # type: ignore[no-untyped-call]
    return mean


@cache
def _stand_in() -> None:
    from torch.distributed.tensor import DTensor

    own = DTensor.full_tensor

    @wraps(own)
    def full_tensor(self: DTensor, **options: Any) -> torch.Tensor:
        whole = own(self, **options)
        if whole.requires_grad and not any(options.values()) and (average := _averages.get(_mesh_of_weight(self))):
            whole.register_hook(average)
        return whole

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def _mesh_of_weight(tensor: Any) -> Any:
    """Of a weight, or what is made of one alone, as its norm."""
    if tensor.is_leaf:
        return tensor.device_mesh
    node = tensor.grad_fn
    while not hasattr(node, "variable"):
        before = [each for each, _ in node.next_functions if each is not None]
        if len(before) != 1:
            return None
        node = before[0]
    return node.variable.device_mesh if is_dtensor(node.variable) else None
