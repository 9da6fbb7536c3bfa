"""TorchRec's `DefaultDataParallelWrapper` as ours: the same options of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dmp import ShardError, ShardingEnv
from sharders.data_parallel.ddp import DDPWrapper

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class AdoptedWrapper:
    """`DDPWrapper` with what else TorchRec's takes.

    Args:
        options: of `DistributedDataParallel`.
        left_alone: names of parameters whose gradients are not averaged.
        precision: `"fp16"` or `"bf16"`: gradients travel so; None as they are.
    """

    def __init__(self, options: dict[str, Any], left_alone: frozenset[str], precision: str | None) -> None:
        if precision is not None and precision not in _HOOKS:
            raise ShardError(
                f"DefaultDataParallelWrapper: allreduce_comm_precision is one of {sorted(_HOOKS)}; got {precision!r}"
            )
        self._ddp, self._left_alone, self._precision = DDPWrapper(**options), left_alone, precision

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """See `DDPWrapper`."""
        if unknown := sorted(self._left_alone - {name for name, _ in module.named_parameters(remove_duplicate=False)}):
            raise ShardError(f"DefaultDataParallelWrapper: params_to_ignore has {unknown}, which the model lacks")
        wrapped = self._ddp.wrap(module, env, device, ignored | self._left_alone)
        if self._precision is not None and isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(None, _HOOKS[self._precision])
        return wrapped


def adopt_wrapper(theirs: Any) -> AdoptedWrapper:
    """The same of ours.

    `static_graph` and `find_unused_parameters` are for parameters that the loss does not reach, whose gradients ours
    averages without either.
    """
    options = {"bucket_cap_mb": theirs._bucket_cap_mb, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    return AdoptedWrapper(
        {**options, **theirs._ddp_kwargs},
        frozenset(theirs._additional_params_to_ignore),
        theirs._allreduce_comm_precision,
    )
