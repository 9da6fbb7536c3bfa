"""Where a thread of this process is, read from its Python stack: what a program does between calls of ours."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from dmp.collection import without_collection

_OURS = Path(__file__).resolve().parents[2]
_OUR_PACKAGES = tuple(str(_OURS / name) + os.sep for name in ("dmp", "sharders", "planner"))
_SKIPPED = tuple(
    os.sep + name
    for name in (
        "c10d_logger.py",
        "_ops.py",
        "contextlib.py",
        "_contextlib.py",
        os.path.join("_library", "autograd.py"),
    )
)
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

    [Note: frames of others] Until Python 3.11 a garbage collection may begin where `f_back` makes an object of a frame;
    what it destroys may let the thread go on, whose frame is gone then: the process crashes. So none may begin there,
    and what is asked again and again looks at the innermost frame alone. (`faulthandler`, which writes frames in one
    call, crashes in Python 3.13.0 where one of C's lies on another.)
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place("", (0, 0))
    code = frame.f_code
    mark = (id(frame), 0 if code.co_name in POLLING else frame.f_lasti)
    return Place(_waits_in(_Frame(code.co_filename, 0, code.co_name), thread), mark)


def line_of(thread: int) -> str:
    """The line of the program itself in which the thread is, `train.py:41`."""
    for frame in _frames_of(thread):
        if not (frame.is_skipped or frame.file.startswith((*_OUR_PACKAGES, _torch(), "<"))):
            return f"{os.path.basename(frame.file)}:{frame.line}"
    return ""


class _Frame(NamedTuple):
    """A frame of a stack: in which function of which file, and at which line."""

    file: str
    line: int
    function: str

    @property
    def is_skipped(self) -> bool:
        return self.file.endswith(_SKIPPED)


def _frames_of(thread: int) -> list[_Frame]:
    """The frames of a thread, from the innermost on; see [Note: frames of others]."""
    with without_collection():
        found, frame = [], sys._current_frames().get(thread)
        while frame is not None:
            found.append(_Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found


def _waits_in(inner: _Frame, thread: int) -> str:
    """What of torch's a thread waits in, if that is where its innermost frame is."""
    if inner.function == _BACKWARD:
        return "the backward pass"
    if not (inner.is_skipped or _is_distributed(inner)):
        return ""
    frames = list(itertools.dropwhile(lambda frame: frame.is_skipped, _frames_of(thread)))
    if not frames or not (frames[0].function == _BACKWARD or _is_distributed(frames[0])):
        return ""
    outer = frames[0]
    for frame in frames:
        if frame.function == _BACKWARD:
            return "the backward pass"
        if _is_distributed(frame) and not frame.is_skipped:
            outer = frame
    is_ddp = outer.file.endswith(os.path.join("parallel", "distributed.py"))
    if is_ddp and outer.function == "__init__":
        return "torch's DistributedDataParallel(...)"
    if is_ddp or "fsdp" in outer.file:
        return "the forward pass" + (", for buffers of rank 0's" if "broadcast" in frames[0].function else "")
    return f"torch's {outer.function}"


def _is_distributed(frame: _Frame) -> bool:
    base = _torch()
    return frame.file.startswith(os.path.join(base, "distributed") + os.sep) or frame.file == os.path.join(
        base, "nn", "parallel", "distributed.py"
    )


def _torch() -> str:
    return os.path.dirname(torch.__file__)
