"""A folder that `save_checkpoint` wrote, as a checkpoint's source."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from dmp.checkpoint.sources.archive import check_file
from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.dcp_metadata import read_metadata
from dmp.checkpoint.sources.dcp_pieces import FolderPieces
from dmp.checkpoint.sources.named_files import open_file, path_within, read_json
from dmp.checkpoint.sources.objects import check_about, checked_objects
from dmp.checkpoint.sources.source import ABOUT, CHECKSUMS, FORMAT_VERSION, TENSORS
from dmp.checkpoint.sources.stored_piece import StoredPiece, fill
from dmp.checkpoint.sources.tensors_json import from_json
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.read_values import is_size, shown


class Folder:
    """A folder that `save_checkpoint` wrote; of formats before the third, `.metadata` says where its tensors lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / ABOUT).exists():
            raise CheckpointError(f"{path} is not a checkpoint of this library: it has no dmp.json")
        self.about = read_json(path / ABOUT)
        version = self.about.get("version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"{path / 'dmp.json'}: format version {shown(version)}; this version of dmp reads 1 to {FORMAT_VERSION}"
            )
        needed = ((".metadata", 1), (CHECKSUMS, 2), (TENSORS, 3))
        lacks = next((name for name, since in needed if version >= since and not (path / name).exists()), None)
        if lacks is not None:
            raise CheckpointError(f"{path} has no {lacks}: it is a save that was cut short")
        if version > 1:
            self._check_small_files()
        self.objects = checked_objects(path / "objects.pt", _unpacked(path / "objects.pt"))
        check_about(path / ABOUT, self.about)
        by = TENSORS if version > 2 else ".metadata"
        entries = from_json(read_json(path / by), path / by) if version > 2 else read_metadata(path / by)
        self._pieces = FolderPieces(path, entries, by, only_archives=True)
        self.shapes = self._pieces.shapes

    def _check_small_files(self) -> None:
        listed = self.path / CHECKSUMS
        crcs = read_json(listed)
        if self.about["version"] > 2 and TENSORS not in crcs:
            raise CheckpointError(f"{listed} has no CRC-32 of {TENSORS}; expected one")
        for name, crc in crcs.items():
            if not is_size(crc):
                raise CheckpointError(f"{listed}: the CRC-32 of {shown(name)} is {shown(crc)}; expected a number")
            file = path_within(self.path, name, str(listed))
            try:
                num_bytes = file.stat().st_size
                found = StoredPiece(file, 0, torch.uint8, (num_bytes,), (0,)).crc_of(0, num_bytes)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            if found != crc:
                raise CheckpointError(
                    f"{file} is damaged: it has CRC-32 {found:08x}, expected {crc:08x} by {CHECKSUMS}"
                )

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        self._pieces.check(keys, share)
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            fill(target, self._pieces.of(key))


def _unpacked(path: Path) -> Any:
    try:
        with open_file(path) as file:
            check_file(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{path} cannot be read: {error}") from error
