"""Weights as safetensors files in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from dmp.checkpoint.sources.safetensors import INDEX, ONE_FILE
from dmp.checkpoint.sources.safetensors_header import DTYPES
from dmp.checkpoint.sources.source import MODEL, Source
from dmp.checkpoint.targets.mapped import mapped
from dmp.checkpoint.targets.new_file import new_file, refuse_existing
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.errors import CheckpointError
from dmp.ranks import fail_together


@dataclass(frozen=True)
class SafetensorsTarget:
    """One file, or several and an index, in a folder whose other files are left alone.

    Args:
        max_shard_bytes: of one file.
        rank: who receives and writes is 0.
        group: of all ranks, which call `write` together where the source needs them all; None for one process.
    """

    max_shard_bytes: int = 5 * 10**9
    rank: int = 0
    group: dist.ProcessGroup | None = None
    weights_only = True

    def check(self, path: Path) -> None:
        for file in (path / ONE_FILE, path / INDEX, *sorted(path.glob("model-*-of-*.safetensors"))):
            refuse_existing(file)

    def write(self, source: Source, path: Path) -> None:
        what = f"exporting to {path}"
        keys = [key for key in source.shapes if key.startswith(MODEL)]
        sizes = {key: prod(source.shapes[key][0]) * source.shapes[key][1].itemsize for key in keys}
        files = _files(sizes, self.max_shard_bytes)

        def begin() -> None:
            try:
                import safetensors.torch  # noqa: F401
            except ImportError as error:
                raise CheckpointError("the package safetensors is not installed: pip install safetensors") from error
            other = sorted(source.objects.get("model", ()))
            if other:
                raise CheckpointError(f"{other[0]!r} is no tensor; a safetensors file holds tensors alone")
            odd = next((key for key in keys if source.shapes[key][1] not in DTYPES.values()), None)
            if odd is not None:
                name, dtype = odd[len(MODEL) :], source.shapes[odd][1]
                raise CheckpointError(f"{name!r} has dtype {dtype}, which safetensors files have no name for")
            if self.rank == 0:
                self.check(path)
                path.mkdir(parents=True, exist_ok=True)

        fail_together(begin, self.group, what)
        for file, held in files.items():
            self._write_file(source, path / file, held, what)

        def finish() -> None:
            if self.rank == 0 and len(files) > 1:
                places = {key[len(MODEL) :]: file for file, held in files.items() for key in held}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
                with new_file(path / INDEX) as partial:
                    partial.write_text(json.dumps(index, indent=2))

        fail_together(finish, self.group, what)

    def _write_file(self, source: Source, file: Path, keys: list[str], what: str) -> None:
        """Its tensors are mapped before any rank sends: a disk that is full is found by all together."""
        shapes = {key: source.shapes[key] for key in keys}
        tensors = fail_together(lambda: mapped(shapes, file.parent) if self.rank == 0 else {}, self.group, what)
        source.read({key: _received(tensors.get(key), *shape) for key, shape in shapes.items() if prod(shape[0])})

        def write() -> None:
            if self.rank == 0:
                from safetensors.torch import save_file

                with new_file(file) as partial:
                    save_file({key[len(MODEL) :]: t for key, t in tensors.items()}, partial, metadata={"format": "pt"})

        fail_together(write, self.group, what)


def _received(tensor: torch.Tensor | None, size: tuple[int, ...], dtype: torch.dtype) -> ChunkedTensor:
    """All of a tensor on rank 0, nothing of it on the others."""
    return ChunkedTensor(size, [], [], dtype) if tensor is None else as_chunks(tensor)


def _files(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """File -> keys, in their order."""
    groups: list[list[str]] = [[]]
    held = 0
    for key, size in sizes.items():
        if groups[-1] and held + size > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += size
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": keys for i, keys in enumerate(groups, 1)}
