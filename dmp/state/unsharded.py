"""A plain module with a wrapped model's weights in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmp.calls import alone
from dmp.contracts import ShardedModule, hook
from dmp.deep_copy import deep_copy
from dmp.errors import ShardError
from dmp.places import is_dtensor, places_of, replace_tensors, room_for
from dmp.plans.kept_places import kept_beside
from dmp.state.find_wrapped import env_of, in_force, wrapped_in
from dmp.wrap.values.half_steps import say_of_half_a_step
from dmp.wrap.values.skeleton import computed, copy_scripted
from dmp.wrap.values.whole import gather
from dmp.wrap.wrapper import DistributedModelParallel


@alone("to_unsharded")
def to_unsharded(model: nn.Module) -> nn.Module:
    """A plain module on the CPU with the model's weights: for serving, export, or a look.

    Collective over `model.env`; complete on every rank. Sharded modules give an empty plain module of their kind
    (`unsharded()`, parameters possibly on meta); everything else is copied.

    Raises:
        ShardError: a sharded module without `unsharded()`, or one that leaves a tensor on meta.
    """
    model = in_force(model).get("", model)
    if not isinstance(model, DistributedModelParallel) and wrapped_in(model):
        return _parent_unsharded(model)
    say_of_half_a_step(model)
    live = model.module if isinstance(model, DistributedModelParallel) else model
    root = model.skeleton or live if isinstance(model, DistributedModelParallel) else live
    memo: dict[int, Any] = {}
    for path, module in root.named_modules():
        make = hook(module, "unsharded")
        if callable(make):
            memo[id(module)] = make().train(module.training)
        elif isinstance(module, ShardedModule):
            raise ShardError(
                f"module {path!r} ({type(module).__name__}) has no unsharded(), which gives an empty plain module of "
                "the same names; full_state_dict(model) has the values without it"
            )
    for parameter in root.parameters():
        if is_dtensor(parameter):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    memo.update((id(tensor), tensor.detach().clone()) for tensor in computed(root.modules()))
    copy_scripted(root, memo)
    given = dict(memo)
    try:
        plain: nn.Module = deep_copy(root, memo, is_to_keep=True)
    except RuntimeError:  # of results that have a graph
        given.update((id(tensor), tensor.detach().clone()) for tensor in computed(root.modules(), in_objects=True))
        plain = deep_copy(root, given, is_to_keep=True)
    if root is not live:
        _take_buffers(live, plain)
    _allocate(plain)
    if isinstance(model, DistributedModelParallel):
        model.give_changes(plain)
    held = dict(model.named_parameters())  # chunks, where some are gathered
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.to(held[name].dtype)  # a collection is made by its configs, and was cast since
        parameter.requires_grad_(held[name].requires_grad)
    targets = {name: t for name, t in plain.state_dict().items() if isinstance(t, torch.Tensor)}
    gather(model.state_dict(), env_of(model), out=targets, what="to_unsharded")
    return plain


def _parent_unsharded(parent: nn.Module) -> nn.Module:
    """A copy with plain modules in place of the wrapped models; inside another wrapper, as DDP, what that holds."""
    if isinstance(parent, nn.parallel.DistributedDataParallel):
        return to_unsharded(parent.module)
    memo: dict[int, Any] = {id(m): to_unsharded(m) for m in wrapped_in(parent).values()}
    made: nn.Module = deep_copy(parent, memo, is_to_keep=True)
    return made.cpu()


def _take_buffers(live: nn.Module, plain: nn.Module) -> None:
    """Buffers and modes, which a skeleton does not have; a state dict lacks some of the buffers."""
    modules = dict(live.named_modules())
    for path, module in plain.named_modules():
        if path not in modules:
            continue  # inside a plain module that stands for a sharded one
        module.training = modules[path].training
        for name, buffer in module._buffers.items():
            now = modules[path]._buffers.get(name)
            if buffer is not None and buffer.is_meta and now is not None:
                module._buffers[name] = now.detach().clone()


def _allocate(module: nn.Module) -> None:
    """Give parameters and persistent buffers on meta a place on the CPU, ties kept, and move the rest there."""
    on_meta = [place for place in places_of(module.named_modules()) if place.tensor.is_meta]
    for place in on_meta:
        if place.name in place.owner._non_persistent_buffers_set:
            raise ShardError(
                f"unsharded() left buffer {place.full_name!r} on meta, and a state dict does not hold it; "
                "give it its values there"
            )
    replace_tensors(on_meta, lambda place: room_for(place.tensor, "cpu"), kept_beside(module))
    module.cpu()
