"""A `torch.save` file as a checkpoint's source."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.pieces import crc_of, data_start
from dmp.sources import MODEL, STATE
from dmp.stored import Stored


class TorchFile:
    """A `torch.save` file of whole tensors, mapped: only what is copied is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            self._storages = _read_storages(path)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read as a torch.save file of tensors: {error}") from error
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a dict of parameter name -> tensor")
        nested = isinstance(data.get("model"), Mapping)
        weights = data["model"] if nested else data
        optimizer = data.get("optimizer") if nested else None
        state: Mapping[str, Mapping[str, Any]] = (optimizer or {}).get("state", {})
        self._tensors: dict[str, torch.Tensor] = {
            MODEL + name: value for name, value in weights.items() if isinstance(value, torch.Tensor)
        }
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {
            "extra": data.get("extra") if nested else None,
            "model": {name: value for name, value in weights.items() if not isinstance(value, torch.Tensor)},
            "state": {n: {k: v for k, v in s.items() if not isinstance(v, torch.Tensor)} for n, s in state.items()},
            "param_groups": (optimizer or {}).get("param_groups", []),
        }
        for name, values in state.items():
            if not isinstance(name, str):
                raise CheckpointError(
                    f"{path}: optimizer state goes by number ({name!r}), as torch.optim saves it; expected parameter "
                    "names, as full_optimizer_state_dict(model, optimizer) gives them"
                )
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[f"{STATE}{name}.{key}"] = value
        self.shapes = {key: (tuple(t.shape), t.dtype) for key, t in self._tensors.items()}
        self._names = _names(self._tensors, self._storages)

    def check(self, keys: Collection[str], part: tuple[int, int]) -> None:
        """The file's storages, whichever tensors they belong to: torch writes a CRC-32 of each."""
        for stored in self._storages[part[0] :: part[1]]:
            stored.check(self._names.get(stored.at, "something"))

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(self._tensors[key])


def _read_storages(path: Path) -> list[Stored]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = [e for e in archive.infolist() if "/data/" in e.filename and e.file_size]
        return [
            Stored(path, data_start(file, e), torch.uint8, (e.file_size,), (0,), crc_of(e))
            for e in sorted(entries, key=lambda e: e.header_offset)
        ]


def _names(tensors: Mapping[str, torch.Tensor], storages: Iterable[Stored]) -> dict[int, str]:
    """Where a storage begins in the file -> the first tensor that lies in it; the file is mapped in one piece."""
    pointers: dict[int, str] = {}
    for key, tensor in tensors.items():
        if tensor.untyped_storage().nbytes():
            pointers.setdefault(tensor.untyped_storage().data_ptr(), key.removeprefix(MODEL))
    starts = {stored.at for stored in storages}
    first = min(pointers, default=0)
    bases = (first - start for start in starts)
    base = next((base for base in bases if starts.issuperset(p - base for p in pointers)), None)
    return {} if base is None else {pointer - base: name for pointer, name in pointers.items()}
