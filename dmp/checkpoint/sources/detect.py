"""Which kind of source lies at a path."""

from __future__ import annotations

from pathlib import Path

from dmp.checkpoint.sources.dcp import TorchFolder
from dmp.checkpoint.sources.native import Folder
from dmp.checkpoint.sources.safetensors import INDEX, ONE_FILE, SafetensorsSource
from dmp.checkpoint.sources.source import Source
from dmp.checkpoint.sources.torch_save import TorchFile
from dmp.errors import CheckpointError

_SIGNS = ("dmp.json", ".metadata", ONE_FILE, INDEX)
_SHOWN = 3


def open_source(path: Path) -> Source:
    """The source at a path, by what lies there.

    Raises:
        CheckpointError: there is nothing, or nothing whole.
    """
    if not path.exists() and path.with_name(f".{path.name}.replaced").exists():
        path = path.with_name(f".{path.name}.replaced")
    if path.is_dir():
        ours = (path / "dmp.json").exists() or (path / "objects.pt").exists()
        if not ours and (path / ".metadata").exists():
            return TorchFolder(path)
        if not ours and ((path / ONE_FILE).exists() or (path / INDEX).exists()):
            return SafetensorsSource(path)
        if not ours:
            raise CheckpointError(f"{path} is no checkpoint: {_what_is_in(path)}")
        return Folder(path)
    if path.is_file():
        return SafetensorsSource(path) if path.suffix == ".safetensors" else TorchFile(path)
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is neither a folder nor a file; expected a checkpoint")
    half = path.with_name(f".{path.name}.saving")
    raise CheckpointError(f"there is nothing at {path}" + (f"; {half} is a save that was cut short" * half.exists()))


def _what_is_in(folder: Path) -> str:
    """For who gave the folder of a run, where one of its checkpoints is wanted."""
    lacks = f"it has no {', '.join(_SIGNS[:-1])} or {_SIGNS[-1]}"
    signs = [sign for name in _SIGNS for sign in folder.glob(f"[!.]*/{name}")]
    inside = list(dict.fromkeys(sign.parent for sign in sorted(signs, key=lambda s: s.stat().st_mtime, reverse=True)))
    if not inside:
        return lacks
    names = ", ".join(repr(path.name) for path in inside[:_SHOWN])
    more = f" and {len(inside) - _SHOWN:,} more" if len(inside) > _SHOWN else ""
    return f"{lacks}; there are checkpoints in it, the newest first: {names}{more}; give one of these: {inside[0]}"
