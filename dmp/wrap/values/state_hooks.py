"""How values get in and out by `state_dict`, of a sharded module: as chunks out, whole or as chunks in; and whole ones
into weights that are split in place, of which torch takes DTensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmp import live_models as live
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.dtensor_pieces import ONE_RANKS, is_of_another_rank
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError, ShardError
from dmp.places import is_dtensor
from dmp.wrap.values.holders import held


def register_state_hooks(module: nn.Module, env: ShardingEnv) -> None:
    """Have a `ShardedModule` give and take its state by chunks; a second time does nothing."""
    if hasattr(module, "_dmp_state_env"):
        return
    module._dmp_state_env = env  # type: ignore[assignment]
    given = module.register_state_dict_post_hook(_give_chunks)
    hooks: Any = module._state_dict_hooks
    hooks.move_to_end(given.id, last=False)  # users' hooks see, and may change, what it gives
    module.register_load_state_dict_pre_hook(_take_chunks)


def carry_state_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hooks that users put on the state dicts of a module whose place `new` takes, before `register_state_hooks`."""
    new._state_dict_pre_hooks.update(old._state_dict_pre_hooks)
    new._load_state_dict_post_hooks.update(old._load_state_dict_post_hooks)
    for key, hook in old._state_dict_hooks.items():
        if hook is not _give_chunks:
            new._state_dict_hooks[key] = hook
    wrapped: Any  # which knows the module that it is of
    for wrapped in old._load_state_dict_pre_hooks.values():
        if wrapped.hook is not _take_chunks:
            new._register_load_state_dict_pre_hook(wrapped.hook, with_module=wrapped.with_module)


def held_state(module: Any) -> Mapping[str, ChunkedTensor]:
    """The chunks of a `ShardedModule`, which know who has the others where it is in a model."""
    env = getattr(module, "_dmp_state_env", None)
    chunks = module.chunked_state()
    return chunks if env is None else held(chunks, env, getattr(module, "calls", None))


def _give_chunks(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    live.look()  # who asks may be another package, which takes chunks for whole tensors
    for name, chunked in held_state(module).items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = chunked


def _take_chunks(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    """Copy the given values into the local chunks, and hand torch the local parameter itself.

    With `assign` a whole parameter is filled in place too: the module looks rows up in the storage that it has.
    """
    chunked, is_assigned = module.chunked_state(), metadata.get("assign_to_params_buffers")
    for name, local in [*module.named_parameters(), *module.named_buffers()]:
        given = state_dict.get(prefix + name)
        if given is None or not (name in chunked or is_assigned):
            continue
        if name in chunked:
            chunked[name].fill_from(given)
        else:
            local.data.copy_(given)
        state_dict[prefix + name] = local


def take_wholes(module: nn.Module) -> None:
    """Have every part of a model take whole tensors for what is split of it, and tell torch.jit that it is; a second
    time does nothing."""
    for part in module.modules():
        hooks = part._load_state_dict_pre_hooks.values()
        is_split = any(is_dtensor(p) for p in part._parameters.values())
        if is_split and all(getattr(each, "hook", None) is not _take_wholes for each in hooks):
            part.register_load_state_dict_pre_hook(_take_wholes)
            vars(part)["__prepare_scriptable__"] = _refuse_scripting


def _refuse_scripting() -> nn.Module:
    """What `torch.jit.script` asks a module for, which would end in the code of a hook of ours."""
    raise ShardError(
        "a module whose weights are split over the ranks is not compiled by torch.jit.script: it has pieces of them. "
        "dmp.to_unsharded(model), on all ranks, is a plain module with the same weights, which can be"
    )


def _take_wholes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module._parameters.items():
        given = state_dict.get(prefix + name)
        if p is None or not is_dtensor(p) or not isinstance(given, torch.Tensor):
            continue
        if is_dtensor(given) and is_of_another_rank(given, p):
            raise CheckpointError(f"load_state_dict: {prefix}{name} {ONE_RANKS}")
        if is_dtensor(given) or p.is_meta:
            continue
        if given.shape == p.shape and not given.is_meta:
            as_chunks(p.detach()).fill_from(given)
            state_dict[prefix + name] = p.detach()
