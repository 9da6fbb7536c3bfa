"""Which chunks of its parameters a rank holds; `chunk_views` has the same of tensors shaped as they are."""

from __future__ import annotations

from torch import nn

from dmp.chunked import ChunkedTensor
from dmp.contracts import ShardedModule
from dmp.names import join_name
from dmp.wrap.values.state_hooks import held_state
from dmp.wrap.wrapper import DistributedModelParallel


def sharded_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, ChunkedTensor]]:
    """Fully-qualified name -> (local parameter, its pieces), for every parameter that a sharded module holds."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    local = dict(root.named_parameters(remove_duplicate=False))
    found: dict[str, tuple[nn.Parameter, ChunkedTensor]] = {}
    for path, module in root.named_modules():
        if isinstance(module, ShardedModule):
            for name, chunked in held_state(module).items():
                if join_name(path, name) in local:
                    found[join_name(path, name)] = (local[join_name(path, name)], chunked)
    return found
