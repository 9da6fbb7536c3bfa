"""What a checkpoint's target is: a kind of file or folder, to which the tensors of any source are written.

Ours are in one table; those of other packages are found by entry point (`dmp.targets`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dmp.checkpoint.sources.source import Source
from dmp.checkpoint.targets.native import FolderTarget
from dmp.checkpoint.targets.safetensors import SafetensorsTarget
from dmp.checkpoint.targets.torch_save import TorchFileTarget
from dmp.registry import plugins


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


_OURS: dict[str, Target] = {"dmp": FolderTarget(), "safetensors": SafetensorsTarget(), "torch": TorchFileTarget()}


def target_names() -> list[str]:
    """Ours first; nothing of another package is loaded."""
    return list({**_OURS, **plugins("dmp.targets")})


def target_named(name: str) -> Target:
    """The target of a name of `target_names`; ours where another package has the same.

    An entry point is a `Target`, or a class that is called without arguments for one.
    """
    if name in _OURS:
        return _OURS[name]
    found = plugins("dmp.targets")[name].load()
    target: Target = found() if isinstance(found, type) else found
    return target
