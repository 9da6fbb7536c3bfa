"""A `torch.save` file as a checkpoint's source."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dmp.checkpoint.sources.archive import check_file, data_start
from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.named_files import open_file
from dmp.checkpoint.sources.objects import checked_objects
from dmp.checkpoint.sources.source import MODEL, STATE
from dmp.checkpoint.sources.stored_piece import StoredPiece
from dmp.chunked import ChunkedTensor, is_chunked
from dmp.errors import CheckpointError
from dmp.places import is_dtensor
from dmp.read_values import shown

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
_OF_ONE_RANK = (
    "holds a {}: what one rank had of a sharded model, as torch.save writes it there. In the program that wrote it, "
    "save by torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder), and load the folder"
)
_OF_OUR_RANK = (
    "holds what one rank had of a wrapped model, as torch.save writes it there: with the plan that it had, "
    "model.load_state_dict(torch.load(path)) takes it, on each rank its own. save_checkpoint(path, model, optimizer) "
    "keeps everything, for any mesh and plan"
)
_NAMELESS = (
    "its optimizer state goes by number, as torch.optim saves it, and does not say which parameter is which; expected "
    "names, as full_optimizer_state_dict(model, optimizer) gives them, or an optimizer made from named_parameters()"
)


class TorchFile:
    """A `torch.save` file of whole tensors, mapped: only what is copied is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._storages = _read_storages(path)
        try:
            data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} {_why_not(error)}") from error
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a dict of parameter name -> tensor")
        own = next((key for key in _MODEL_KEYS if isinstance(data.get(key), Mapping)), None)
        weights = data if own is None else data[own]
        unnamed = next((key for key in weights if not isinstance(key, str)), None)
        if unnamed is not None:
            raise CheckpointError(f"{path} has the key {shown(unnamed)}; expected parameter names")
        found = [data[key] for key in _OPTIMIZER_KEYS if own is not None and isinstance(data.get(key), Mapping)]
        state, groups = _by_name(path, found[0]) if found else ({}, [])
        values = {MODEL + name: value for name, value in weights.items()}
        values |= {f"{STATE}{name}.{key}": value for name, of_one in state.items() for key, value in of_one.items()}
        self._tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        if any(map(is_chunked, self._tensors.values())):
            raise CheckpointError(f"{path} {_OF_OUR_RANK}")
        if any(map(is_dtensor, self._tensors.values())):
            raise CheckpointError(f"{path} {_OF_ONE_RANK.format('DTensor')}")
        self.about: dict[str, Any] = {}
        objects = {
            "extra": None if own is None else data.get("extra"),
            "model": {name: value for name, value in weights.items() if not isinstance(value, torch.Tensor)},
            "state": {n: {k: v for k, v in s.items() if not isinstance(v, torch.Tensor)} for n, s in state.items()},
            "param_groups": groups,
        }
        self.objects: dict[str, Any] = checked_objects(path, objects)
        if found and found[0].get("state") and not state:
            self.about["no_state"] = _NAMELESS
            logging.getLogger("dmp").warning("%s: %s", path, _NAMELESS)
        self.shapes = {key: (tuple(t.shape), t.dtype) for key, t in self._tensors.items()}
        self._names = self._check_tensors()

    def _check_tensors(self) -> dict[int, str]:
        """`_names`, if each tensor is plain and lies in a storage of the file."""
        for key, tensor in self._tensors.items():
            if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
                raise CheckpointError(
                    f"{self.path}: {key.removeprefix(MODEL)!r} is a tensor of layout {tensor.layout} and dtype "
                    f"{tensor.dtype} on {tensor.device}; expected a plain one"
                )
        names = _names(self._tensors, self._storages)
        if names is None:
            raise CheckpointError(f"{self.path} is damaged: a tensor's storage is none of those in the file")
        return names

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        """The file's storages, whichever tensors they belong to: torch writes a CRC-32 of each, however large."""
        total, at = sum(stored.size[0] for stored in self._storages), 0
        first, last = (total * i // share[1] for i in (share[0], share[0] + 1))
        found = []
        for stored in self._storages:
            start, stop = max(0, first - at), min(last - at, stored.size[0])
            if start < stop and stored.crc is not None:
                name = self._names.get(stored.at, "something")
                found.append(CheckedRange(stored, name, start, stop - start, stored.crc_of(start, stop - start)))
            at += stored.size[0]
        return found

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(self._tensors[key])


def _by_name(path: Path, optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State and param groups by parameter name; nothing where the optimizer was not told the names."""
    names: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    given, state = optimizer.get("param_groups", ()), optimizer.get("state", {})
    if not isinstance(given, (list, tuple)) or not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: the optimizer's param_groups are no list, or its state is no dict")
    for group in given:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, (list, tuple)) or not all(isinstance(p, (str, int)) for p in params):
            raise CheckpointError(f"{path}: a param group is {shown(group)}; expected a dict with a list of params")
        known = params if all(isinstance(p, str) for p in params) else group.get("param_names")
        if known is None:
            return {}, []
        if not isinstance(known, (list, tuple)) or len(known) != len(params):
            raise CheckpointError(f"{path}: a param group has the param_names {shown(known)} of {len(params)} params")
        names.update(zip(params, known, strict=True))
        groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": list(known)})
    named = {names[p]: values for p, values in state.items() if p in names}
    if not all(isinstance(values, Mapping) for values in named.values()):
        raise CheckpointError(f"{path}: the optimizer's state of a parameter is no dict")
    return named, groups


def _why_not(error: Exception) -> str:
    """What torch says of a file that it does not read, without its advice to have unknown code run."""
    found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if found is None:
        return f"cannot be read as a torch.save file of tensors: {error}"
    if found[1].endswith(".ShardedTensor"):
        return _OF_ONE_RANK.format("ShardedTensor")
    return f"holds an object of {found[1]}, which is not looked up or run; expected tensors, numbers and text in dicts"


def _read_storages(path: Path) -> list[StoredPiece]:
    """The storages in the file; also, whether torch may be given the file at all."""
    try:
        with open_file(path) as file:
            entries = check_file(file)
            return [  # the CRC-32 is 0 where torch was told to leave it out
                StoredPiece(path, data_start(file, e), torch.uint8, (e.file_size,), (0,), e.CRC or None)
                for e in entries
                if "/data/" in e.filename and e.file_size
            ]
    except Exception as error:  # zipfile has many kinds for what is no archive
        raise CheckpointError(f"{path} cannot be read as a torch.save file of tensors: {error}") from error


def _names(tensors: Mapping[str, torch.Tensor], storages: Iterable[StoredPiece]) -> dict[int, str] | None:
    """Where a storage begins in the file -> the first tensor that lies in it; None where one lies in no storage.

    The file is mapped in one piece.
    """
    held: dict[int, tuple[str, int]] = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            name, most = held.get(storage.data_ptr(), (key.removeprefix(MODEL), 0))
            held[storage.data_ptr()] = name, max(most, storage.nbytes())
    sizes = {stored.at: stored.size[0] for stored in storages}
    first = min(held, default=0)
    for start in sizes:
        base = first - start
        if all(sizes.get(pointer - base, -1) >= num_bytes for pointer, (_, num_bytes) in held.items()):
            return {pointer - base: name for pointer, (name, _) in held.items()}
    return None if held else {}
