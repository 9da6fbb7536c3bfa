"""Weights to safetensors files in Hugging Face's layout."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dmp.checkpoint.own_files import new_file
from dmp.checkpoint.restore import aliases
from dmp.checkpoint.sources.safetensors import INDEX, ONE_FILE
from dmp.errors import CheckpointError
from dmp.ranks.collective import everyone, together
from dmp.state.find_wrapped import env_of
from dmp.state.gather import gather

MAX_SHARD_BYTES = 5 * 10**9
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the unsharded weights as `model.safetensors`, or as several files and an index: what Transformers reads.

    Collective over `model.env`. Every rank holds pieces of a few MB: rank 0 gathers a file's tensors into mapped files
    of the folder and writes from there, so the disk takes `max_shard_bytes` more for a while. A tied weight is stored
    once, under its first name.

    Args:
        path: a folder, made where it is missing; its other files, such as `config.json`, are left alone.
        model: a `DistributedModelParallel`, or any module.
        max_shard_bytes: of one file.

    Raises:
        CheckpointError: on every rank: the package `safetensors` is missing, the folder holds weights already, a value
            that is no tensor, or what stopped the writing.
    """
    target = Path(path).absolute()
    env = env_of(model)
    group = env.group() if env.size > 1 else None
    same = aliases(model)
    state = model.state_dict()

    def shapes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        other = sorted(name for name, value in state.items() if not isinstance(value, torch.Tensor))
        if other:
            raise CheckpointError(f"{other[0]!r} is no tensor; a safetensors file holds tensors alone")
        return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}

    everywhere = everyone(shapes, group, f"exporting to {target}")
    union = {name: shape for known in everywhere for name, shape in known.items()}
    once = {name: union[name] for name in union if name == next(n for n in union if n in same.get(name, [name]))}

    def fill(names: list[str], tensors: dict[str, torch.Tensor]) -> None:
        gather({name: state[name] for name in names if name in state}, env, rank0_only=True, out=tensors)

    write_safetensors(target, once, fill, max_shard_bytes, env.rank, group)


def mapped(shapes: Shapes, folder: Path) -> dict[str, torch.Tensor]:
    """Tensors on files of their own, for what is larger than memory; nobody else sees the files, and they go with them.

    Args:
        shapes: name -> size and dtype.
        folder: where there is room.

    Raises:
        OSError: the disk is full, which is asked before: a write into a mapping without room would end the process.
    """
    tensors = {}
    for name, (size, dtype) in shapes.items():
        num_bytes = prod(size) * dtype.itemsize
        if not num_bytes:
            tensors[name] = torch.empty(size, dtype=dtype)
            continue
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as file:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            data = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
        tensors[name] = data.view(dtype).view(size)
    return tensors


def write_safetensors(
    target: Path,
    shapes: Shapes,
    fill: Callable[[list[str], dict[str, torch.Tensor]], None],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write tensors file by file.

    Args:
        target: the folder.
        shapes: name -> size and dtype, the same on every rank.
        fill: gives the named tensors their values, which are rank 0's to hold; collective over `group`.
        max_shard_bytes: of one file.
        rank: who writes is 0.
        group: of all ranks; None for one process.

    Raises:
        CheckpointError: see `export_safetensors`.
    """
    what = f"exporting to {target}"
    sizes = {name: prod(size) * dtype.itemsize for name, (size, dtype) in shapes.items()}
    files = _files(sizes, max_shard_bytes)

    def begin() -> None:
        try:
            import safetensors.torch  # noqa: F401
        except ImportError as error:
            raise CheckpointError("the package safetensors is not installed: pip install safetensors") from error
        if rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            for name in (ONE_FILE, INDEX, *files):
                if (target / name).exists():
                    raise CheckpointError(f"{target / name} is there already; remove it, or give another folder")

    together(begin, group, what)
    for file, names in files.items():

        def room(names: list[str] = names) -> dict[str, torch.Tensor]:
            return mapped({name: shapes[name] for name in names}, target) if rank == 0 else {}

        tensors = together(room, group, what)
        fill(names, tensors)

        def write(file: str = file, tensors: dict[str, torch.Tensor] = tensors) -> None:
            if rank == 0:
                from safetensors.torch import save_file

                with new_file(target / file) as partial:
                    save_file(tensors, partial, metadata={"format": "pt"})

        together(write, group, what)

    def finish() -> None:
        if rank == 0 and len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            with new_file(target / INDEX) as partial:
                partial.write_text(json.dumps(index, indent=2))

    together(finish, group, what)


def _files(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """File -> names, in their order."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}
