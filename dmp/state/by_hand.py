"""What a program sends of a model's tensors by hand: never a part of one among ranks that have other parts of it.

Loops from before DDP average each gradient by `dist.all_reduce`, and begin with a `dist.broadcast` of each weight. Of
what all ranks have whole that changes nothing: weights are alike once they are wrapped, gradients are averaged in the
backward pass. Of parts of a table it would put one rank's rows over another's, in silence where they are as many, and
gloo ends the process where they are not; for DTensors torch has no such operation, which it says in words of its own.
A copy of a part, divided by the number of ranks, or beside all others in one flat vector, is known by its values.

What a model's own forward sums over all ranks counts the samples of a tensor axis more than once; that is said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import live_models as live
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.layouts.shard import is_replicated
from dmp.places import is_dtensor, local_of
from dmp.put_around import put_inside
from dmp.ranks import say_once
from dmp.state.local_chunks import sharded_parameters

_SHORTEST = 256
"""Numbers in a flat vector of all weights of a model."""


def refuse_parts() -> None:
    """From now on."""
    for function in (dist.all_reduce, dist.broadcast, dist.reduce, dist.scatter):
        put_inside(function, _send)


def _send(own: Any, tensor: Any, *args: Any, **options: Any) -> Any:
    is_ours = sys._getframe(2).f_globals.get("__name__", "").startswith(("dmp.", "sharders."))
    if is_ours or not isinstance(tensor, torch.Tensor):
        return own(tensor, *args, **options)
    given = signature(own).bind(tensor, *args, **options).arguments
    if _may_be_of_a_model(tensor) or is_dtensor(tensor):
        name, env = _part_of(tensor)
        if is_dtensor(tensor) or (env is not None and _have_other_parts(env, given.get("group"))):
            raise ShardError(
                f"torch.distributed.{own.__name__} of {name}, or of its gradient: each rank has its own part of it, "
                "and would mix it with others'. Leave it out: weights are the same on all ranks once the model is "
                "wrapped (load_state_dict takes other values), and loss.backward() averages gradients"
            )
    if own.__name__ == "all_reduce" and given.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
        _say_what_counts_again(given.get("group"))
    return own(tensor, *args, **options)


def _say_what_counts_again(group: Any) -> None:
    """A sum over all ranks in a model's own forward, as codebooks that are running means take of their counts."""
    env = next((m.env for m in live.models if m._calls.is_forward and m.env.tensor_size > 1), None)
    if env is not None and dist.get_world_size(group) == env.size:
        say_once(
            f"the model's forward sums over all {env.size} ranks (torch.distributed.all_reduce): the "
            f"{env.tensor_size} ranks along {env.axes('tensor')} have the same samples, which it counts "
            f"{env.tensor_size} times. Divide the sum by that number where it is more than a part of a quotient, or "
            "sum over the group of the axes that have other samples",
            by_first=True,
        )


def _may_be_of_a_model(tensor: torch.Tensor) -> bool:
    """At a glance: programs reduce their metrics so, too; what our own steps send is not asked at all."""
    is_of_form = (tensor.dim() == 2 and tensor.is_leaf) or (tensor.dim() == 1 and tensor.numel() >= _SHORTEST)
    return is_of_form and tensor.is_floating_point()


def _part_of(tensor: torch.Tensor) -> tuple[str, ShardingEnv | None]:
    """The name of what a tensor is the rank's part of, or the gradient of its part, and where that is cut, if it is."""
    for model in live.models:
        if not (model.sharded_modules or is_dtensor(tensor)) or model._calls.is_forward:
            continue  # all ranks have all of it, or its own code sends, to which no part is given
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            if any(each is not None and _is_the_same(tensor, each) for each in (parameter, parameter.grad)):
                return repr(name), model.env if name in _cut(model) else None
        if (copied := _copied(tensor, named, model)) is not None:
            return f"a copy of {copied!r}", model.env
    return "a DTensor", None


def _copied(tensor: torch.Tensor, named: Mapping[str, nn.Parameter], model: Any) -> str | None:
    """What is cut, and is a tensor's values times some number, by itself or beside the model's others in one vector:
    that is known by any of them, for of some a rank has nothing."""
    if is_dtensor(tensor) or tensor.layout != torch.strided:
        return None
    vectors = [named, {name: p for name, p in named.items() if p.requires_grad}]
    for held in ({name: p} for name, p in named.items()) if tensor.dim() == 2 else vectors:
        sizes = [local_of(p).numel() for p in held.values()]
        if sum(sizes) != tensor.numel():
            continue
        cut = _cut(model)
        name = next((name for name in held if name in cut), None)
        if name is None or (tensor.dim() == 2 and named[name].shape == cut[name]):
            continue  # who has the whole may send that, as `full_state_dict` gives it to all
        parts = zip(held.values(), tensor.detach().reshape(-1).split(sizes), strict=True)
        if any(_is_a_multiple(values, each) for p, values in parts for each in (p, p.grad)):
            return name
    return None


def _is_a_multiple(values: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or other.layout != torch.strided or values.numel() < 2:
        return False  # one number is a multiple of any other
    with torch.no_grad():
        of = local_of(other).as_subclass(torch.Tensor).reshape(-1).to(values.dtype)
        at = of.abs().argmax()  # of zeros nothing is a multiple: 0 / 0 is like nothing
        return torch.allclose(values, of * (values[at] / of[at]), rtol=1e-4, atol=0.0) and bool(values[at])


def _cut(model: Any) -> Mapping[str, torch.Size]:
    """Tables of which ranks have parts, and the sizes of the wholes."""
    wholes = {name: torch.Size(held.size()) for name, (_, held) in sharded_parameters(model).items()}
    layouts = {name: entry.layout for name, entry in model.plan.items()}
    return {
        n: s for n, s in wholes.items() if n not in layouts or not is_replicated(layouts[n].shards(s, model.env), s)
    }


def _is_the_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is the other one, its `.data`, or a view of all of it; of what has no rows, another such one."""
    tensor, other = local_of(tensor), local_of(other)
    if not tensor.layout == other.layout == torch.strided:
        return tensor is other
    if tensor.numel() == 0 == other.numel():  # all of these lie at the same address
        return tensor.shape == other.shape
    return tensor.numel() == other.numel() and tensor.data_ptr() == other.data_ptr()


def _have_other_parts(env: ShardingEnv, group: Any) -> bool:
    """Whether ranks of a group have different parts of tables."""
    mesh = [*range(env.size)] if env.device_mesh is None else env.device_mesh.mesh.flatten().tolist()
    ranks = dist.get_process_group_ranks(group)
    return len({env.table_rank_of(mesh.index(rank)) for rank in ranks if rank in mesh}) > 1
