"""`DDPWrapper`: what no sharder owns, replicated, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmp import ShardingEnv


class DDPWrapper:
    """Wraps in `DistributedDataParallel` over the data ranks; does nothing for one process or without dense parameters.

    Args:
        options: passed to `DistributedDataParallel` (`bucket_cap_mb`, `static_graph`, ...).
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """DDP of `module` that leaves `ignored` parameters and buffers alone."""
        group = env.group("replicate", "shard")
        has_dense = any(p.requires_grad for n, p in module.named_parameters() if n not in ignored)
        if group is None or env.data_size == 1 or not has_dense:
            return module
        # The only way to keep DDP off a parameter; see also dmp/__init__.py's list of private torch names.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        ids = [device] if device.type != "cpu" else None
        return DistributedDataParallel(module, device_ids=ids, process_group=group, **self.options)
