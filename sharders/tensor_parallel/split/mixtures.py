"""Mixtures of experts, split by the inner size of each, see [Note: experts]: they run on plain tensors.

What a rank gives is its part of the sum of the whole's output, whichever experts its tokens are for; biases that are
added after the way down are added on every rank, each its share. What goes in (hidden states, and the weights with
which the experts' outputs are summed) all ranks have, and their gradients of it are parts of a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dmp import map_nested
from sharders.tensor_parallel.split.local import split_weights
from sharders.tensor_parallel.split.plain import entering, summed
from sharders.tensor_parallel.split.replicated_weights import read_local
from sharders.tensor_parallel.split.styles import Style

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_experts(module: nn.Module, mesh: DeviceMesh, style: Style) -> None:
    """Split it in place; no communication, may be on meta. Biases of the way down are left for others to share.

    Forward: an all-reduce of the output. Backward: one of the gradient of each input that takes one.

    Args:
        mesh: the tensor axis, whose size divides the inner size.
    """
    read_local(module, split_weights(module, mesh, style), is_followed=True)

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return map_nested(args, taken), map_nested(kwargs, taken)

    def taken(x: Any, _: str) -> Any:
        return entering(x, mesh) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def give(_: nn.Module, args: Any, output: Any) -> Any:
        return summed(output, mesh)

    module.register_forward_pre_hook(take, with_kwargs=True)
    module.register_forward_hook(give)
