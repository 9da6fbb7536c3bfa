"""Large pages under tables: a row that is read at random then costs no walk through the tables of pages.

A row of 256 bytes took 42 ns from pages of 4 KB, and 16 to 21 ns from pages of 2 MB. Linux gives large pages where it
is asked to: before memory is first written, and since 6.1 afterwards too, by copying it page by page. Only pages that
lie wholly inside a tensor are asked for, and tables are written as a whole when they are made: no more memory is held.
Large results are asked for too, before they are written: unpooled rows of 286 MB in new memory took 143 ms from pages
of 4 KB, most of it the system's for 70,000 of them, and 25 ms.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path

from torch import Tensor

from dmp import ranks

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_FROM_BYTES = 4 << 20  # what is smaller is reached through the CPU's own list of pages
_ON_WRITING, _NOW = 14, 25  # Linux's MADV_HUGEPAGE and MADV_COLLAPSE


def on_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, its memory on large pages where that is to be had; values stay as they are."""
    if (place := _large_pages_of(tensor)) and not _advise(*place, _ON_WRITING):
        _advise(*place, _NOW)  # what is written already; where this is unknown Linux may do it later
    return tensor


def to_write(tensor: Tensor) -> Tensor:
    """The tensor, which is about to be written; memory that was written before stays where it is: to move it costs more
    than it brings where an allocator hands out another part of it each time."""
    if place := _large_pages_of(tensor):
        _advise(*place, _ON_WRITING)
    return tensor


def _large_pages_of(tensor: Tensor) -> tuple[int, int] | None:
    """Where large pages lie wholly inside a tensor that may have them."""
    num_bytes = tensor.numel() * tensor.element_size()
    page = _page_bytes() if num_bytes >= _FROM_BYTES else 0
    # Memory of other processes is theirs too; a tensor that only stands for one has no address.
    if not page or tensor.device.type != "cpu" or type(tensor) is not Tensor or tensor.is_shared():
        return None
    start, stop = (tensor.data_ptr() + page - 1) // page * page, (tensor.data_ptr() + num_bytes) // page * page
    return (start, stop) if start < stop else None


def _advise(start: int, stop: int, wish: int) -> int:
    """Linux's error number; 0 where the wish was taken."""
    error = ctypes.get_errno() if _libc().madvise(start, stop - start, wish) else 0
    if error and wish == _ON_WRITING:
        ranks.say_once(f"tables and results stay on small pages: {os.strerror(error)}", logging.DEBUG)
    return error


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


@cache
def _page_bytes() -> int:
    """Of a large page; 0 where this system has none, or its administrator wants none."""
    try:
        wanted = "[never]" not in (_SETTINGS / "enabled").read_text()
        return int((_SETTINGS / "hpage_pmd_size").read_text()) if wanted and sys.platform == "linux" else 0
    except (OSError, ValueError):
        return 0
