"""From one kind of checkpoint to another in one process, without a model.

[Note: larger than memory]
Tensors are read a piece at a time into mapped files beside the target, and written from there: the disk takes the
checkpoint's size (for safetensors, one file's) once more while it runs, the memory a few MB.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dmp.checkpoint.export import mapped, write_safetensors
from dmp.checkpoint.own_files import new_file
from dmp.checkpoint.renaming import renamed
from dmp.checkpoint.save import Content, write
from dmp.checkpoint.sources.checksums import compare
from dmp.checkpoint.sources.detect import open_source
from dmp.checkpoint.sources.source import FORMAT_VERSION, MODEL, STATE, Source
from dmp.chunked import as_chunks
from dmp.errors import CheckpointError
from dmp.plans.plan import ShardingPlan
from dmp.wrap.column_blocks import merge_blocks

KINDS = ("dmp", "safetensors", "torch")
_MERGED_ROWS = 1 << 16  # at a time


def convert(source: Path, target: Path, kind: str, rename: Mapping[str, str] | None = None) -> str:
    """Read a checkpoint of any kind, write one of `kind`; returns what was done in a line.

    "safetensors" takes the weights alone.

    Raises:
        CheckpointError: a source that cannot be read or is damaged, or a target that is there already.
        OSError: a target that cannot be written.
    """
    target = target.absolute()
    read = renamed(open_source(source.absolute()), rename)
    weights = [key for key in read.shapes if key.startswith(MODEL)]
    state = [key for key in read.shapes if key.startswith(STATE)]
    if kind != "safetensors" and target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or give another path")
    compare(read.check(weights if kind == "safetensors" else list(read.shapes), (0, 1)))
    if kind == "safetensors":
        _to_safetensors(read, target, weights)
        left = f"; {len(state)} tensors of optimizer state were left out" if state else ""
        return f"{len(weights)} weights to {target}{left}"
    target.parent.mkdir(parents=True, exist_ok=True)
    (_to_dmp if kind == "dmp" else _to_torch)(read, target)
    return f"{len(weights)} weights and {len(state)} tensors of optimizer state to {target}"


def _read(source: Source, keys: Iterable[str], folder: Path) -> dict[str, torch.Tensor]:
    """Tensors on files in `folder`; see [Note: larger than memory]."""
    tensors = mapped({key: source.shapes[key] for key in keys}, folder)
    source.read({key: as_chunks(tensor) for key, tensor in tensors.items() if tensor.numel()})
    return tensors


def _to_safetensors(source: Source, target: Path, weights: list[str]) -> None:
    other = sorted(source.objects.get("model", ()))
    if other:
        raise CheckpointError(f"{other[0]!r} is no tensor; a safetensors file holds tensors alone")

    def fill(names: list[str], tensors: dict[str, torch.Tensor]) -> None:
        source.read({MODEL + name: as_chunks(tensors[name]) for name in names if tensors[name].numel()})

    write_safetensors(target, {key[len(MODEL) :]: source.shapes[key] for key in weights}, fill)


def _to_dmp(source: Source, target: Path) -> None:
    objects: dict[str, Any] = {"extra": None, "model": {}, "state": {}, "param_groups": [], **source.objects}
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    about: dict[str, Any] = {
        "format": "dmp",
        "version": FORMAT_VERSION,
        "column_widths": source.about.get("column_widths", {}),
        **{key: source.about[key] for key in ("mesh", "holds_more", "has_steps") if key in source.about},
    }
    files = {
        "plan.json": ShardingPlan().to_json().encode(),
        "dmp.json": json.dumps(about, indent=1).encode(),
        "objects.pt": buffer.getvalue(),
    }
    tensors = {key: as_chunks(value) for key, value in _read(source, source.shapes, target.parent).items()}
    write(target, Content(tensors, files), 0, None)


def _to_torch(source: Source, target: Path) -> None:
    keys = (key for key in source.shapes if key.startswith((MODEL, STATE)))
    tensors = _read(source, keys, target.parent)
    weights = {key[len(MODEL) :]: value for key, value in tensors.items() if key.startswith(MODEL)}
    weights.update(source.objects.get("model", {}))
    state: dict[str, dict[str, Any]] = {n: dict(s) for n, s in source.objects.get("state", {}).items()}
    for key, value in tensors.items():
        if key.startswith(STATE):
            name, _, short = key[len(STATE) :].rpartition(".")
            widths = source.about.get("column_widths", {}).get(name)
            if widths and value.dim() == 2 and value.shape[1] == len(widths) < sum(widths):
                value = _merged(value, widths, target.parent)
            state.setdefault(name, {})[short] = value
    if not source.about.get("has_steps", True):  # such a file cannot say so: they begin anew, as in a new model
        for values in state.values():
            values.setdefault("step", torch.zeros(()))
    groups, extra = source.objects.get("param_groups", []), source.objects.get("extra")
    data: dict[str, Any] = weights
    if groups or state or extra is not None:
        data = {"model": weights, "optimizer": {"state": state, "param_groups": groups}, "extra": extra}
    with new_file(target) as partial:
        torch.save(data, partial)


def _merged(value: torch.Tensor, widths: Sequence[int], folder: Path) -> torch.Tensor:
    """`merge_blocks` of mapped (rows, B), a piece at a time, into mapped (rows,)."""
    merged = mapped({"": ((len(value),), value.dtype)}, folder)[""]
    for sums, rows in zip(merged.split(_MERGED_ROWS), value.split(_MERGED_ROWS), strict=True):
        sums.copy_(merge_blocks(rows, widths))
    return merged
