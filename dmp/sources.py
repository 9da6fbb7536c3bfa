"""What lies at a checkpoint's path: each kind gives tensors by the keys of [Note: on disk] of `dmp.checkpoint`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError

FORMAT_VERSION = 1
MODEL, STATE = "model.", "optimizer.state."


class Source(Protocol):
    """Something that holds tensors by the keys of [Note: on disk]."""

    path: Path
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    objects: dict[str, Any]
    about: dict[str, Any]

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        """Fill the pieces that this rank holds."""
        ...


def open_source(path: Path) -> Source:
    if not path.exists() and path.with_name(f".{path.name}.replaced").exists():
        path = path.with_name(f".{path.name}.replaced")
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        return File(path)
    half = path.with_name(f".{path.name}.saving")
    raise CheckpointError(f"there is nothing at {path}" + (f"; {half} is a save that was cut short" * half.exists()))


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
        self._metadata = _read_metadata(path / ".metadata")
        self.shapes = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        self._check_files()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint of this library: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
        return data if isinstance(data, dict) else {}

    def _check_files(self) -> None:
        """Every piece lies within its file."""
        ends: dict[str, tuple[int, str]] = {}
        for index, info in (self._metadata.storage_data or {}).items():
            ends[info.relative_path] = max(
                ends.get(info.relative_path, (0, "")), (info.offset + info.length, index.fqn)
            )
        for name, (end, key) in ends.items():
            file = self.path / name
            size = file.stat().st_size if file.exists() else -1
            if size < end:
                problem = "is missing" if size < 0 else f"has {size} bytes, {end} are needed: it is cut short"
                raise CheckpointError(f"{file} {problem}; it holds {key.removeprefix(MODEL)!r} among others")

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(self.path)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's `.metadata`, which is a pickle, and builds nothing else than it needs."""

    def find_class(self, module: str, name: str) -> Any:
        ours = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        path = module in ("pathlib", "pathlib._local") and name.endswith("Path")
        plain = f"{module}.{name}" in ("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (ours or path or plain or dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class File:
    """A `torch.save` file of whole tensors, mapped: only what is copied is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
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

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(self._tensors[key])
