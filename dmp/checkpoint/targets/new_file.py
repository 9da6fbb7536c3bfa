"""A file that is whole when it appears, where nothing lay."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmp.errors import CheckpointError


def refuse_existing(path: Path) -> None:
    """Raise where anything lies at a path, a broken link too.

    Raises:
        CheckpointError: it names the path.
    """
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is there already; remove it, or give another path")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file that is written beside its place, and put there when it is whole, where nothing lies by then.

    Yields:
        Where to write: an empty file of a name that nothing else has.

    Raises:
        CheckpointError: something lies at the path.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    beside.open("xb").close()
    try:
        yield beside
        refuse_existing(path)
        try:
            os.link(beside, path)  # unlike a rename it replaces nothing
        except FileExistsError:  # it came in this moment
            refuse_existing(path)
            raise
        except OSError:  # a file system without links
            os.rename(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_new(path: Path, data: bytes) -> None:
    """A small file, on the disk and not in its cache when this returns.

    Raises:
        FileExistsError: something lies at the path.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
