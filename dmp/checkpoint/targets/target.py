"""What a checkpoint's target is: a kind of file or folder, to which the tensors of any source are written."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dmp.checkpoint.sources.source import Source


class Target(Protocol):
    """A kind of checkpoint, to be written in one process."""

    weights_only: bool
    """It has no place for optimizer state, learning rates and `extra`: they are left out."""

    def check(self, path: Path) -> None:
        """Before anything is read.

        Raises:
            CheckpointError: it cannot be written to this path, as something lies there.
        """
        ...

    def write(self, source: Source, path: Path) -> None:
        """Write what the source has, without holding it whole: it may be larger than memory.

        Raises:
            CheckpointError: something that has no place in this kind, or a source that cannot be read.
            OSError: what cannot be written.
        """
        ...
