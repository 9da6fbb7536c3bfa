"""State dicts of optimizers over chunks of tables: torch's own, and TorchRec's keyed ones.

They would give a rank's chunks of a table's state as if they were the whole, of which a checkpoint then keeps one
rank's, without a word (`get_state_dict` and `dcp.save` of torch do). So chunks are given as chunks, and taken back;
a whole tensor is cut. What holds nothing of a wrapped model is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dmp import live_models as live
from dmp.chunked import ChunkedTensor, ChunkState, as_chunks, chunk_views
from dmp.errors import ShardError
from dmp.places import is_dtensor
from dmp.put_around import put_around
from dmp.state.local_chunks import sharded_parameters


def _chunks_of(params: Mapping[Any, Any]) -> dict[Any, tuple[torch.Tensor, ChunkedTensor]]:
    """Key -> (parameter, its chunks) of those that hold chunks of a wrapped model's tables."""
    marked = {id(p): key for key, p in params.items() if hasattr(p, "_dmp_sharded")}
    found: dict[Any, tuple[torch.Tensor, ChunkedTensor]] = {}
    for model in live.models if marked else ():
        for parameter, chunked in sharded_parameters(model).values():
            if id(parameter) in marked:
                found[marked[id(parameter)]] = (parameter, chunked)
    return found


def _split_of(params: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Those that are DTensors of a wrapped model."""
    found = {key: p for key, p in params.items() if is_dtensor(p)}
    of_models = {id(p) for model in (live.models if found else ()) for p in model.parameters()}
    return {key: p for key, p in found.items() if id(p) in of_models}


def _numbered(groups: Any) -> dict[int, Any]:
    """Parameters by the numbers that a state dict of torch's has for them."""
    return dict(enumerate(p for group in groups for p in group["params"]))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, ChunkedTensor) and value.dim() > 0


def _is_local(values: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, ChunkedTensor) for value in values.values())


def _given(what: Any, values: dict[str, Any], parameter: torch.Tensor, chunked: ChunkedTensor) -> dict[str, Any]:
    """A parameter's state with chunks in place of what is shaped as this rank's part of it; views.

    Raises:
        ShardError: a tensor of another shape, of which nothing tells how it is cut.
    """
    given = dict(values)
    for name, value in values.items():
        if _is_plain(value) and value.shape == parameter.shape:
            given[name] = chunk_views(value, parameter, chunked)
        elif _is_plain(value):
            raise ShardError(
                f"optimizer state {name!r} of {what} has local shape {tuple(value.shape)}, neither a scalar "
                f"nor the local parameter's {tuple(parameter.shape)}: nobody could put it together again"
            )
    return given


def _taken(values: Mapping[str, Any], parameter: torch.Tensor, chunked: ChunkedTensor) -> dict[str, Any]:
    """The other way: this rank's part of what is given in chunks, or whole."""
    taken = dict(values)
    for name, value in values.items():
        is_whole = _is_plain(value) and value.shape == chunked.size()
        if is_whole or (isinstance(value, ChunkedTensor) and value.size() == chunked.size()):
            taken[name] = torch.zeros_like(parameter.detach(), dtype=value.dtype)
            chunk_views(taken[name], parameter, chunked).fill_from(value)
    return taken


def _fitted(values: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """What is given in chunks or whole, in chunks as those held: theirs copies one shard of each into the other.

    Raises:
        ShardError: chunks of another plan, or another size.
    """
    fitted = dict(values)
    for name, value in held.items():
        if isinstance(value, ChunkedTensor) and isinstance(values.get(name), torch.Tensor):
            fitted[name] = value.mapped(torch.empty_like)
            fitted[name].fill_from(values[name])
    return fitted


def _split(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A state that is given whole, as DTensors that lie as the parameter does."""
    taken = dict(values)
    for name, value in values.items():
        if _is_plain(value) and not is_dtensor(value) and value.shape == parameter.shape:
            taken[name] = torch.empty_like(parameter.detach(), dtype=value.dtype)
            as_chunks(taken[name]).fill_from(value)
    return taken


def _with_state(given: Mapping[str, Any], changed: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    return {**given, "state": {**given["state"], **changed}} if changed else dict(given)


def _give(own: Any, optimizer: Optimizer) -> dict[str, Any]:
    given: dict[str, Any] = own(optimizer)
    of = _chunks_of(_numbered(optimizer.param_groups))
    state = given.get("state", {})
    whole = _with_state(given, {i: _given(f"parameter {i}", state[i], *of[i]) for i in of if i in state})
    return ChunkState(whole) if isinstance(given, ChunkState) else whole


def _take(own: Any, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    numbered = _numbered(optimizer.param_groups)
    of, split = _chunks_of(numbered), _split_of(numbered)
    if (of or split) and isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys():
        # By place, as torch has it: keys are numbers, or names where `get_state_dict` has put them.
        keys = [key for group in state_dict["param_groups"] for key in group.get("params", ())]
        state, places = state_dict["state"], [(i, key) for i, key in enumerate(keys)]
        places = [(i, key) for i, key in places if key in state]
        taken = {key: _taken(state[key], *of[i]) for i, key in places if i in of}
        taken |= {key: _split(state[key], split[i]) for i, key in places if i in split}
        state_dict = _with_state(state_dict, taken)
    own(optimizer, state_dict)


def keyed_give(own: Any, optimizer: Any) -> dict[str, Any]:
    """Of TorchRec's `KeyedOptimizer`, and what is made from it."""
    given: dict[str, Any] = own(optimizer)
    state = given["state"]
    of = _chunks_of(optimizer.params)
    return _with_state(given, {key: _given(repr(key), state[key], *of[key]) for key in of if key in state})


def keyed_take(own: Any, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """The same."""
    of, state = _chunks_of(optimizer.params), state_dict["state"]
    taken = {}
    for key, held in of.items():
        if key in state:
            # What is updated in the backward pass has chunks for its live state, and takes such chunks.
            mine = optimizer.state.get(held[0], {})
            taken[key] = _taken(state[key], *held) if _is_local(mine) else _fitted(state[key], mine)
    taken |= {key: _split(state[key], p) for key, p in _split_of(optimizer.params).items() if key in state}
    own(optimizer, _with_state(state_dict, taken))


def give_chunks() -> None:
    """Have torch's optimizers give and take chunks as chunks."""
    put_around(Optimizer, "state_dict", _give)
    put_around(Optimizer, "load_state_dict", _take)
