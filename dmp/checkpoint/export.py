"""A model's weights to safetensors files in Hugging Face's layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmp.checkpoint.place import place_on_all
from dmp.checkpoint.restore import aliases
from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.source import MODEL, Shapes
from dmp.checkpoint.targets.safetensors import SafetensorsTarget
from dmp.chunked import ChunkedTensor
from dmp.env import ShardingEnv
from dmp.inference_mode import outside_inference_mode
from dmp.ranks import results_of_all
from dmp.state.find_wrapped import env_of
from dmp.wrap.values.half_steps import say_of_half_a_step
from dmp.wrap.values.whole import gather


@outside_inference_mode()
def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, max_shard_bytes: int = SafetensorsTarget.max_shard_bytes
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
    target = place_on_all(path, "export_safetensors(path, model, ...)", model, env_of)
    env = env_of(model)
    state = model.state_dict()
    say_of_half_a_step(model)

    def held() -> Shapes:
        return {n: (tuple(v.shape), v.dtype) for n, v in state.items() if isinstance(v, torch.Tensor)}

    everywhere = results_of_all(held, env.everyone, f"exporting to {target}")
    shapes = {name: shape for known in everywhere for name, shape in known.items()}
    same = aliases(model)
    first: dict[str, str] = {}  # a parameter's first name of all -> the first under which a rank has it
    for name in shapes:
        first.setdefault(same.get(name, [name])[0], name)
    once = {name: shapes[name] for name in first.values()}
    SafetensorsTarget(max_shard_bytes, env.rank, env.everyone).write(_LiveWeights(target, once, state, env), target)


class _LiveWeights:
    """A model's weights as a checkpoint's source; `read` is collective, and rank 0 receives."""

    def __init__(self, path: Path, shapes: Shapes, state: Mapping[str, Any], env: ShardingEnv) -> None:
        self.path = path
        self.shapes = {MODEL + name: shape for name, shape in shapes.items()}
        self.about: dict[str, Any] = {}
        self.objects = {"model": {name: v for name, v in state.items() if not isinstance(v, torch.Tensor)}}
        self._state = state
        self._env = env

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        """Nothing: values in memory have no checksums."""
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        names = [key[len(MODEL) :] for key in targets]
        state = {name: self._state[name] for name in names if name in self._state}
        out = {key[len(MODEL) :]: target.chunks[0] for key, target in targets.items() if target.chunks}
        gather(state, self._env, rank0_only=True, out=out)
