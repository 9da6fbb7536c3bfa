"""From one kind of checkpoint to another in one process, without a model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from dmp.chunked import as_chunks
from dmp.errors import CheckpointError
from dmp.export import write_safetensors
from dmp.opening import open_source
from dmp.optimizer_state import merge_blocks
from dmp.plan import ShardingPlan
from dmp.renaming import renamed
from dmp.saving import Content, write
from dmp.sources import FORMAT_VERSION, MODEL, STATE, Source

KINDS = ("dmp", "safetensors", "torch")


def convert(source: Path, target: Path, kind: str, rename: Mapping[str, str] | None = None) -> str:
    """Read a checkpoint of any kind, write one of `kind`; returns what was done in a line.

    "safetensors" takes the weights alone, one file's worth of memory at a time; the others the whole checkpoint's.

    Raises:
        CheckpointError: a source that cannot be read, or a target that is there already.
    """
    target = target.absolute()
    read = renamed(open_source(source.absolute()), rename)
    weights = [key for key in read.shapes if key.startswith(MODEL)]
    state = [key for key in read.shapes if key.startswith(STATE)]
    if kind == "safetensors":
        _to_safetensors(read, target, weights)
        left = f"; {len(state)} tensors of optimizer state were left out" if state else ""
        return f"{len(weights)} weights to {target}{left}"
    if target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or give another path")
    (_to_dmp if kind == "dmp" else _to_torch)(read, target)
    return f"{len(weights)} weights and {len(state)} tensors of optimizer state to {target}"


def _whole(source: Source, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(source.shapes[key][0], dtype=source.shapes[key][1]) for key in keys}
    source.read({key: as_chunks(tensor) for key, tensor in tensors.items() if tensor.numel()})
    return tensors


def _to_safetensors(source: Source, target: Path, weights: list[str]) -> None:
    other = sorted(source.objects.get("model", ()))
    if other:
        raise CheckpointError(f"{other[0]!r} is no tensor; a safetensors file holds tensors alone")
    sizes = {key[len(MODEL) :]: prod(source.shapes[key][0]) * source.shapes[key][1].itemsize for key in weights}

    def whole(names: list[str]) -> dict[str, torch.Tensor]:
        return {key[len(MODEL) :]: value for key, value in _whole(source, [MODEL + name for name in names]).items()}

    write_safetensors(target, sizes, whole)


def _to_dmp(source: Source, target: Path) -> None:
    objects: dict[str, Any] = {"extra": None, "model": {}, "state": {}, "param_groups": [], **source.objects}
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    about = {
        "format": "dmp",
        "version": FORMAT_VERSION,
        "column_widths": source.about.get("column_widths", {}),
        **{key: source.about[key] for key in ("mesh",) if key in source.about},
    }
    files = {
        "plan.json": ShardingPlan().to_json().encode(),
        "dmp.json": json.dumps(about, indent=1).encode(),
        "objects.pt": buffer.getvalue(),
    }
    tensors = {key: as_chunks(value) for key, value in _whole(source, source.shapes).items()}
    write(target, Content(tensors, files), 0, None)


def _to_torch(source: Source, target: Path) -> None:
    tensors = _whole(source, (key for key in source.shapes if key.startswith((MODEL, STATE))))
    weights = {key[len(MODEL) :]: value for key, value in tensors.items() if key.startswith(MODEL)}
    weights.update(source.objects.get("model", {}))
    state: dict[str, dict[str, Any]] = {n: dict(s) for n, s in source.objects.get("state", {}).items()}
    for key, value in tensors.items():
        if key.startswith(STATE):
            name, _, short = key[len(STATE) :].rpartition(".")
            widths = source.about.get("column_widths", {}).get(name)
            if widths and value.dim() == 2 and value.shape[1] == len(widths) < sum(widths):
                value = merge_blocks(value, widths)
            state.setdefault(name, {})[short] = value
    groups, extra = source.objects.get("param_groups", []), source.objects.get("extra")
    data: dict[str, Any] = weights
    if groups or state or extra is not None:
        data = {"model": weights, "optimizer": {"state": state, "param_groups": groups}, "extra": extra}
    partial = target.with_name(f".{target.name}.saving")
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, partial)
    partial.rename(target)
