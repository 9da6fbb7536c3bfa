"""A folder that `save_checkpoint` wrote, as a checkpoint's source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.metadata import check_files, read_metadata, read_with_torch, shapes_of
from dmp.sources import FORMAT_VERSION


class Folder:
    """A folder that `save_checkpoint` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = self._json("dmp.json")
        version = self.about.get("version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path / 'dmp.json'}: format version {version!r}; this version of dmp reads up to {FORMAT_VERSION}"
            )
        if not (path / ".metadata").exists():
            raise CheckpointError(f"{path} has no .metadata: it is a save that was cut short")
        try:
            self.objects: dict[str, Any] = torch.load(path / "objects.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds
            raise CheckpointError(f"{path / 'objects.pt'} cannot be read: {error}") from error
        self._metadata = read_metadata(path / ".metadata")
        self.shapes = shapes_of(self._metadata)
        check_files(path, self._metadata)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint of this library: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
        return data if isinstance(data, dict) else {}

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        read_with_torch(self.path, self._metadata, targets)
