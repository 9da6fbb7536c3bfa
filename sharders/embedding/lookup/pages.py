"""Large pages under tables: a row that is read at random then costs no walk through the tables of pages.

A row of 256 bytes took 42 ns from pages of 4 KB, and 16 to 21 ns from pages of 2 MB. Linux gives large pages where it
is asked to: before memory is first written, and since 6.1 afterwards too, by copying it page by page. Only pages that
lie wholly inside a tensor are asked for, and tables are written as a whole when they are made: no more memory is held.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path

from torch import Tensor

_log = logging.getLogger("dmp")

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_FROM_BYTES = 4 << 20  # what is smaller is reached through the CPU's own list of pages
_ON_WRITING, _NOW = 14, 25  # Linux's MADV_HUGEPAGE and MADV_COLLAPSE


def on_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, its memory on large pages where that is to be had; values stay as they are."""
    num_bytes = tensor.numel() * tensor.element_size()
    page = _page_bytes() if num_bytes >= _FROM_BYTES else 0
    # Memory of other processes is theirs too; a tensor that only stands for one has no address.
    if not page or tensor.device.type != "cpu" or type(tensor) is not Tensor or tensor.is_shared():
        return tensor
    start, stop = (tensor.data_ptr() + page - 1) // page * page, (tensor.data_ptr() + num_bytes) // page * page
    if start < stop and not _advise(start, stop, _ON_WRITING):
        _advise(start, stop, _NOW)  # what is written already; where this is unknown Linux may do it later
    return tensor


def _advise(start: int, stop: int, wish: int) -> int:
    """Linux's error number; 0 where the wish was taken."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    error = ctypes.get_errno() if libc.madvise(start, stop - start, wish) else 0
    if error and wish == _ON_WRITING:
        _say_once(f"tables stay on small pages: {os.strerror(error)}")
    return error


@cache
def _page_bytes() -> int:
    """Of a large page; 0 where this system has none, or its administrator wants none."""
    try:
        wanted = "[never]" not in (_SETTINGS / "enabled").read_text()
        return int((_SETTINGS / "hpage_pmd_size").read_text()) if wanted and sys.platform == "linux" else 0
    except (OSError, ValueError):
        return 0


@cache
def _say_once(text: str) -> None:
    _log.debug("%s", text)
