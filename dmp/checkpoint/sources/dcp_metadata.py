"""The `.metadata` file of torch's distributed checkpoint, which is a pickle; read as [Note: records] says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from dmp.checkpoint.sources.named_files import read_file
from dmp.checkpoint.sources.plain_pickle import Global, Record, read_pickle
from dmp.checkpoint.sources.tensors_json import DTYPES, Entry, Piece, make_entry, make_piece
from dmp.errors import CheckpointError
from dmp.read_values import shown

_MODULES = {
    # where torch has had them, from 1.13 on
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed._shard.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": tuple(DTYPES),
    # the path that was saved to
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
_ALLOWED = frozenset((module, name) for module, names in _MODULES.items() for name in names)


def read_metadata(path: Path) -> dict[str, Entry]:
    """The tensors that a `.metadata` file names; what is no tensor is left out.

    Raises:
        CheckpointError: it cannot be read, or is not what torch writes.
    """
    data = read_file(path)
    try:
        root = read_pickle(data, _ALLOWED)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    fields = _fields(root, "Metadata", str(path))
    tensors, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{path} holds no dicts state_dict_metadata and storage_data, as torch writes them")
    found: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in places.items():
        at = _fields(index, "MetadataIndex", f"{path}: a key of storage_data")
        key, offset = at.get("fqn"), at.get("offset") or ()
        if isinstance(key, str) and isinstance(offset, tuple) and all(type(o) is int for o in offset):
            found[key, offset] = place
    return {
        key: _entry(f"{path}: {shown(key)}", key, value, found)
        for key, value in tensors.items()
        if _kind(value) != "BytesStorageMetadata"
    }


def _entry(where: str, key: Any, value: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> Entry:
    if not isinstance(key, str):
        raise CheckpointError(f"{where} is a name; expected a text")
    fields = _fields(value, "TensorStorageMetadata", where)
    properties, chunks = fields.get("properties"), fields.get("chunks")
    if not isinstance(properties, Record) or _kind(properties) != "TensorProperties" or not isinstance(chunks, list):
        raise CheckpointError(f"{where} has no TensorProperties, or no list of chunks")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    dtype = dtype.name if isinstance(dtype, Global) and dtype.module == "torch" else dtype
    return make_entry(where, fields.get("size"), dtype, [_piece(where, key, chunk, places) for chunk in chunks])


def _piece(where: str, key: str, chunk: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> Piece:
    box = _fields(chunk, "ChunkStorageMetadata", where)
    offset, size = box.get("offsets"), box.get("sizes")
    place = places.get((key, offset)) if isinstance(offset, tuple) and all(type(o) is int for o in offset) else None
    if place is None:
        raise CheckpointError(f"{where}: it does not say where the piece at {shown(offset)} lies")
    info = _fields(place, "_StorageInfo", where)
    transforms = info.get("transform_descriptors") or ()
    if not isinstance(transforms, (list, tuple)) or not all(isinstance(t, str) for t in transforms):
        raise CheckpointError(f"{where} went through {shown(transforms)}; expected a list of names")
    file, at, num_bytes = (info.get(name) for name in ("relative_path", "offset", "length"))
    return make_piece(where, offset, size, file, at, num_bytes, tuple(transforms))


def _kind(value: Any) -> str | None:
    return value.of.name if isinstance(value, Record) and not value.args else None


def _fields(value: Any, kind: str, where: str) -> dict[str, Any]:
    """Those of a dataclass."""
    if _kind(value) != kind or not isinstance(value.state, dict):
        raise CheckpointError(f"{where} is {_kind(value) or shown(value)}; expected a {kind}, as torch writes it")
    return value.state
