"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def reset_peak() -> int:
    """Forget the peak so far; returns bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(key: str) -> int:
    """Bytes under a key of `/proc/self/status`: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
