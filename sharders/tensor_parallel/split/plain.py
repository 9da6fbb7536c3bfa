"""What a split module hands to the model's code: plain tensors, which that may write in place.

[Note: in place] `DTensor.to_local` gives a view that autograd lets nobody write: `nn.ReLU(inplace=True)` after a Linear
raises, and so does a sum that is added to in place. Nobody else looks at what a split module has computed, so that the
view is handed on as a tensor of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dmp import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def plain(output: DTensor) -> torch.Tensor:
    """The local tensor, which may be written; no copy."""
    local: torch.Tensor = writable(output.to_local())
    return local


def writable(local: Any) -> Any:
    """A tensor that is no view, in the same memory. DTensors, what is compiled and what takes no gradient are left."""
    if is_dtensor(local) or not local.requires_grad or torch.compiler.is_compiling():
        return local
    return _Own.apply(local)  # type: ignore[no-untyped-call]


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]
