"""Which chunks of its parameters a rank holds, and the same of tensors shaped as they are, such as gradients."""

from __future__ import annotations

import torch
from torch import nn

from dmp.chunked import ChunkedTensor
from dmp.contracts import ShardedModule
from dmp.errors import ShardError
from dmp.names import join_name
from dmp.wrap.wrapper import DistributedModelParallel


def sharded_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, ChunkedTensor]]:
    """Fully-qualified name -> (local parameter, its pieces), for every parameter that a sharded module holds."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    local = dict(root.named_parameters(remove_duplicate=False))
    found: dict[str, tuple[nn.Parameter, ChunkedTensor]] = {}
    for path, module in root.named_modules():
        if isinstance(module, ShardedModule):
            for name, chunked in module.chunked_state().items():
                if join_name(path, name) in local:
                    found[join_name(path, name)] = (local[join_name(path, name)], chunked)
    return found


def chunk_views(tensor: torch.Tensor, parameter: torch.Tensor, chunked: ChunkedTensor) -> ChunkedTensor:
    """A tensor shaped as the local parameter, such as its gradient, cut as the parameter is; chunks are views.

    Args:
        tensor: of the local parameter's shape, any dtype.
        parameter: the local parameter.
        chunked: its pieces, views of its storage: their storage offsets say where each lies.

    Raises:
        ShardError: another shape, or pieces that are not in the parameter's storage.
    """
    if tensor.shape != parameter.shape or not (tensor.is_contiguous() and parameter.is_contiguous()):
        raise ShardError(
            f"expected a contiguous tensor of the local parameter's shape {tuple(parameter.shape)}; "
            f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    views = []
    for chunk, offset in zip(chunked.chunks, chunked.offsets, strict=True):
        at = chunk.storage_offset() - parameter.storage_offset()
        last = at + sum((n - 1) * s for n, s in zip(chunk.shape, chunk.stride(), strict=True))
        same = chunk.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if chunk.numel() and not (same and at >= 0 and last < parameter.numel()):
            raise ShardError(f"the chunk at {offset} is not a view of its local parameter of {tuple(parameter.shape)}")
        views.append(
            tensor.detach().as_strided(chunk.shape, chunk.stride(), tensor.storage_offset() + at)
            if chunk.numel()
            else tensor.new_empty(chunk.shape)
        )
    return ChunkedTensor(chunked.size(), views, chunked.offsets, tensor.dtype, tensor.device)
