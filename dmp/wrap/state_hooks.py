"""How values get in and out of a sharded module by `state_dict`: as pieces out, whole or as pieces in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks, is_dtensor


def misfit(own: Any, given: Any) -> str:
    """Why `given` cannot be loaded where `own` is, or nothing."""
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return ""
    if not isinstance(given, torch.Tensor):
        return f"is a {type(given).__name__}, expected a tensor of shape {tuple(own.shape)}"
    if is_dtensor(given) and not (
        is_dtensor(own) and (given.device_mesh, given.placements) == (own.device_mesh, own.placements)  # type: ignore[attr-defined]
    ):
        return "is a DTensor of another mesh or plan: use save_checkpoint and load_checkpoint, or full_state_dict"
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)}, expected {tuple(own.shape)}"
    if isinstance(given, ChunkedTensor):
        pieces = zip(own.chunks, own.offsets, strict=True) if isinstance(own, ChunkedTensor) else None
        if pieces is None or not all(given._holds(chunk, at) for chunk, at in pieces):
            return "is in pieces of another plan: use save_checkpoint and load_checkpoint, or full_state_dict"
    return ""


def with_local_parts(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, but DTensors filled here where it has whole tensors: torch would not load the one as the other."""
    result = dict(given)
    for name, value in given.items():
        mine = own.get(name)
        if isinstance(mine, torch.Tensor) and is_dtensor(mine) and not is_dtensor(value):
            as_chunks(mine).fill_from(value)
            result[name] = mine
    return result


def register_state_hooks(module: nn.Module) -> None:
    if getattr(module, "_dmp_state_hooks", False):
        return
    module._dmp_state_hooks = True  # type: ignore[assignment]
    module.register_state_dict_post_hook(_give_chunks)
    module.register_load_state_dict_pre_hook(_take_chunks)


def _give_chunks(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, chunked in module.chunked_state().items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = chunked


def _take_chunks(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    """Copy the given values into the local pieces, and hand torch the local parameter itself.

    With `assign` a whole parameter is filled in place too: the module looks rows up in the storage that it has.
    """
    chunked, is_assigned = module.chunked_state(), metadata.get("assign_to_params_buffers")
    for name, local in module.named_parameters():
        given = state_dict.get(prefix + name)
        if given is None or not (name in chunked or is_assigned):
            continue
        if name in chunked:
            chunked[name].fill_from(given)
        else:
            local.data.copy_(given)
        state_dict[prefix + name] = local
