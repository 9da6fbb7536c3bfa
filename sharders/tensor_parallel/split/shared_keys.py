"""The part of a latent attention's key that all its heads share, see [Note: latent attention]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sharders.tensor_parallel.split.plain import entering
from sharders.tensor_parallel.structure.latent import latent_rank
from sharders.tensor_parallel.structure.linears import features_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sum_shared_keys(shared: nn.Module, around: nn.Module, mesh: DeviceMesh) -> None:
    """Have gradients of what a Linear gives behind the latent vector summed over the axis; forward, nothing is sent.

    Args:
        around: the attention.
        mesh: the tensor axis.
    """
    features = features_of(shared)
    rank = None if features is None else latent_rank(around, features)
    assert rank is not None

    def give(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, key = output[..., :rank], output[..., rank:]
        return torch.cat((latent, entering(key, mesh)), -1)

    shared.register_forward_hook(give)
