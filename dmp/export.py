"""Weights to safetensors files in Hugging Face's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dmp.errors import CheckpointError
from dmp.gather import env_of, gather
from dmp.restore import aliases
from dmp.safetensors_source import INDEX, ONE_FILE
from dmp.together import together

MAX_SHARD_BYTES = 5 * 10**9


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the unsharded weights as `model.safetensors`, or as several files and an index: what Transformers reads.

    Collective over `model.env`. Rank 0 gathers and writes one file at a time, so it holds at most `max_shard_bytes`, or
    the largest tensor; the other ranks a few MB. A tied weight is stored once, under its first name.

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

    def sizes() -> dict[str, int]:
        other = sorted(name for name, value in state.items() if not isinstance(value, torch.Tensor))
        if other:
            raise CheckpointError(f"{other[0]!r} is no tensor; a safetensors file holds tensors alone")
        return {name: value.numel() * value.dtype.itemsize for name, value in state.items()}

    own = together(sizes, group, f"exporting to {target}")
    everyone = [own]
    if group is not None:
        everyone = [{}] * env.size
        dist.all_gather_object(everyone, own, group=group)
    union = {name: size for known in everyone for name, size in known.items()}
    once = {name: size for name, size in union.items() if name == next(n for n in union if n in same.get(name, [name]))}

    def whole(names: list[str]) -> dict[str, torch.Tensor]:
        return gather({name: state[name] for name in names if name in state}, env, rank0_only=True)

    write_safetensors(target, once, whole, max_shard_bytes, env.rank, group)


def write_safetensors(
    target: Path,
    sizes: Mapping[str, int],
    whole: Callable[[list[str]], dict[str, torch.Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write tensors file by file.

    Args:
        target: the folder.
        sizes: name -> bytes, the same on every rank.
        whole: names -> their tensors, contiguous, on rank 0; collective over `group`.
        max_shard_bytes: of one file.
        rank: who writes is 0.
        group: of all ranks; None for one process.

    Raises:
        CheckpointError: see `export_safetensors`.
    """
    what = f"exporting to {target}"
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
        tensors = whole(names)

        def write(file: str = file, tensors: dict[str, torch.Tensor] = tensors) -> None:
            if rank == 0:
                from safetensors.torch import save_file

                partial = target / f".{file}.saving"
                save_file(tensors, partial, metadata={"format": "pt"})
                partial.rename(target / file)

        together(write, group, what)

    def finish() -> None:
        if rank == 0 and len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            (target / INDEX).write_text(json.dumps(index, indent=2))

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
