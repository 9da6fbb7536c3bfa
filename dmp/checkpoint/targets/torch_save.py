"""A `torch.save` file of whole tensors, as `torch.load` gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmp.checkpoint.sources.source import MODEL, STATE, Source, split_state
from dmp.checkpoint.targets.mapped import mapped, read_mapped
from dmp.checkpoint.targets.new_file import new_file, refuse_existing
from dmp.wrap.optimizers.column_blocks import is_per_block, merge_blocks

_MERGED_ROWS = 1 << 16  # at a time


class TorchFileTarget:
    """A state dict; where there is more than weights, `{"model": ..., "optimizer": ..., "extra": ...}`."""

    weights_only = False
    check = staticmethod(refuse_existing)

    def write(self, source: Source, path: Path) -> None:
        keys = (key for key in source.shapes if key.startswith((MODEL, STATE)))
        tensors = read_mapped(source, keys, path.parent)
        weights = {key[len(MODEL) :]: value for key, value in tensors.items() if key.startswith(MODEL)}
        weights.update(source.objects.get("model", {}))
        state = _state(source, tensors, path.parent)
        groups, extra = source.objects.get("param_groups", []), source.objects.get("extra")
        data: dict[str, Any] = weights
        if groups or state or extra is not None:
            data = {"model": weights, "optimizer": {"state": state, "param_groups": groups}, "extra": extra}
        with new_file(path) as partial:
            torch.save(data, partial)


def _state(source: Source, tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, dict[str, Any]]:
    """Parameter -> state's name -> value, as torch.optim has it: one value for each row, whatever the column blocks."""
    state: dict[str, dict[str, Any]] = {n: dict(s) for n, s in source.objects.get("state", {}).items()}
    for key, value in tensors.items():
        if key.startswith(STATE):
            name, short = split_state(key)
            widths = source.about.get("column_widths", {}).get(name, ())
            if is_per_block(value.shape, widths):
                value = _merged(value, widths, folder)
            state.setdefault(name, {})[short] = value
    if not source.about.get("has_steps", True):  # such a file cannot say so: they begin anew, as in a new model
        for values in state.values():
            values.setdefault("step", torch.zeros(()))
    return state


def _merged(value: torch.Tensor, widths: Sequence[int], folder: Path) -> torch.Tensor:
    """`merge_blocks` of mapped (rows, B), a range of rows at a time, into mapped (rows,)."""
    merged = mapped({"": ((len(value),), value.dtype)}, folder)[""]
    for sums, rows in zip(merged.split(_MERGED_ROWS), value.split(_MERGED_ROWS), strict=True):
        sums.copy_(merge_blocks(rows, widths))
    return merged
