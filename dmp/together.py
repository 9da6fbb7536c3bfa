"""Local steps that all ranks take together: where one fails, all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from dmp.errors import CheckpointError

_SHOWN = 5
T = TypeVar("T")


def together(step: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """Run a local step on every rank; when it fails on one, every rank raises the same.

    Raises:
        CheckpointError: naming the ranks and what failed there.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    result: list[T] = []
    cause: BaseException | None = None
    try:
        result.append(step())
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must hear of it
        cause = error
    message = None if cause is None else _text(cause)
    messages: list[str | None] = [message]
    if group is not None:
        messages = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, message, group=group)
    failed: dict[str, list[int]] = {}
    for rank, text in enumerate(messages):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        parts = [text if len(ranks) == len(messages) else f"rank {ranks[0]}: {text}" for text, ranks in failed.items()]
        raise CheckpointError(f"{what}: " + "; ".join(parts[:_SHOWN])) from cause
    return result[0]


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"
