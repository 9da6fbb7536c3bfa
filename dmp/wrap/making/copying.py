"""Copies of a wrapped model, on its mesh: from the skeleton where dense weights are split in place."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from dmp.deep_copy import deep_copy
from dmp.errors import ShardError
from dmp.inference_mode import outside_inference_mode
from dmp.places import is_dtensor
from dmp.wrap.making.assembly import Assembly, fused_of
from dmp.wrap.making.data_parallel import left_whole, start, stopped
from dmp.wrap.values.skeleton import copy_scripted, copy_values, skeleton_of


@outside_inference_mode()
def copied(made: Assembly, memo: dict[int, Any], device: torch.device) -> Assembly:
    """An independent copy that shares process groups; the data-parallel part runs where the original's does.

    Args:
        memo: of `copy.deepcopy`.

    Raises:
        ShardError: weights that are split, on a mesh of another kind of device.
    """
    if device.type != made.device.type and any(is_dtensor(p) for p in made.module.parameters()):
        raise ShardError(
            f"the model's weights are split on a mesh of {made.device.type} devices and cannot be copied to "
            f"{device}; to_unsharded(model) gives a plain module, which a mesh of {device.type} can take"
        )
    memo.update({id(each): each for each in (made.env, made.plan, made.wrapper, made.placements)})
    if made.skeleton is not None:
        memo.update({id(sharded): copy.deepcopy(sharded, memo) for sharded in made.sharded})
    copy_scripted(made.module, memo)
    module = deep_copy(made.module if made.skeleton is None else made.skeleton, memo, is_to_keep=True)
    new = replace(stopped(made), device=device, module=module, running=module, skeleton=None)
    new = replace(new, split_watch=None, since_split=None)
    if made.skeleton is not None:
        new = replace(new, skeleton=skeleton_of(module, new.sharded))
    if device != made.device:
        for moved in [module] if made.skeleton is None else new.sharded:
            moved.to(device)
    new = replace(new, fused=fused_of(module, new.owned, new.env))
    if made.skeleton is not None:
        new.split_dense()
    takes_meta = made.is_data_parallel and new.shards_in_place
    if takes_meta:
        copy_values(made.module, module, device, left_whole(new, True, new.sharded_names()))
        new = start(new)
    if made.skeleton is not None:
        copy_values(made.module, module, device)
    if made.since_split is not None:
        made.since_split.give(made.module, module)
    if made.is_data_parallel and not takes_meta:
        new = start(new)
    if new.split_watch is not None:
        new.split_watch.know_data()
    return new


def refuse_pickling(model: Any, protocol: Any) -> Any:
    """What `pickle` and `torch.save` ask for a model's own form.

    Raises:
        TypeError: there is none.
    """
    raise TypeError(
        "a DistributedModelParallel holds process groups and cannot be pickled; save_checkpoint(path, model) or "
        "torch.save(full_state_dict(model)) keep its values, copy.deepcopy(model) copies it"
    )
