"""A `torch.save` file as a checkpoint's source."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dmp.checksums import Checked
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.pieces import crc_of, data_start
from dmp.sources import MODEL, STATE
from dmp.stored import Stored

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
_NAMELESS = (
    "its optimizer state goes by number, as torch.optim saves it, and does not say which parameter is which; expected "
    "names, as full_optimizer_state_dict(model, optimizer) gives them, or an optimizer made from named_parameters()"
)


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
        own = next((key for key in _MODEL_KEYS if isinstance(data.get(key), Mapping)), None)
        weights = data if own is None else data[own]
        found = [data[key] for key in _OPTIMIZER_KEYS if own is not None and isinstance(data.get(key), Mapping)]
        state, groups = _by_name(found[0]) if found else ({}, [])
        self._tensors: dict[str, torch.Tensor] = {
            MODEL + name: value for name, value in weights.items() if isinstance(value, torch.Tensor)
        }
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {
            "extra": None if own is None else data.get("extra"),
            "model": {name: value for name, value in weights.items() if not isinstance(value, torch.Tensor)},
            "state": {n: {k: v for k, v in s.items() if not isinstance(v, torch.Tensor)} for n, s in state.items()},
            "param_groups": groups,
        }
        if found and found[0].get("state") and not state:
            self.about["no_state"] = _NAMELESS
            logging.getLogger("dmp").warning("%s: %s", path, _NAMELESS)
        for name, values in state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[f"{STATE}{name}.{key}"] = value
        self.shapes = {key: (tuple(t.shape), t.dtype) for key, t in self._tensors.items()}
        self._names = _names(self._tensors, self._storages)

    def check(self, keys: Collection[str], part: tuple[int, int]) -> list[Checked]:
        """The file's storages, whichever tensors they belong to: torch writes a CRC-32 of each, however large."""
        total, at = sum(stored.size[0] for stored in self._storages), 0
        first, last = (total * i // part[1] for i in (part[0], part[0] + 1))
        found = []
        for stored in self._storages:
            start, stop = max(0, first - at), min(last - at, stored.size[0])
            if start < stop and stored.crc is not None:
                name = self._names.get(stored.at, "something")
                found.append(Checked(stored, name, start, stop - start, stored.crc_of(start, stop - start)))
            at += stored.size[0]
        return found

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(self._tensors[key])


def _by_name(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State and param groups by parameter name; nothing where the optimizer was not told the names."""
    names: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.get("param_groups", ()):
        known = group["params"] if all(isinstance(p, str) for p in group["params"]) else group.get("param_names")
        if known is None:
            return {}, []
        names.update(zip(group["params"], known, strict=True))
        groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": list(known)})
    return {names[p]: values for p, values in optimizer.get("state", {}).items() if p in names}, groups


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
