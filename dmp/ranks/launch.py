"""The process group of a launch: ranks that were started together train one model, also where nobody made a group.

[Note: lives] With `--max-restarts`, torchrun starts the processes anew where one has failed, and its agent has one
store for all these lives. torch (2.13) then reads there where ranks of the life before have listened, and gloo cannot
connect or waits for minutes, life after life. A group that is made here has keys of its life; of a group that the
program makes, nobody can say so in the life where it fails: so it is said in the first.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dmp.errors import ShardError
from dmp.ranks.connections import backend_of

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
    if size in ("", "1") or not dist.is_available():
        return
    if dist.is_initialized():
        if _has_one_store() and backend_of(None) == "gloo" and os.environ.get("RANK") == "0":
            _say_of_restarts(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
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
    dist.init_process_group(backend, **_of_this_life())


def _has_one_store() -> bool:
    """Whether torchrun's agent gives all lives the same."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_this_life() -> dict[str, Any]:
    """Arguments for a group that does not read what ranks of the life before have written; see [Note: lives]."""
    if not _has_one_store():
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torchs: Any = dist  # which says nothing to mypy of its stores
    store = torchs.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    life = f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {size}"
    return {"store": torchs.PrefixStore(life, store), "rank": rank, "world_size": size}


@cache
def _say_of_restarts(most: str) -> None:
    if most not in ("", "0"):
        _log.warning(
            "torchrun will restart these processes up to %s times in one store, where torch's gloo finds addresses of "
            "the life before, and cannot connect: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
            "environment, or leave init_process_group to the wrapper",
            most,
        )
