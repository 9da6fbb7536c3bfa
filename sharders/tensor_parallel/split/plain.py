"""What goes into code that runs on a rank's part, and comes out of it: plain tensors, which may be written in place.

[Note: in place] `DTensor.to_local` gives a view that autograd lets nobody write: `nn.ReLU(inplace=True)` after a Linear
raises, and so does a sum that is added to in place. Nobody else looks at what a split module has computed, so that the
view is handed on as a tensor of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dmp import is_dtensor
from sharders.tensor_parallel.split.own_parts import plain_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def entering(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What all ranks have, as it comes to code that runs on this rank's part: gradients of it are parts of a sum.

    Forward: nothing. Backward: one all-reduce.

    Args:
        x: a plain tensor, or a DTensor that is whole.
    """
    from torch.distributed.tensor import Partial

    local: torch.Tensor = replicated(x, mesh).to_local(grad_placements=[Partial()])
    return local


def replicated(x: Any, mesh: DeviceMesh) -> DTensor:
    """What all ranks have as a DTensor, which what is one stays. Nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    return x if isinstance(x, DTensor) else DTensor.from_local(plain_part(x), mesh, [Replicate()], run_check=False)


def summed(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' parts, which all of them have.

    Forward: one all-reduce. Backward: nothing.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    open_sum = DTensor.from_local(plain_part(part), mesh, [Partial()], run_check=False)
    return plain(open_sum.redistribute(placements=[Replicate()]))


def plain(output: DTensor) -> torch.Tensor:
    """The local tensor, which may be written; no copy."""
    local: torch.Tensor = writable(output.to_local())
    return local


def writable(local: Any) -> Any:
    """A tensor that is no view, in the same memory. DTensors, what is compiled and what takes no gradient are left."""
    if is_dtensor(local) or not local.requires_grad or torch.compiler.is_compiling():
        return local
    return Own.apply(local)  # type: ignore[no-untyped-call]


class Own(torch.autograd.Function):
    """The same values in the same memory, which autograd does not take for a view; versions are still counted."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]
