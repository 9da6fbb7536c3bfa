"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def reset_peak() -> int:
    """Forget the peak so far; returns bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(key: str) -> int:
    """Bytes under a key of `/proc/self/status`: `VmRSS` now, `VmHWM` at its peak."""
    return _bytes_under(key, "status")


def give_back() -> None:
    """Hand what is free back to the system, also where the allocator is told to keep it (glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def counted_elsewhere() -> int:
    """Bytes of shared memory that are resident here and belong to other processes, split evenly among those that
    have a page."""
    return resident("RssShmem") - _bytes_under("Pss_Shmem", "smaps_rollup")


def _bytes_under(key: str, file: str) -> int:
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/{file} has no {key}")
