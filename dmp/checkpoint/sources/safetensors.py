"""A safetensors file, or a Hugging Face folder of them, as a checkpoint's source."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.named_files import open_file, path_within, read_json
from dmp.checkpoint.sources.safetensors_header import read_header
from dmp.checkpoint.sources.source import MODEL
from dmp.checkpoint.sources.stored_piece import StoredPiece, fill
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.read_values import shown

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """Weights alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        index = path / INDEX
        if path.is_dir() and not (path / ONE_FILE).exists():
            self._stored = _read_index(index)
        else:
            self._stored = _read_file(path / ONE_FILE if path.is_dir() else path)
        self.shapes = {MODEL + name: (s.size, s.dtype) for name, s in self._stored.items()}

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        """Nothing: the format has no checksums."""
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            fill(target, [self._stored[key.removeprefix(MODEL)]])


def _read_index(index: Path) -> dict[str, StoredPiece]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(
            f"{index} cannot be read as an index of safetensors files: its weight_map is {shown(places)}; expected an "
            "object of parameter name -> file"
        )
    files: dict[str, dict[str, StoredPiece]] = {}
    found = {}
    for name, file in places.items():
        # links lead out of a folder of Hugging Face's cache, to where files lie under their hash
        path = path_within(index.parent, file, str(index), links=True)
        if file not in files:
            if not path.exists():
                raise CheckpointError(f"{path} is missing; {index.name} says that it holds {name!r}")
            files[file] = _read_file(path)
        if name not in files[file]:
            raise CheckpointError(f"{path} does not hold {name!r}, as {index.name} says")
        found[name] = files[file][name]
    return found


def _read_file(path: Path) -> dict[str, StoredPiece]:
    try:
        with open_file(path) as file:
            return read_header(file, path.stat().st_size, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
