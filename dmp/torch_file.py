"""A `torch.save` file as a checkpoint's source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.sources import MODEL, STATE


class TorchFile:
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
