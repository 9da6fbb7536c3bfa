"""What a save may replace or remove: what a save of ours has written, file by file and by its name.

[Note: ours]
A folder is ours when every entry in it is a plain file with a name that a save writes, and its `dmp.json` says so. In a
save or a removal that was cut short that file may be unreadable, being the first to come and the last to go. An empty
folder holds nothing that could be lost. Anything else (a file, a link, a folder with one entry more) is a stranger's.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from dmp.checkpoint.sources.source import ABOUT
from dmp.errors import CheckpointError
from dmp.read_values import some

_NAMES = re.compile(
    r"dmp\.json|plan\.json|objects\.pt|checksums\.json|tensors\.json|(__\d+)?\.metadata(\.tmp)?"
    r"|__\d+_([0-9a-f]{8}_)?\d+\.distcp"
)


def about_of(folder: Path) -> dict[str, Any] | None:
    """A folder's `dmp.json`; None where it is of something else.

    Raises:
        OSError: it cannot be read, or is not there.
        ValueError: it is no JSON.
    """
    path = folder / ABOUT
    if not stat.S_ISREG(path.lstat().st_mode):
        return None
    try:
        about = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return about if isinstance(about, dict) and about.get("format") == "dmp" else None


def stranger_at(path: Path) -> str | None:
    """What makes the path more than missing, an empty folder or a folder of ours, in words; None where nothing does.

    Raises:
        OSError: a folder that cannot be read.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return f"{path} is a link to {os.readlink(path)}"
    if not stat.S_ISDIR(mode):
        size = f" of {path.lstat().st_size:,} bytes" if stat.S_ISREG(mode) else ""
        return f"{path} is a file{size}"
    kinds = _kinds(path)
    foreign = sorted(name for name, is_file in kinds.items() if not (is_file and _NAMES.fullmatch(name)))
    if foreign:
        return f"{path} holds {some(foreign)}, which no checkpoint has"
    if kinds and not _is_marked(path, kinds.keys() <= {ABOUT}):
        if _kinds(path) != kinds:  # another save has put it in its place, or removed it, in this moment
            return stranger_at(path)
        return f"{path} holds {some(sorted(kinds))}, and no {ABOUT} that says that a save wrote it"
    return None


def _kinds(folder: Path) -> dict[str, bool]:
    """Whether each entry of a folder is a plain file; none where there is no folder any more."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return {}


def _is_marked(path: Path, is_alone: bool) -> bool:
    """Whether `dmp.json` says that it is ours; where it cannot be read, whether it is all there is."""
    try:
        return about_of(path) is not None
    except (OSError, ValueError):
        return is_alone


def refuse_strangers(path: Path) -> None:
    """Raise where something lies at a path that a save may not replace.

    Raises:
        CheckpointError: it names what lies there.
        OSError: a folder that cannot be read.
    """
    stranger = stranger_at(path)
    if stranger is not None:
        raise CheckpointError(
            f"{stranger}: a save replaces nothing but a checkpoint of its own, or an empty folder; give another path, "
            f"such as {path / 'step-1' if path.is_dir() else path.with_name(path.name + '-1')}, or move it away"
        )


def remove_own(path: Path) -> None:
    """Remove a folder of ours, if one lies there; dmp.json goes last, for what is left over must be known as ours.

    Raises:
        CheckpointError: a stranger's; nothing is removed.
        OSError: something that cannot be removed, as a folder that a stranger's file comes into meanwhile.
    """
    refuse_strangers(path)
    if not path.exists():
        return
    for name in sorted(os.listdir(path), key=lambda name: name == ABOUT):
        if _NAMES.fullmatch(name):
            (path / name).unlink(missing_ok=True)
    path.rmdir()
