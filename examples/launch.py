"""Where a run takes place: its mesh, its first rank, which speaks for all, and how it ends on an error."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmp import ShardingEnv

_WAIT_FOR_FIRST_S = 10.0
_LET_GO_S = 0.2
_DEFAULT_AXES = {1: ["dp"], 2: ["replicate", "shard"]}


def make_env(mesh: list[int] | None, axes: list[str] | None, device_type: str) -> ShardingEnv:
    """Env over the processes that torchrun started, or over this one alone.

    Args:
        mesh: sizes of the mesh's axes; None for all processes in one.
        axes: their names; None for the usual ones of one or two axes.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: a mesh that does not fit the number of processes, or its names.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    mesh = mesh or [size]
    if math.prod(mesh) != size:
        asked = "x".join(map(str, mesh))
        raise ValueError(f"--mesh {asked} takes {math.prod(mesh)} processes, this run has {size} (see torchrun)")
    axes = axes or _DEFAULT_AXES.get(len(mesh), [])
    if len(axes) != len(mesh):
        raise ValueError(f"--mesh has {len(mesh)} axes, --axes names {len(axes)}: {','.join(axes) or 'none'}")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" not in os.environ:
        return ShardingEnv.single(device_type)
    return ShardingEnv.from_mesh(init_device_mesh(device_type, tuple(mesh), mesh_dim_names=tuple(axes)))


def is_first() -> bool:
    """Whether this process is rank 0, which speaks for all."""
    return int(os.environ.get("RANK", 0)) == 0


def say(text: object) -> None:
    """Prints on rank 0."""
    if is_first():
        print(text, flush=True)


def leave() -> None:
    """Ends the process groups, if there are any.

    Gloo's threads outlive this, for a DDP module keeps its group. One that has yet to drop the tensor of the last
    collective needs the interpreter for it, and aborts the process when it finds it gone: so it gets a moment.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_LET_GO_S)


def fail(message: str) -> NoReturn:
    """Ends this process with exit code 2 and one line that says why.

    Rank 0 speaks for all: its end makes torchrun end the others. They wait for that, and speak only if it does not
    come, for then the error was their own.
    """
    if is_first():
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_FOR_FIRST_S)
        print(f"error on rank {os.environ['RANK']}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
