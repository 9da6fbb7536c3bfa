"""The process group of a launch: ranks that were started together train one model, also where nobody made a group."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from dmp.errors import ShardError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_log = logging.getLogger("dmp")


def join_launch(device: torch.device | None) -> None:
    """Initialise the default group where a launcher started several processes and the program did not; else nothing.

    Args:
        device: that the model will be on, which decides the backend; None is the CPU.

    Raises:
        ShardError: the environment tells of several processes, but not how to find them.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("", "1") or not dist.is_available() or dist.is_initialized():
        return
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        raise ShardError(
            f"WORLD_SIZE={size} says that {size} processes were started, and none has called "
            f"torch.distributed.init_process_group; without {missing} in the environment it cannot be done here, and "
            "each process would train a model of its own. Call init_process_group before wrapping, start with "
            "torchrun, or pass env=ShardingEnv.single() for a model of this process alone"
        )
    kind = "cpu" if device is None else device.type
    backend = dist.get_default_backend_for_device(kind)
    if kind != "cpu" and device is not None and device.index is None and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if os.environ["RANK"] == "0":
        _log.warning(
            "torch.distributed.init_process_group(%r) for the %s processes that were started: the program had not "
            "called it before wrapping",
            backend,
            size,
        )
    dist.init_process_group(backend)
