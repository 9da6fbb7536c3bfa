"""The `.metadata` file of torch's distributed checkpoint: which tensors a folder holds, and where."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.sources import MODEL


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


def read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def shapes_of(metadata: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Key -> (size, dtype) of every tensor."""
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }


def check_files(path: Path, metadata: Any) -> None:
    """Every piece lies within its file.

    Raises:
        CheckpointError: a file that is missing or cut short.
    """
    ends: dict[str, tuple[int, str]] = {}
    for index, info in (metadata.storage_data or {}).items():
        ends[info.relative_path] = max(ends.get(info.relative_path, (0, "")), (info.offset + info.length, index.fqn))
    for name, (end, key) in ends.items():
        file = path / name
        size = file.stat().st_size if file.exists() else -1
        if size < end:
            problem = "is missing" if size < 0 else f"has {size} bytes, {end} are needed: it is cut short"
            raise CheckpointError(f"{file} {problem}; it holds {key.removeprefix(MODEL)!r} among others")


def read_with_torch(path: Path, metadata: Any, targets: dict[str, ChunkedTensor]) -> None:
    """Fill the targets by torch's own reader, which takes each stored chunk whole."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
