"""Linears that torch's styles do not split: several weights in one, and weights of (in, out). They run on what is here.

[Note: packed] Of a weight of n equal parts along its output features (query, key and value; a gate and what it gates)
each rank has its share of every part, which is what it would have of n separate Linears: torch's placement for that is
`_StridedShard`. So its output, too, is the rank's share of each part, one behind the other, and code that cuts it into
n, or views it as n, gets what it expects, smaller. No placement of torch's styles says that of an activation: the
module runs on what is here, as plain tensors, and hooks around it convert what goes in and out.

A bias beside input features that are split is added on every rank, before the sum: each adds its share of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sharders.tensor_parallel.split.plain import plain, replicated
from sharders.tensor_parallel.split.replicated_weights import read_local
from sharders.tensor_parallel.split.styles import Style, family, layouts_of
from sharders.tensor_parallel.structure.linears import features_of, is_transposed, resize_output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_local(module: nn.Module, mesh: DeviceMesh, style: Style) -> None:
    """Split a Linear, see [Note: packed]; no communication, may be on meta. A bias may be left for others to split.

    Forward: for `rowwise` an all-reduce of the output (`rowwise_scatter`: a reduce-scatter along dim 1), for
    `colwise_gather` an all-gather. Backward: for `colwise` and its like an all-reduce of the gradient of the input.

    Args:
        mesh: the tensor axis, whose size divides what is split.
    """
    features = features_of(module)
    assert features is not None
    read_local(module, split_weights(module, mesh, style))
    if family(style) == "colwise" and is_transposed(module):
        resize_output(module, features.out_features, features.out_features // mesh.size())
    _convert_around(module, mesh, style)


def split_weights(module: nn.Module, mesh: DeviceMesh, style: Style) -> tuple[str, ...]:
    """Split a module's own weights as the style says; their names, those left whole not among them."""
    from torch.distributed.tensor import DTensor, Shard

    # Private: nothing public is several shards of one dim on a rank.
    from torch.distributed.tensor.placement_types import _StridedShard

    split = []
    for name, layout in layouts_of(style, module).items():
        whole: Any = module._parameters[name]
        dim = layout.tensor_dim(whole.dim())
        if dim is None:
            continue
        parts = layout.num_parts
        here = share_of_parts(whole.detach(), dim, parts, mesh.size(), mesh.get_local_rank()).contiguous()
        placed = [_StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)]
        shape = {"shape": whole.shape, "stride": whole.stride()}
        new = nn.Parameter(DTensor.from_local(here, mesh, placed, run_check=False, **shape), whole.requires_grad)
        new.__dict__.update(whole.__dict__)
        module._parameters[name] = new
        split.append(name)
    return tuple(split)


def share_of_parts(whole: torch.Tensor, dim: int, parts: int, size: int, rank: int) -> torch.Tensor:
    """A rank's share of each of the equal parts of a dim, one behind the other; a copy where there are several."""
    length = whole.shape[dim] // parts
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.split(length, dim)], dim)


def _convert_around(module: nn.Module, mesh: DeviceMesh, style: Style) -> None:
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    is_out = family(style) == "colwise"

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0] if args else None
        if style == "rowwise_gather" and isinstance(x, torch.Tensor):
            return (replicated(x, mesh).redistribute(placements=[Shard(-1)]).to_local(), *args[1:])
        if not isinstance(x, DTensor):
            return None
        # The ranks' gradients of what all of them have are parts of a sum.
        return (x.to_local(grad_placements=[Partial() if is_out else Shard(x.dim() - 1)]), *args[1:])

    def give(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        here: Placement = Shard(output.dim() - 1) if is_out else Partial()
        to: Placement = Shard(1) if style == "rowwise_scatter" else Replicate()
        placed = DTensor.from_local(output, mesh, [here], run_check=False)
        return plain(placed.redistribute(placements=[to]))

    module.register_forward_pre_hook(take)
    if not is_out or style == "colwise_gather":
        module.register_forward_hook(give)
