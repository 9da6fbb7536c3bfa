"""Files that a checkpoint names: regular ones, inside its folder.

What comes from elsewhere may name a file outside (`../`, an absolute path, a link), a pipe that never answers, or a
file of a terabyte of nothing: each is an error here, before anything is opened or kept.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Any

from dmp.errors import CheckpointError
from dmp.read_values import parse_json, shown

_MOST_BYTES = 256 << 20  # of JSON or a pickle; a million pieces take half of it
_LONGEST = 250  # of a name
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def path_within(root: Path, name: Any, by: str, *, links: bool = False) -> Path:
    """The path of a file that a checkpoint names, in its folder or deeper.

    Args:
        root: the folder.
        name: what came, whatever it is.
        by: which file says so.
        links: a link may lead out of the folder, as those of Hugging Face's cache do.

    Raises:
        CheckpointError: not a name, or one that leads out of the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _LONGEST or not name.isprintable():
        raise CheckpointError(f"{by} names the file {shown(name)}; expected the name of a file in {root}")
    path = root / name
    parts = name.replace("\\", "/").split("/")
    out = parts[0] == "" or ".." in parts or ":" in parts[0] or Path(name).is_absolute()
    if not out and not links and (path.is_symlink() or len(parts) > 1):
        out = not path.resolve().is_relative_to(root.resolve())
    if out:
        raise CheckpointError(
            f"{by} names the file {shown(name)}, which leads out of {root}; a checkpoint's files lie in it"
        )
    return path


def open_file(path: Path, buffering: int = -1) -> IO[bytes]:
    """A regular file for reading; a pipe or a device does not keep anybody waiting.

    Raises:
        CheckpointError: something else lies there.
        OSError: nothing, or what cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path, mode: int) -> None:
    """Raise `CheckpointError` unless it is a regular file's mode."""
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}; expected a file")


def read_file(path: Path) -> bytes:
    """All of a small file.

    Raises:
        CheckpointError: it is missing, no regular file, too large or cannot be read.
    """
    try:
        with open_file(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; expected {_MOST_BYTES} at most")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: as `read_file`, or it holds something else.
    """
    try:
        data = parse_json(read_file(path))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {shown(data)}; expected a JSON object")
    return data
