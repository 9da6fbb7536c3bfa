"""How many cores this process has: those that it may run on, or what a quota leaves of them.

A quota takes a group of processes off all cores once they have used up their time, for the rest of a period of mostly a
tenth of a second: where ranks have less than a core each, one that looks for another's word uses up the other's time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from pathlib import Path, PurePosixPath


def cores(root: Path = Path("/")) -> float:
    """Cores of this process, maybe a part of one more.

    Args:
        root: of the files that tell.
    """
    return min(len(os.sched_getaffinity(0)), quota(root))


def quota(root: Path = Path("/")) -> float:
    """Cores that the control groups of this process, and those around them, leave it; without end where none does.

    What cannot be read leaves all of them: many systems show no control groups.

    Args:
        root: see `cores`.
    """
    return min((_read(folder) for folder in _folders(root)), default=inf)


def _folders(root: Path) -> Iterator[Path]:
    """The group of this process and each around it, under every place where controllers of processors are mounted.

    In a container the group is often told by the host's path, while what is mounted begins at the container's own: so
    the mounted root is among them, and what is not there is passed over.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, group = rest.partition(":")  # no names: the second version's, which has all controllers
        if names and "cpu" not in names.split(","):
            continue
        inside = PurePosixPath(group.lstrip("/"))
        if ".." in inside.parts:  # a group around what this process can see
            inside = PurePosixPath()
        for place in (mounted / names, mounted / "cpu") if names else (mounted, mounted / "unified"):
            yield from (place / each for each in (inside, *inside.parents))


def _read(folder: Path) -> float:
    """Cores that one group's quota leaves."""
    allowed, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not allowed:
        allowed, period = (_text(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period"))
    if not (allowed.isdecimal() and period.isdecimal() and int(allowed) and int(period)):
        return inf  # "max", -1, or no quota here
    return int(allowed) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
