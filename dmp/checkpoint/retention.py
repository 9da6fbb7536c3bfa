"""A folder of checkpoints: which is the newest whole one, and which may go.

[Note: names]
    x               a checkpoint that `save_checkpoint` wrote
    .x.saving       one that is being written, or whose save was cut short
    .x.replaced     what lay at x before; it counts as x while nothing is there (see `_replace` of targets/native.py)
    .x.removing     one that is being removed, or whose removal was cut short; its dmp.json goes last
    .x.claim        a file that says who saves to x at this moment, see targets/claim.py
A link is left alone: what it points to is a checkpoint where it lies. What is removed is ours to the last entry, see
targets/replaceable.py.

[Note: order]
By `saved_ns`, which is rank 0's clock, or one more than the newest beside it has where the clock is behind that: so the
last that was saved is the newest, whatever clocks say.

[Note: abandoned]
Saves into one folder go one after another. So a `.x.saving` in which nothing was written since the newest whole
checkpoint was begun is what a killed save left, and one that is newer, or is claimed by a save that lives, may be
being written at this moment. Nor is anything touched beside the newest itself: it may be changing places with its
predecessor.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dmp.checkpoint.place import place_of
from dmp.checkpoint.sources.native import Folder
from dmp.checkpoint.sources.source import ABOUT
from dmp.checkpoint.targets.claim import claim_of, drop_claim, is_dead
from dmp.checkpoint.targets.replaceable import about_of, remove_own, stranger_at
from dmp.errors import CheckpointError
from dmp.read_values import is_size

_log = logging.getLogger("dmp")
_HIDDEN = re.compile(r"\.(.+)\.(saving|replaced|removing)")
_CLAIM = re.compile(r"\..+\.claim(\.[0-9a-f]{32})?")
_SILENT_NS = 60 * 10**9  # of a claim, against its touches every few seconds


class _FoundFolder(NamedTuple):
    """A folder of ours."""

    path: Path
    name: str
    """x of [Note: names]."""
    state: str
    """"", "saving", "replaced" or "removing"."""
    saved_ns: float
    """See [Note: order]; 0 where it does not say, infinite where it cannot be read."""

    def is_whole(self, otherwise: str) -> bool:
        """Whether it is; else the log says why it is not, after `otherwise`."""
        problem = f"{self.path} is a save that was cut short, or still runs"
        if self.state != "saving":
            try:
                Folder(self.path)
                return True
            except (CheckpointError, OSError, RecursionError) as error:
                problem = f"{self.path}: {error}" if isinstance(error, RecursionError) else str(error)
        _log.warning("%s: %s", otherwise, problem)
        return False


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
    root = place_of(folder, "latest(folder)")
    return next((root / one.name for one in _candidates(_found(root)) if one.is_whole("passed over")), None)


def keep_last(folder: str | os.PathLike[str], count: int) -> list[Path]:
    """Remove all whole checkpoints directly in a folder but the newest `count`, and what killed saves left there.

    For one rank to call. Folders of one job: where two save into one, each may take the other's running save
    for one that was cut short. Damaged checkpoints, links and whatever `save_checkpoint` did not write stay, and so
    does a checkpoint into which something else was put. A removal that is cut short leaves nothing that looks like a
    checkpoint, and the next call ends it.

    Returns:
        What was removed.

    Raises:
        ValueError: a count below 1.
        CheckpointError: a folder that is none, or a URL.
        OSError: something that cannot be removed.
    """
    return remove_older(place_of(folder, "keep_last(folder, count)"), count)


def next_saved_ns(folder: Path) -> int:
    """For what is saved into a folder now; see [Note: order]."""
    after = [one.saved_ns + 1 for one in _found(folder) if is_size(one.saved_ns)]
    return int(max([time.time_ns(), *filter(is_size, after)]))


def remove_older(root: Path, count: int, just_written: str | None = None) -> list[Path]:
    """As `keep_last`; the checkpoint of the name `just_written` stays, whatever the clocks say."""
    if count < 1:
        raise ValueError(f"keep_last: expected a count of at least 1, got {count}")
    found = _found(root)
    whole = [one for one in _candidates(found) if one.state != "saving" and one.is_whole("kept as it is")]
    removed = [one for one in found if one.state == "removing"]
    if whole:
        removed += [one for one in found if _is_abandoned(one, whole)]
        removed += [one for one in whole[count:] if one.name != just_written]
    removed = [one for one in removed if _is_ours_alone(one)]
    for one in removed:
        hidden = root / f".{one.name}.removing"
        if one.path != hidden:
            os.rename(one.path, hidden)
        remove_own(hidden)
    for path in root.iterdir() if root.is_dir() else ():
        if _CLAIM.fullmatch(path.name) and is_dead(path):
            drop_claim(path)
    return [one.path for one in removed]


def _is_ours_alone(one: _FoundFolder) -> bool:
    """Whether it, and what lies where it is removed, is ours to the last entry."""
    for path in (one.path, one.path.with_name(f".{one.name}.removing")):
        stranger = stranger_at(path)
        if stranger is not None:
            _log.warning("kept: %s: %s", one.path, stranger)
            return False
    return True


def _found(root: Path) -> list[_FoundFolder]:
    """Every folder of ours that lies in a folder."""
    if not root.is_dir():
        return []
    found: list[_FoundFolder] = []
    for path in root.iterdir():
        try:
            if path.is_dir() and not path.is_symlink():
                found += _describe(path)
        except FileNotFoundError:  # just renamed, by a save that runs in the background
            continue
        except OSError as error:
            _log.warning("passed over: %s", error)
    return found


def _describe(path: Path) -> Iterator[_FoundFolder]:
    hidden = _HIDDEN.fullmatch(path.name)
    name, state = hidden.groups() if hidden else (path.name, "")
    files = set(os.listdir(path))
    just_begun = state in ("saving", "removing") and not files
    if not (just_begun or files & {ABOUT, "objects.pt"}):
        return
    try:
        about = about_of(path)
    except (OSError, ValueError):
        about = {"saved_ns": None}
    if about is not None:
        saved_ns = about.get("saved_ns", 0)
        yield _FoundFolder(path, name, state, saved_ns if is_size(saved_ns) else math.inf)


def _candidates(found: list[_FoundFolder]) -> list[_FoundFolder]:
    """What is a checkpoint, or would have become one; newest first."""
    there = {one.name for one in found if not one.state}
    one_each = [one for one in found if one.state in ("", "saving") or _counts_as_there(one, there)]
    return sorted(one_each, key=lambda one: (one.saved_ns, _by_number(one.name)), reverse=True)


def _counts_as_there(one: _FoundFolder, there: set[str]) -> bool:
    return one.state == "replaced" and one.name not in there and not one.path.with_name(one.name).exists()


def _by_number(name: str) -> list[tuple[str, int]]:
    """Orders step-3 before step-10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _is_abandoned(one: _FoundFolder, whole: list[_FoundFolder]) -> bool:
    """Whether a hidden folder is what a killed save left; see [Note: abandoned]."""
    newest = whole[0]
    if one.name == newest.name:
        return False
    if one.state == "replaced":
        return any(other.name == one.name and other.path != one.path for other in whole)
    began_ns = (newest.path / ABOUT).stat().st_mtime_ns
    try:
        return (
            one.state == "saving"
            and all(path.lstat().st_mtime_ns < began_ns for path in [one.path, *one.path.rglob("*")])
            and not _is_claimed(one, began_ns)
        )
    except FileNotFoundError:  # something in it was just renamed: it is being written
        return False


def _is_claimed(one: _FoundFolder, now_ns: int) -> bool:
    """Whether a save that may live has the claim; `now_ns` is of the same file system's clock."""
    claim = claim_of(one.path.with_name(one.name))
    return not is_dead(claim) and claim.lstat().st_mtime_ns > now_ns - _SILENT_NS
