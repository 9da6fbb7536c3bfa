"""Options of the wrappers that cannot be, told before anything is changed.

torch stumbles over them in the middle of wrapping, when tables are cut already, or of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from math import prod
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dmp import ShardError, ShardingEnv

_OF_THE_MESH = ("module", "device_ids", "output_device", "dim", "process_group", "device_mesh")


def check_ddp(options: Mapping[str, Any]) -> None:
    """Those of `DistributedDataParallel`.

    Raises:
        ShardError: one that it has not, or that the mesh gives.
    """
    taken = sorted(signature(DistributedDataParallel).parameters.keys() - set(_OF_THE_MESH))
    if unknown := sorted(options.keys() - set(taken)):
        raise ShardError(
            f"DDPWrapper takes options of DistributedDataParallel, of which the mesh gives ranks and devices; got "
            f"{unknown}, expected some of {taken}"
        )


def check_fsdp(given: Mapping[str, Any]) -> None:
    """Those of `FSDPWrapper`, by name.

    Raises:
        ShardError: one of another kind than it takes.
    """
    for name, (is_right, expected) in _KINDS.items():
        if not is_right(given[name]):
            raise ShardError(f"{name} of FSDPWrapper is {expected}; got {given[name]!r}")


def _is_precision(value: Any) -> bool:
    if isinstance(value, torch.dtype):
        return value.is_floating_point
    return value is None or _is_of_fsdp(value, "MixedPrecisionPolicy")


def _is_of_fsdp(value: Any, name: str) -> bool:
    from torch.distributed import fsdp  # which is not imported for who gives none of its own

    return isinstance(value, getattr(fsdp, name))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reshard_after_forward": (lambda v: v is None or isinstance(v, int), "None, a bool or a number of ranks"),
    "mixed_precision": (_is_precision, "a floating-point torch.dtype or a MixedPrecisionPolicy"),
    "offload": (lambda v: isinstance(v, bool) or _is_of_fsdp(v, "OffloadPolicy"), "a bool or an OffloadPolicy"),
    "activation_checkpointing": (
        lambda v: isinstance(v, bool) or callable(v),
        "a bool or a choice (path, module) -> bool",
    ),
    "compile": (lambda v: isinstance(v, bool | Mapping), "a bool or a dict of options of torch.compile"),
}


def check_parts(reshard_after_forward: bool | int | None, env: ShardingEnv) -> None:
    """Whether weights can be kept, after a forward, in so many parts.

    Raises:
        ShardError: they cannot.
    """
    if not env.fully_sharded_axes or type(reshard_after_forward) is not int:
        return
    size = prod(env.shape[env.names.index(axis)] for axis in env.fully_sharded_axes)
    if reshard_after_forward < 1 or size % reshard_after_forward:
        raise ShardError(
            f"reshard_after_forward={reshard_after_forward} of FSDPWrapper: a number of ranks is a divisor of the "
            f"{size} that weights are split over, here {env}"
        )


def check_torch() -> None:
    """That torch's FSDP2 can what is needed of it.

    Raises:
        ShardError: it cannot.
    """
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ShardError(
            f"weights cannot be fully sharded with torch {torch.__version__}: expected torch 2.13 or later, whose "
            "FSDP2 averages gradients that some rank's loss does not reach. Copies and tables need no FSDP2"
        )
