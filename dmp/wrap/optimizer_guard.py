"""Optimizers that compute something else, or fail, when they are given chunks of parameters: refused with the reason.

An optimizer that works on every element by itself is right on any chunk. One that needs a whole matrix, or sums over
all parameters, is not, and torch says nothing. Only an optimizer that holds a wrapped model's parameters is looked at,
each by itself; `optimizer.works_on_chunks = True`, on it or on its class, is its author's word that it is right.

[Note: global effects] One hook of torch's (`register_optimizer_step_pre_hook`), from the first wrapped model to the
end of the process, is called before a step of every optimizer. Nobody tells a parameter which optimizers hold it, so
this is where one is met. An optimizer that is not refused pays a look at its class's name and an attribute; one that
holds nothing of a wrapped model's is not changed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dmp.chunked import CHUNKS_ONLY
from dmp.errors import ShardError
from dmp.places import is_dtensor
from dmp.wrap import live_models as live
from dmp.wrap.earlier_optimizers import follow
from dmp.wrap.keyed import is_wrapper

NEEDS_WHOLE = {
    "Muon": "orthogonalises whole matrices, and of a chunk it gets another result",
    "Adafactor": "keeps means over whole rows and columns, which a chunk does not have",
    "LBFGS": "takes inner products over all parameters, and the ranks would each take their own",
    "Shampoo": "multiplies by roots of whole matrices' statistics, which a chunk does not have",
    "SOAP": "rotates by eigenvectors of whole matrices' statistics, which a chunk does not have",
}
"""Class name (of the optimizer or a base of it, torch's or another's) -> why it needs whole parameters."""


@cache
def guard_optimizers() -> None:
    """From now on a step of an optimizer that is wrong on the chunks it holds raises `ShardError`, changing nothing.

    Optimizers that were made before wrapping get the wrapped model's parameters, see earlier_optimizers.py.
    """
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if is_wrapper(optimizer):
        return  # each of those that it hands the step on to comes by itself
    if follow(optimizer) and chunks_in(optimizer):
        _mark_state(optimizer)
    refused = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in NEEDS_WHOLE), None)
    if refused is None or getattr(optimizer, "works_on_chunks", False):
        return
    for group, i, shape in chunks_in(optimizer):
        raise ShardError(
            f"{type(optimizer).__name__} cannot train parameter {i} of group {group}, of shape {shape}, of which this "
            f"rank holds a chunk: {refused} {NEEDS_WHOLE[refused]}. Use an optimizer that works on each element, such "
            "as AdamW, or leave the parameter whole (replicated). If this one is right on chunks, say so: "
            "optimizer.works_on_chunks = True"
        )


def chunks_in(optimizer: Optimizer) -> list[tuple[int, int, tuple[int, ...]]]:
    """(group, index, shape) of every parameter of a wrapped model in an optimizer of which this rank holds a chunk."""
    held = [(at, i, p) for at, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])]
    cut = [(at, i, p) for at, i, p in held if _is_cut(p)]
    ours = {id(p) for model in live.models for p in model.parameters()} if cut else ()
    return [(at, i, tuple(p.shape)) for at, i, p in cut if id(p) in ours]


def _is_cut(parameter: Any) -> bool:
    """Marked as holding chunks, or a DTensor that is split over more than one rank."""
    if not is_dtensor(parameter):
        return hasattr(parameter, "_dmp_sharded")
    sizes = parameter.device_mesh.shape
    return any(size > 1 and not p.is_replicate() for size, p in zip(sizes, parameter.placements, strict=True))


def _mark_state(optimizer: Optimizer) -> None:
    """Have its state dict say, where it is pickled, that it is of this rank's chunks."""
    if not optimizer.__dict__.get("_dmp_is_marked"):
        optimizer.__dict__["_dmp_is_marked"] = True
        optimizer.register_state_dict_post_hook(lambda _, state_dict: state_dict.__setitem__("pieces", CHUNKS_ONLY))
