"""A save in the background: on a copy of the state, after the training beside it, one at a time."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from dmp.checkpoint.save import Save
from dmp.chunked import ChunkedTensor
from dmp.put_around import put_around
from dmp.ranks import own_group

_log = logging.getLogger("dmp")

_pending: list[PendingSave] = []


class PendingSave:
    """A save that runs in the background, on staged copies: the model may be trained on at once.

    It takes its time, a tenth of a core's, for training goes first; who waits for it, or saves again, ends that.
    """

    def __init__(self, future: Future[None], hurry: threading.Event) -> None:
        self._future = future
        self._hurry = hurry

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every rank has written and the path is in place; until then it writes as fast as it can.

        Raises:
            CheckpointError: what stopped the save.
            TimeoutError: not done in time.
        """
        self._hurry.set()
        self._future.result(timeout_s)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()


def write_in_background(save: Save) -> PendingSave:
    """Run it on a copy of the tensors, with connections of its own; collective over its group.

    Returns:
        The handle; errors of the save are raised by its `wait`, and said in the log.
    """
    group = None if save.group is None else own_group(save.group, "background", timedelta(hours=1))
    _save_before_groups_end()
    content = save.content._replace(tensors={name: _staged(t) for name, t in save.content.tensors.items()})
    job = save._replace(content=content, group=group)
    hurry = threading.Event()

    def run() -> None:
        try:
            job.run(hurry)
        except Exception as error:  # also for a program that never asks the handle
            if save.rank == 0:
                _log.error("a save in the background failed: %s", error)
            raise

    _pending[:] = [PendingSave(_background.submit(run), hurry)]
    return _pending[0]


def _staged(tensor: ChunkedTensor) -> ChunkedTensor:
    """A copy, piece by piece, as it will be written: what is a view of something larger torch would copy once more."""
    pieces = [(offset, piece.to("cpu", copy=True)) for offset, piece in tensor.pieces()]
    return ChunkedTensor(tensor.size(), [p for _, p in pieces], [o for o, _ in pieces], tensor.dtype, "cpu")


def _step_back() -> None:
    """Training beside it goes first; on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the last of all


_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dmp-save", initializer=_step_back)


def wait_for_pending() -> None:
    """One save at a time: their collectives must not mix. Its error is for its own handle."""
    if _pending:
        with suppress(Exception):
            _pending.pop().wait()


@cache
def _save_before_groups_end() -> None:
    """`destroy_process_group` waits for the save that runs: it ends the connections of all groups, and a script whose
    last line it is lost its last checkpoint. That function itself may be known by other names already."""
    put_around(dist.ProcessGroup, "shutdown", _after_the_save)


def _after_the_save(shut_down: Callable[..., None], group: dist.ProcessGroup) -> None:
    wait_for_pending()
    shut_down(group)
