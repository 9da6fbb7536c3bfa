"""A folder that `save_checkpoint` wrote, as a checkpoint's source."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from dmp.checksums import Checked
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.metadata import check_files, read_metadata, shapes_of
from dmp.pieces import Pieces
from dmp.sources import CHECKSUMS, FORMAT_VERSION
from dmp.stored import fill


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
        if not (path / ".metadata").exists() or (version > 1 and not (path / CHECKSUMS).exists()):
            lacks = ".metadata" if not (path / ".metadata").exists() else CHECKSUMS
            raise CheckpointError(f"{path} has no {lacks}: it is a save that was cut short")
        if version > 1:
            self._check_small_files()
        try:
            self.objects: dict[str, Any] = torch.load(path / "objects.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds
            raise CheckpointError(f"{path / 'objects.pt'} cannot be read: {error}") from error
        self._metadata = read_metadata(path / ".metadata")
        self.shapes = shapes_of(self._metadata)
        check_files(path, self._metadata)
        self._pieces = Pieces(path, self._metadata, is_plain=True)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint of this library: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
        return data if isinstance(data, dict) else {}

    def _check_small_files(self) -> None:
        for name, crc in self._json(CHECKSUMS).items():
            try:
                found = zlib.crc32((self.path / name).read_bytes())
            except OSError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
            if found != crc:
                raise CheckpointError(
                    f"{self.path / name} is damaged: it has CRC-32 {found:08x}, expected {crc:08x} by {CHECKSUMS}"
                )

    def check(self, keys: Collection[str], part: tuple[int, int]) -> list[Checked]:
        self._pieces.check(keys, part)
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            fill(target, self._pieces.of(key) or ())
