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
    _averages.update({p.device_mesh: partial(_average, group, everyone) for p in root.parameters() if is_dtensor(p)})


def _average(group: dist.ProcessGroup, everyone: dist.ProcessGroup | None, gradient: torch.Tensor) -> torch.Tensor:
    mean = (gradient / group.size()).contiguous()
    with ranks.take_turn("the average of a gradient of what full_tensor() gave of a split weight", everyone):
        dist.all_reduce(mean, group=group)
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
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        (node, _), *others = [each for each in node.next_functions if each[0] is not None] or [(None, 0)]
        node = None if others else node
    leaf = tensor if tensor.is_leaf else getattr(node, "variable", None)
    return leaf.device_mesh if is_dtensor(leaf) else None
