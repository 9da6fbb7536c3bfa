"""Where a thread of this process is, read from its Python stack: what a program does between calls of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = Path(__file__).resolve().parents[2]
_OUR_PACKAGES = tuple(str(_OURS / name) + os.sep for name in ("dmp", "sharders", "planner"))
_SKIPPED = ("c10d_logger.py", "_ops.py", "contextlib.py", "_contextlib.py")
_BACKWARD = "_engine_run_backward"
POLLING = ("poll_store", "poll_memory")
"""Names of the functions of ours that wait by asking again and again."""


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        waits_in: what of torch's it is in that may wait for other ranks: `the backward pass`, `torch's barrier`; or "".
        mark: the same as long as the thread has not moved.
    """

    waits_in: str
    mark: tuple[int, int]


def place_of(thread: int) -> Place:
    """Where the thread of this identifier is.

    [Note: frames of others] A thread that goes on while another walks its frames may crash the process in Python 3.11.
    So what is asked again and again looks at the innermost frames alone, and at more only where these wait.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place("", (0, 0))
    mark = (id(frame), 0 if frame.f_code.co_name in POLLING else frame.f_lasti)
    return Place(_waits_in(frame), mark)


def line_of(thread: int) -> str:
    """The line of the program itself in which the thread is, `train.py:41`; see [Note: frames of others]."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(_OUR_PACKAGES) or name.startswith(_torch()) or name.startswith("<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _waits_in(frame: FrameType | None) -> str:
    """What of torch's a thread waits in, if that is where its innermost frame is."""
    while frame is not None and os.path.basename(frame.f_code.co_filename) in _SKIPPED:
        frame = frame.f_back
    if frame is None:
        return ""
    if frame.f_code.co_name == _BACKWARD:
        return "the backward pass"
    if not _is_distributed(frame):
        return ""
    inner = frame.f_code.co_name
    outer: FrameType = frame
    while frame is not None and frame.f_code.co_name != _BACKWARD:
        if _is_distributed(frame) and os.path.basename(frame.f_code.co_filename) not in _SKIPPED:
            outer = frame
        frame = frame.f_back
    if frame is not None:
        return "the backward pass"
    name = outer.f_code.co_name
    if outer.f_code.co_filename.endswith(os.path.join("parallel", "distributed.py")) or "fsdp" in (
        outer.f_code.co_filename
    ):
        return "the forward pass" + (", for buffers of rank 0's" if "broadcast" in inner else "")
    return f"torch's {name}"


def _is_distributed(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    base = _torch()
    return name.startswith(os.path.join(base, "distributed") + os.sep) or name == os.path.join(
        base, "nn", "parallel", "distributed.py"
    )


def _torch() -> str:
    return os.path.dirname(torch.__file__)
