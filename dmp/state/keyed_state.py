"""State dicts of TorchRec's keyed optimizers over chunks of tables.

Theirs would give a rank's chunks of a table's state as if they were the whole, of which a checkpoint then keeps one
rank's, without a word. So chunks are given as chunks, and taken back. What holds nothing of a wrapped model is as it
was.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dmp.chunked import ChunkedTensor, chunk_views
from dmp.errors import ShardError
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap import live_models as live


def _chunks_of(params: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, ChunkedTensor]]:
    """Key -> (parameter, its chunks) of those that hold chunks of a wrapped model's tables."""
    marked = {id(p): key for key, p in params.items() if hasattr(p, "_dmp_sharded")}
    found: dict[str, tuple[torch.Tensor, ChunkedTensor]] = {}
    for model in live.models if marked else ():
        for parameter, chunked in sharded_parameters(model).values():
            if id(parameter) in marked:
                found[marked[id(parameter)]] = (parameter, chunked)
    return found


def _is_local(value: Any, parameter: torch.Tensor) -> bool:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, ChunkedTensor)
    return is_plain and value.dim() > 0 and value.shape == parameter.shape


def _with_chunks(original: Any) -> Any:
    @functools.wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        given: dict[str, Any] = original(self)
        for key, (parameter, chunked) in _chunks_of(self.params).items():
            for name, value in given["state"].get(key, {}).items():
                if _is_local(value, parameter):
                    given["state"][key][name] = chunk_views(value, parameter, chunked)
                elif isinstance(value, torch.Tensor) and not isinstance(value, ChunkedTensor) and value.dim():
                    raise ShardError(
                        f"optimizer state {name!r} of {key!r} has local shape {tuple(value.shape)}, neither a scalar "
                        f"nor the local parameter's {tuple(parameter.shape)}: nobody could put it together again"
                    )
        return given

    return state_dict


def _from_chunks(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        given = {**state_dict, "state": dict(state_dict["state"])}
        for key, (parameter, chunked) in _chunks_of(self.params).items():
            live_state = self.state.get(parameter, {})
            values = dict(given["state"].get(key, {}))
            for name, value in values.items():
                if isinstance(value, ChunkedTensor) and _is_local(live_state.get(name), parameter):
                    values[name] = live_state[name].clone()
                    chunk_views(values[name], parameter, chunked).fill_from(value)
            if key in given["state"]:
                given["state"][key] = values
        original(self, given)

    return load_state_dict


def give_chunks(keyed: Any) -> None:
    """Have TorchRec's `KeyedOptimizer`, and what is made from it, give and take chunks as chunks.

    Args:
        keyed: TorchRec's module of it.
    """
    theirs = keyed.KeyedOptimizer
    theirs.state_dict, theirs.load_state_dict = _with_chunks(theirs.state_dict), _from_chunks(theirs.load_state_dict)
