"""Files that a checkpoint names: regular ones, inside its folder; and the JSON in them.

What comes from elsewhere may name a file outside (`../`, an absolute path, a link), a pipe that never answers, a file
of a terabyte of nothing, or JSON nested without end: each is an error here, before anything is opened or kept.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from reprlib import Repr
from typing import IO, Any

from dmp.errors import CheckpointError

_MOST_BYTES = 256 << 20  # of JSON or a pickle; a million pieces take half of it
_LONGEST = 250  # of a name
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """A value from a file as an error may show it: neither long nor deep."""
    try:
        return _repr.repr(value)
    except Exception:  # such as an integer of too many digits
        return f"a {type(value).__name__}"


def inside(root: Path, name: Any, by: str, *, links: bool = False) -> Path:
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


def parse_json(text: str | bytes, parse_int: Callable[[str], Any] | None = None) -> Any:
    """As the standard says: no NaN, no key twice, and not nested without end.

    Args:
        parse_int: as of `json.loads`.

    Raises:
        ValueError: saying what is wrong.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return json.loads(text, object_pairs_hook=_unique, parse_int=parse_int, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {shown(twice)} is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


def is_size(value: Any) -> bool:
    """Whether it is an integer that a size, an offset or a place in a file can be."""
    return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: Any) -> bool:
    """Whether it is a list of such integers whose elements can be counted."""
    if not isinstance(value, (list, tuple)) or not all(map(is_size, value)):
        return False
    count = 1
    for n in value:
        count *= n or 1
        if count >= 1 << 62:
            return False
    return True
