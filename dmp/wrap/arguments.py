"""What `DistributedModelParallel` is given, checked by each rank before anything is changed."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from dmp.contracts import ShardedModule
from dmp.env import ShardingEnv
from dmp.errors import ShardError

_taken: WeakSet[nn.Module] = WeakSet()


def take(module: nn.Module) -> None:
    """From now on neither this module nor one inside it can be wrapped again."""
    for each in module.modules():
        _taken.add(each)


def check_arguments(module: Any, env: Any, device: Any, data_parallel_wrapper: Any) -> None:
    """Raise what a user can get wrong without knowing sharders or plans.

    Raises:
        ShardError: something of another kind, a device without values, or a module that is wrapped already.
    """
    if not isinstance(module, nn.Module):
        raise ShardError(f"expected a torch.nn.Module to wrap; got {type(module).__name__}")
    check_env(env)
    _check_device(device)
    _check_data_parallel_wrapper(data_parallel_wrapper)
    _check_not_wrapped(module)


def check_env(env: Any) -> None:
    """Raise `ShardError` for what is no env."""
    if env is not None and not isinstance(env, ShardingEnv):
        raise ShardError(f"expected env to be a ShardingEnv (see ShardingEnv.from_mesh); got {type(env).__name__}")


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ShardError(f"expected device to be a torch.device or its name, as 'cpu'; got {device!r}") from error
    if kind == "meta":
        raise ShardError(
            "device='meta' holds no values, so nothing can run on it: leave out device to take the mesh's. A module "
            "whose parameters are on meta is filled on the mesh's device; to plan without values: planner.plan(...)"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ShardError(f"device={str(device)!r} is not to be had in this process: {error}") from error


def _check_data_parallel_wrapper(wrapper: Any) -> None:
    if wrapper is None:
        return
    if isinstance(wrapper, type):
        raise ShardError(f"data_parallel_wrapper is the class {wrapper.__name__}; call it: {wrapper.__name__}(...)")
    if not callable(getattr(wrapper, "wrap", None)):
        raise ShardError(
            "expected data_parallel_wrapper to have wrap(module, env, device, ignored), as sharders.DDPWrapper() and "
            f"sharders.FSDPWrapper() do; got {type(wrapper).__name__}, which has none"
        )


def _check_not_wrapped(module: nn.Module) -> None:
    """Rank 0's values go to all ranks when a module is wrapped: pieces would be overwritten by other pieces."""
    for path, each in module.named_modules():
        if each not in _taken and not isinstance(each, ShardedModule):
            continue
        where = f"its submodule {path!r}" if path else "it"
        raise ShardError(
            f"the module to wrap, {type(module).__name__}, is part of a wrapped model already or holds one: {where} "
            f"({type(each).__name__}) was put on a mesh before, and rank 0's pieces would overwrite the others'. Wrap "
            "the whole model once; to change mesh or plan: to_unsharded(model), or a checkpoint into a new model"
        )
