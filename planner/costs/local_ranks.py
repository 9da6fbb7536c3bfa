"""Processes of this machine that measure together: started, joined into a group, asked one thing, and gone."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_COLLECTIVE_TIMEOUT = timedelta(minutes=2)


def on_ranks(count: int, device_type: str, run: Callable[..., Any], *args: Any) -> Any:
    """What `run(*args)` gives on rank 0 of `count` processes, each with one thread and, of accelerators, one device.

    Args:
        run: of a module's top level, as it travels by name; called on all ranks.

    Raises:
        RuntimeError: a rank raised, or ended without an answer.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_work, args=(rank, count, folder, device_type, pipe, run, args), name=f"rank {rank}", daemon=True
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, theirs in pipes:
                theirs.close()
            return _answers([ours for ours, _ in pipes])[0]
        finally:
            for rank in ranks:
                rank.join(timeout=5) if rank.pid else None
                if rank.is_alive():
                    rank.kill()
                    rank.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found])
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                found[rank], error = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without an answer") from None
            if error:
                raise RuntimeError(f"rank {rank} failed: {error.strip().splitlines()[-1]}\n{error}")
    return [found[rank] for rank in range(len(pipes))]


def _work(
    rank: int,
    count: int,
    folder: str,
    device_type: str,
    pipe: Connection,
    run: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")  # of libraries: what is printed is the parent's
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    try:
        if device_type != "cpu":
            torch.accelerator.set_device_index(rank)
        dist.init_process_group(
            dist.get_default_backend_for_device(device_type),
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=count,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        answer, error = run(*args), ""
        dist.barrier()
    except BaseException:
        answer, error = None, traceback.format_exc()
    pipe.send((answer, error))
    if dist.is_initialized():
        dist.destroy_process_group()
