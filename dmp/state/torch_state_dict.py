"""torch's own functions for state dicts (`get_state_dict`, `get_optimizer_state_dict`, ...), over chunks of tables.

With `full_state_dict=True` they make whole tensors of DTensors, and left chunks as they are. With
`broadcast_from_rank0=True`, `set_state_dict` takes a rank that has nothing for the model for one that loads an
optimizer alone: it went on, and rank 0 waited. And torch's reader of `torch.save` files, which sends a tensor for each
part that its own rank holds: ranks that hold other numbers of parts waited for each other. And its save in the
background, which is a thread that exchanges over the connections that the steps beside it use, by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dmp import live_models as live
from dmp.chunked import ChunkedTensor
from dmp.errors import RanksError, ShardError
from dmp.nested import tensors_of
from dmp.ranks import gather_words, own_group, raise_cause, raise_on_all
from dmp.state.find_wrapped import wrapped_in
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.values.half_steps import say_of_half_a_step
from dmp.wrap.values.whole import gather


def give_whole(own: Callable[..., Any], state_dict: dict[str, Any], info: Any) -> Any:
    """The end of both of torch's functions that give a state dict."""
    is_alone = bool(info.cpu_offload) and torch.distributed.is_initialized()
    given = dict(state_dict)
    if isinstance(given.get("state"), dict):
        given["state"] = {
            name: dict(values) if isinstance(values, dict) else values for name, values in given["state"].items()
        }
    for model, names in _tables(info) if info.full_state_dict else ():
        places = {
            f"{at}\0{key}": (held, key)
            for at, held, key in _values(given, names)
            if isinstance(held[key], ChunkedTensor)
        }
        say_of_half_a_step(model)
        whole = gather(
            {place: held[key] for place, (held, key) in places.items()},
            model.env,
            rank0_only=is_alone,
            cpu=bool(info.cpu_offload),
            what="state_dict with full_state_dict=True",
        )
        for place, (held, key) in places.items():
            if place in whole:
                held[key] = whole[place]
            else:
                del held[key]  # which only the first rank gets
    return own(given, info)


def gather_chunks(own: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
    """What torch gathers of a `ShardedTensor`, as if that were cut by rows into equal parts: ours, of chunks."""
    if not isinstance(tensor, ChunkedTensor):
        return own(tensor, *args, **options)
    return tensor if tensor.holders is None else tensor.holders.whole(tensor)


def keep_empty_parts(own: Callable[..., dict[str, Any]], state_dict: dict[str, Any]) -> dict[str, Any]:
    """What torch's checkpoint takes of a state dict, with that of which this rank has no chunk.

    It leaves out a `ShardedTensor` of which a rank has no shard, then takes the folder for one that torch 2.3 wrote,
    for names are missing, and looks for others.
    """
    from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict

    flat = own(state_dict)

    def keep(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, ChunkedTensor) and not value.chunks:
            set_element(flat, path, value)

    traverse_state_dict(state_dict, keep)
    return flat


def refuse_broadcasts(own: Callable[..., Any], reader: Any, plan: Any, planner: Any) -> Any:
    """Torch's reader of `torch.save` files: says what reads them into chunks, before anything is sent."""
    chunked = [name for name, value in planner.state_dict.items() if isinstance(value, ChunkedTensor)]
    if chunked:
        raise ShardError(
            f"BroadcastingTorchSaveReader sends a tensor for each part that a rank holds, and of {chunked[0]!r} "
            "ranks hold different numbers: they would wait for each other. load_checkpoint(path, model) reads "
            "torch.save files; model.load_state_dict(torch.load(path)) takes whole tensors too"
        )
    return own(reader, plan, planner)


def save_alone(own: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
    """Torch's save with `no_dist=True`: a folder of one rank's own parts, which loads without a word about those of
    others. So all ranks write one each, or none, as of [Note: files of one rank]."""
    from torch.distributed.checkpoint._traverse import traverse_state_dict

    found: list[ChunkedTensor] = []

    def look(_: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, ChunkedTensor) and value.holders is not None:
            found.append(value)

    if options.get("no_dist"):
        traverse_state_dict(state_dict, look)
    for chunked in found[:1]:
        chunked.holders.meet()  # type: ignore[union-attr]
    return own(state_dict, *args, **options)


def save_beside_steps(
    own: Callable[..., Any],
    executor: Any,
    state_dict: Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **options: Any,
) -> Any:
    """Torch's save in the background, on connections of its own: over gloo its ranks and those of a step took each
    other's messages, and waited for ever. What its thread finds is of this time, of which it can say nothing."""
    for _, each in tensors_of(state_dict):
        if isinstance(each, ChunkedTensor) and each.holders is not None:
            each.holders.say_when()
    group = (process_group or dist.group.WORLD) if use_collectives and not no_dist and dist.is_initialized() else None
    if group and any(model.env.size >= dist.get_world_size(group) for model in live.models):  # all its ranks have it
        process_group = own_group(group, "torch's background", timedelta(hours=1))
        gather_words("torch's save in the background", [0, 0], group)  # its thread could not tell that it is alone
    options |= {"process_group": process_group, "no_dist": no_dist, "use_collectives": use_collectives}
    return own(executor, state_dict, **options)


def begin_together(
    own: Callable[..., Any], model: Any, optims: Any, optim_only: bool, *, options: Any = None, **others: Any
) -> Any:
    """Have all ranks load the model where rank 0 does, and gives them its values; and refuse what torch mistakes."""
    if any(isinstance(each, FusedOptimizer) for each in optims):
        raise ShardError(
            "torch's functions for state dicts take optimizers that number their parameters, and would give the "
            "state in model.fused_optimizer numbers for names: its own state_dict() and load_state_dict(), "
            "full_optimizer_state_dict(model) or save_checkpoint(path, model, optimizer) have it by name"
        )
    wrapped = wrapped_in(model) if getattr(options, "broadcast_from_rank0", False) else {}
    for env in dict.fromkeys(found.env for found in wrapped.values()):
        said = gather_words("torch's state dict of a wrapped model, from rank 0", [optim_only, 0], env.everyone)
        optim_only = bool(said[0][0])
    return own(model, optims, optim_only, options=options, **others)


def load_together(own: Callable[..., Any], model: Any, *args: Any) -> Any:
    """What fails on rank 0 alone, which has the values, is raised where others wait for them."""
    wrapped = wrapped_in(model) if args[-1].broadcast_from_rank0 else {}
    try:
        return own(model, *args)
    except RanksError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError):
            raise_cause(error)
        for env in dict.fromkeys(found.env for found in wrapped.values()):
            raise_on_all(error, env.everyone, "torch's set_state_dict")
        raise


def _tables(info: Any) -> list[tuple[Any, list[str]]]:
    """Each wrapped model among what torch gives the state of, with its tables in chunks by the names there; in one
    order on all ranks."""
    found = []
    for model in live.models:
        held = [parameter for parameter, _ in sharded_parameters(model).values()]
        if names := sorted(name for parameter in held for name in info.fqn_param_mapping.get(parameter, ())):
            found.append((model, names))
    return sorted(found, key=lambda of: of[1])


def _optimizer_values(state_dict: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a parameter's state is in an optimizer's state dict, nested or flat: a dict, and a key of it."""
    states = state_dict.get("state")
    if isinstance(states, dict):
        of_parameter = states.get(name, {})
        yield from ((of_parameter, key) for key in list(of_parameter))
    else:
        yield from ((state_dict, key) for key in list(state_dict) if key.startswith(f"state.{name}."))


def _values(state_dict: dict[str, Any], names: list[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, dict, key) of what a state dict, of a model or an optimizer, has of these."""
    for name in names:
        if name in state_dict and not isinstance(state_dict.get("state"), dict):
            yield name, state_dict, name
        for held, key in _optimizer_values(state_dict, name):
            yield name, held, key
