"""Which kind of source lies at a path."""

from __future__ import annotations

from pathlib import Path

from dmp.errors import CheckpointError
from dmp.folder import Folder
from dmp.safetensors_source import INDEX, ONE_FILE, SafetensorsSource
from dmp.sources import Source
from dmp.torch_file import TorchFile
from dmp.torch_folder import TorchFolder


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
        return Folder(path)
    if path.is_file():
        return SafetensorsSource(path) if path.suffix == ".safetensors" else TorchFile(path)
    half = path.with_name(f".{path.name}.saving")
    raise CheckpointError(f"there is nothing at {path}" + (f"; {half} is a save that was cut short" * half.exists()))
