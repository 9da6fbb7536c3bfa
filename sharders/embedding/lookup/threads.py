"""Parts of one piece of work on the threads that this process is given: `torch.get_num_threads()`.

The work is compiled code that drops the interpreter's lock. Parts are cut so that no bit of a result depends on their
number. A forked process makes threads of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

ENOUGH_IDS = 4096  # for a thread


def num_parts(num_ids: int) -> int:
    """Into how many parts the work on so many ids is cut."""
    threads = torch.get_num_threads()
    return max(1, min(threads, num_ids // ENOUGH_IDS)) if threads > 1 else 1


def run(part: Callable[[int], object], parts: int) -> None:
    """Call `part` with 0, 1, ... `parts` - 1, and wait for all."""
    others = [_pool(os.getpid()).submit(part, i) for i in range(1, parts)]
    part(0)
    for other in others:
        other.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "lookup")
