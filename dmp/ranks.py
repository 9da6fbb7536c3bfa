"""Local steps that all ranks take together: where one fails, all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dmp.errors import CheckpointError

_SHOWN = 5
T = TypeVar("T")


class PeerLost(CheckpointError):
    """Another rank is gone: what it has done, and what the others still do, is not known."""


def together(step: Callable[[], T], group: dist.ProcessGroup | None, what: str, same: Any = None) -> T:
    """As `everyone`, where only this rank's own result is wanted."""
    result: list[T] = []
    everyone(lambda: result.append(step()), group, what, same)
    return result[0]


def everyone(step: Callable[[], T], group: dist.ProcessGroup | None, what: str, same: Any = None) -> list[T]:
    """Run a local step on every rank; when it fails on one, every rank raises the same.

    Args:
        step: without collectives.
        what: for the error; the same on every rank, or that is the error.
        same: likewise.

    Returns:
        What the step returned on each rank.

    Raises:
        CheckpointError: naming the ranks and what failed there.
        PeerLost: a rank does not answer.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    result: T | None = None
    cause: BaseException | None = None
    try:
        result = step()
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must hear of it
        cause = error
    message = None if cause is None else _text(cause)
    about = what if same is None else f"{what} ({same})"
    said: list[tuple[str, str | None, Any]] = [(about, message, result)]
    if group is not None:
        said = said * dist.get_world_size(group)
        try:
            dist.all_gather_object(said, (about, message, result), group=group)
        except RuntimeError as error:
            own = f"; here: {message}" if message else ""
            raise PeerLost(f"{what}: another rank is gone ({error}){own}") from error
    others = {text: rank for rank, (text, _, _) in reversed(list(enumerate(said)))}
    if len(others) > 1:
        shown = "; ".join(
            f"rank {rank}: {text}" for text, rank in sorted(others.items(), key=lambda pair: pair[1])[:_SHOWN]
        )
        raise CheckpointError(f"the ranks are not at the same checkpoint: {shown}") from cause
    failed: dict[str, list[int]] = {}
    for rank, (_, text, _) in enumerate(said):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        parts = [text if len(ranks) == len(said) else f"rank {ranks[0]}: {text}" for text, ranks in failed.items()]
        raise CheckpointError(f"{what}: " + "; ".join(parts[:_SHOWN])) from cause
    return [result for _, _, result in said]


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"
