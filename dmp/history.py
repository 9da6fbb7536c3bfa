"""A folder of checkpoints: which is the newest whole one, and which may go.

[Note: names]
    x               a checkpoint that `save_checkpoint` wrote
    .x.saving       one that is being written, or whose save was cut short
    .x.replaced     what lay at x before; it counts as x while nothing is there (see `_replace` of saving.py)
    .x.removing     one that is being removed, or whose removal was cut short; its dmp.json goes last
A link is left alone: what it points to is a checkpoint where it lies.

[Note: leftovers]
Saves into one folder go one after another. So a `.x.saving` in which nothing was written since the newest whole
checkpoint was begun is what a killed save left, and one that is newer may be being written at this moment. Nor is
anything touched beside the newest itself: it may be changing places with its predecessor.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dmp.errors import CheckpointError
from dmp.folder import Folder

_log = logging.getLogger("dmp")
_HIDDEN = re.compile(r"\.(.+)\.(saving|replaced|removing)")
_ABOUT = "dmp.json"


class _Found(NamedTuple):
    """A folder of ours."""

    path: Path
    name: str
    """x of [Note: names]."""
    state: str
    """"", "saving", "replaced" or "removing"."""
    saved_ns: float
    """Rank 0's clock when it was saved; 0 where it does not say, infinite where it cannot be read."""

    def problem(self) -> str | None:
        """Why it is not whole; None where it is."""
        if self.state == "saving":
            return f"{self.path} is a save that was cut short, or still runs"
        try:
            Folder(self.path)
        except CheckpointError as error:
            return str(error)
        return None


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint directly in a folder, by the time at which it was saved; None where there is none.

    Checkpoints are those that `save_checkpoint` wrote, under any name. The logger "dmp" names each that is newer and
    is passed over, as a save cut short or a damaged file. Every rank may ask for itself, while nothing is being saved.
    Tensors are checked when they are loaded: move a checkpoint that `load_checkpoint` calls damaged out of the folder,
    and the one before it is the newest.

    Example:
        >>> if (path := latest("checkpoints")) is not None:  # doctest: +SKIP
        ...     extra = load_checkpoint(path, model, optimizer)
    """
    root = Path(folder).absolute()
    for one in _candidates(_found(root)):
        problem = one.problem()
        if problem is None:
            return root / one.name
        _log.warning("passed over: %s", problem)
    return None


def keep_last(folder: str | os.PathLike[str], count: int) -> list[Path]:
    """Remove all whole checkpoints directly in a folder but the newest `count`, and what killed saves left there.

    For one rank to call. Folders of one job: where two save into one, each may take the other's running save for a
    leftover. Damaged checkpoints, links and whatever `save_checkpoint` did not write stay. A removal that is cut short
    leaves nothing that looks like a checkpoint, and the next call ends it.

    Returns:
        What was removed.

    Raises:
        ValueError: a count below 1.
        OSError: something that cannot be removed.
    """
    if count < 1:
        raise ValueError(f"keep_last: expected a count of at least 1, got {count}")
    root = Path(folder).absolute()
    found = _found(root)
    whole = [one for one in _candidates(found) if one.state != "saving" and _is_whole(one)]
    removed = [one for one in found if one.state == "removing"]
    if whole:
        removed += [one for one in found if _is_leftover(one, whole)]
        removed += whole[count:]
    for one in removed:
        hidden = root / f".{one.name}.removing"
        if one.path != hidden:
            os.rename(one.path, hidden)
        _clear(hidden)
    return [one.path for one in removed]


def _found(root: Path) -> list[_Found]:
    """Every folder of ours that lies in a folder."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return [one for path in paths for one in _as_ours(path)]


def _as_ours(path: Path) -> Iterator[_Found]:
    hidden = _HIDDEN.fullmatch(path.name)
    name, state = hidden.groups() if hidden else (path.name, "")
    try:
        files = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:  # just renamed, by a save that runs in the background
        return
    just_begun = state in ("saving", "removing") and files <= {"plan.json"}
    if not (just_begun or files & {_ABOUT, "objects.pt"}):
        return
    try:
        about = json.loads((path / _ABOUT).read_bytes())
    except (OSError, ValueError):
        yield _Found(path, name, state, math.inf)
        return
    if isinstance(about, dict) and about.get("format") == "dmp":
        yield _Found(path, name, state, about.get("saved_ns", 0))


def _candidates(found: list[_Found]) -> list[_Found]:
    """What is a checkpoint, or would have become one; newest first."""
    there = {one.name for one in found if not one.state}
    one_each = [one for one in found if one.state in ("", "saving") or _counts_as_there(one, there)]
    return sorted(one_each, key=lambda one: (one.saved_ns, _natural(one.name)), reverse=True)


def _counts_as_there(one: _Found, there: set[str]) -> bool:
    return one.state == "replaced" and one.name not in there and not one.path.with_name(one.name).exists()


def _natural(name: str) -> list[tuple[str, int]]:
    """Orders step-3 before step-10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _is_whole(one: _Found) -> bool:
    problem = one.problem()
    if problem is not None:
        _log.warning("kept as it is: %s", problem)
    return problem is None


def _is_leftover(one: _Found, whole: list[_Found]) -> bool:
    """Whether a hidden folder is what a killed save left; see [Note: leftovers]."""
    newest = whole[0]
    if one.name == newest.name:
        return False
    if one.state == "replaced":
        return any(other.name == one.name and other.path != one.path for other in whole)
    began_ns = (newest.path / _ABOUT).stat().st_mtime_ns
    try:
        return one.state == "saving" and all(p.lstat().st_mtime_ns < began_ns for p in [one.path, *one.path.rglob("*")])
    except FileNotFoundError:  # something in it was just renamed: it is being written
        return False


def _clear(path: Path) -> None:
    """Remove a folder; dmp.json goes last, for what is left over must be known as ours."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _ABOUT:
            entry.unlink()
    (path / _ABOUT).unlink(missing_ok=True)
    path.rmdir()
