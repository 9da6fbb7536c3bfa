"""Machine code that is kept on disk: made once on a machine, by one process, while others wait for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger("dmp")


class Compiled(NamedTuple):
    """Machine code.

    Args:
        symbol: of the function in it.
        takes_elements: whether its first argument is `Elements`.
        num_arguments: beside these: integers of 64 bits.
        code: an object file.
    """

    symbol: str
    takes_elements: bool
    num_arguments: int
    code: bytes


def kept(name: str, of_sources: str, make: Callable[[], Compiled]) -> Compiled:
    """What is kept under a name; else it is made, and kept where a folder allows.

    Args:
        name: with `of_sources` it says all that the code depends on.
        of_sources: of which sources it is made.
    """
    folder = _folder()
    if folder is None:
        return make()
    path = folder / f"{name}-{of_sources}"
    found = _read(path)
    if found is not None:
        return found
    with _turn(path):
        found = _read(path)
        if found is None:
            found = make()
            _write(path, found)
            if folder == _beside_sources():
                _clear(folder, name, path.name)
    return found


def _clear(folder: Path, name: str, newest: str) -> None:
    """Remove what older sources left under a name, where there is one version of them.

    A process that still runs with those makes its own again; nobody reads a file in part, as names go, not files.
    """
    for path in folder.glob(f"{name}-*"):
        if not path.name.startswith(newest):
            with suppress(OSError):
                path.unlink()


def _read(path: Path) -> Compiled | None:
    """None where it is not there, or is not what was written."""
    try:
        digest, told, code = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    if digest.decode(errors="replace") != hashlib.sha256(told + code).hexdigest():
        return None
    symbol, takes_elements, num_arguments = json.loads(told)
    return Compiled(symbol, takes_elements, num_arguments, code)


def _write(path: Path, made: Compiled) -> None:
    """At once or not at all: a reader sees a whole file."""
    told = json.dumps(made[:-1]).encode()
    digest = hashlib.sha256(told + made.code).hexdigest().encode()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(b"\n".join([digest, told, made.code]))
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("a lookup kernel is compiled in every process: it cannot be kept in %s: %s", path.parent, error)


@cache
def _folder() -> Path | None:
    """The first that can be written: numba's own, if the user names it, the sources' or the user's."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    _log.warning("lookup kernels are compiled in every process: there is no folder to keep them in")
    return None


def _folders() -> Iterator[Path]:
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named)
    yield _beside_sources()
    user = os.environ.get("XDG_CACHE_HOME")
    try:
        yield (Path(user) if user else Path.home() / ".cache") / "dmp"
    except RuntimeError:  # a user without a home
        return


def _beside_sources() -> Path:
    return Path(__file__).parent / "__pycache__"


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.with_name(path.name + ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or the process ends
        yield
