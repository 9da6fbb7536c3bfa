"""Peak of a process's own memory while something runs.

The kernel's peak (`VmHWM`, as in memory.py) counts pages of mapped files, which it takes back when it needs them, and a
checkpoint may be read or written through a mapping. What counts here is anonymous and shared memory, which has no such
peak of its own: a thread samples it. What is shorter than a few milliseconds, or smaller than the room that the
allocator has kept from earlier, is not seen: what it has kept is given back first.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

EVERY_S = 0.002
T = TypeVar("T")


def peak_above(step: Callable[[], T]) -> tuple[T, int]:
    """What `step` returns, and the bytes that this process held at most above what it held before. Linux only."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    before = peak = held_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(EVERY_S):
            peak = max(peak, held_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = step()
    finally:
        done.set()
        thread.join()
    return result, max(peak, held_bytes()) - before


def held_bytes() -> int:
    """Anonymous and shared memory that is resident now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return sum(int(values[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
