"""Optimizers that compute something else, or fail, when they are given chunks of parameters: refused with the reason.

An optimizer that works on every element by itself is right on any chunk. One that needs a whole matrix, or sums over
all parameters, is not, and torch says nothing. Only an optimizer that holds a wrapped model's parameters is looked at,
each by itself; `optimizer.works_on_chunks = True`, on it or on its class, is its author's word that it is right. One of
a class that is neither known to be right nor to be wrong is tried (optimizer_trial.py).

[Note: global effects] One hook of torch's (`register_optimizer_step_pre_hook`), from the first wrapped model to the
end of the process, is called before a step of every optimizer. Nobody tells a parameter which optimizers hold it, so
this is where one is met. One around another may be stepped by methods of its own (SAM's `first_step`, `second_step`),
of which only the other's step is torch's: it is met in `zero_grad`, too. An optimizer that is not refused pays a look
at its class's name and an attribute; one that holds nothing of a wrapped model's is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dmp import live_models as live
from dmp.chunked import ChunkState
from dmp.contracts import ShardedModule
from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import is_dtensor
from dmp.put_around import put_around
from dmp.ranks import say_once
from dmp.wrap.earlier.earlier_optimizers import follow, num_changes
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.optimizers.keyed import is_wrapper
from dmp.wrap.optimizers.optimizer_trial import Untried, cut_of, is_known, wrong_cut, wrong_on_dtensors

NEEDS_WHOLE = {
    "Muon": "orthogonalises whole matrices, and of a chunk it gets another result",
    "Adafactor": "keeps means over whole rows and columns, which a chunk does not have",
    "LBFGS": "takes inner products over all parameters, and the ranks would each take their own",
    "Shampoo": "multiplies by roots of whole matrices' statistics, which a chunk does not have",
    "Kron": "multiplies by factors of whole matrices' statistics, which a chunk does not have",
    "SOAP": "rotates by eigenvectors of whole matrices' statistics, which a chunk does not have",
    "ZeroRedundancyOptimizer": "has one rank step for all and sends its values, over the others' chunks of other rows",
    "PostLocalSGDOptimizer": "averages parameters over ranks, whose chunks are of different rows",
}
"""Class name (of the optimizer or a base of it, torch's or another's) -> why it needs whole parameters."""


@cache
def guard_optimizers() -> None:
    """From now on a step of an optimizer that is wrong on the chunks it holds raises `ShardError`, changing nothing.

    Optimizers that were made before wrapping get the wrapped model's parameters, see earlier_optimizers.py.
    """
    register_optimizer_step_pre_hook(_check)
    put_around(Optimizer, "zero_grad", _zero_grad)


def _zero_grad(own: Callable[..., None], optimizer: Optimizer, *args: Any, **options: Any) -> None:
    if any(isinstance(held, Optimizer) for held in vars(optimizer).values()):
        _check(optimizer)
    own(optimizer, *args, **options)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if is_wrapper(optimizer) or isinstance(optimizer, FusedOptimizer):
        return  # each of those that it hands the step on to comes by itself; ours has none to make
    follow(optimizer)  # as a gradient scaler and `reshard` do before a step: what was looked at here has its own mark
    looked_at = num_changes(), sum(len(group["params"]) for group in optimizer.param_groups)
    is_new = optimizer.__dict__.get("_dmp_looked_at") != looked_at
    if is_new:
        _check_known(optimizer)
        if chunks_in(optimizer):
            _mark_state(optimizer)
    if optimizer.state and not optimizer.__dict__.get("_dmp_state_is_seen"):  # it has made a step
        optimizer.__dict__["_dmp_state_is_seen"] = True
        _say_of_state(optimizer)
    if getattr(optimizer, "works_on_chunks", False):
        return
    refused = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in NEEDS_WHOLE), None)
    if refused is not None:
        for group, i, shape in chunks_in(optimizer):
            raise _refusal(optimizer, group, i, shape, f"{refused} {NEEDS_WHOLE[refused]}")
    elif not is_known(optimizer):
        if is_new:
            optimizer.__dict__["_dmp_wrong"] = _tried(optimizer)
        if optimizer.__dict__.get("_dmp_wrong") is not None:
            raise _refusal(optimizer, *optimizer.__dict__["_dmp_wrong"])
    optimizer.__dict__["_dmp_looked_at"] = looked_at


def _say_of_state(optimizer: Optimizer) -> None:
    """Which state cannot be cut as its table is, soon: it trains well, and the first save would raise, hours later."""
    for at, i, shape in chunks_in(optimizer):
        p = optimizer.param_groups[at]["params"][i]
        for key, value in () if is_dtensor(p) else optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
                say_once(
                    f"{type(optimizer).__name__} keeps state {key!r} of shape {tuple(value.shape)} for parameter {i} "
                    f"of group {at}, of which this rank holds a chunk of shape {shape}: what is neither one number nor "
                    "of that shape cannot be cut as the table is, and save_checkpoint, full_optimizer_state_dict and "
                    "reshard will say so. Leave the table whole (data_parallel()), or use another optimizer for it"
                )


def _check_known(optimizer: Optimizer) -> None:
    """Raise `ShardError` where it has gradients of what was added to a wrapped model, which has not run since."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for model in live.models:
        for name, p in model.unknown_parameters():
            if p.requires_grad and id(p) in given:
                raise ShardError(
                    f"{name!r} was added after wrapping, and trained past the wrapped model: nobody averaged its "
                    "gradient, or made it the same on all ranks. Add it before wrapping (get_peft_model, then "
                    "DistributedModelParallel), and call the wrapped model, not its .module"
                )


def _refusal(optimizer: Optimizer, group: int, i: int, shape: tuple[int, ...], reason: str) -> ShardError:
    return ShardError(
        f"{type(optimizer).__name__} cannot train parameter {i} of group {group}, of shape {shape}, of which this "
        f"rank holds a chunk: {reason}. Use an optimizer that works on each element, such "
        "as AdamW, or leave the parameter whole (replicated; data_parallel() of a table). If this one is right on "
        "chunks, say so: optimizer.works_on_chunks = True"
    )


def _tried(optimizer: Optimizer) -> tuple[int, int, tuple[int, ...], str] | None:
    """What it would do wrong, the same on every rank: group, index and shape of a parameter, and the reason."""
    cuts = _cuts_of_tables()
    ours = {id(p) for model in live.models for p in model.parameters() if is_dtensor(p) and _is_cut(p)}
    for at, group in enumerate(optimizer.param_groups):
        try:
            i, wrong = _wrong_in(optimizer, group, cuts, ours)
        except Untried as reason:
            say_once(
                f"{type(optimizer).__name__} steps on this rank's chunks of parameters, and whether it does the same "
                f"there as on whole ones could not be tried ({reason}): an optimizer that takes norms or means over a "
                "parameter, or over all, does not. optimizer.works_on_chunks = True says that it does"
            )
            return None
        if wrong:
            return at, i, tuple(group["params"][i].shape), f"tried on a small parameter, {wrong}"
    return None


def _wrong_in(
    optimizer: Optimizer, group: dict[str, Any], cuts: Mapping[int, tuple[set[str], Any]], ours: Container[int]
) -> tuple[int, str]:
    """Index of a parameter of a group and what is wrong with it, in words; none where all is right."""
    held = [(i, p, *cuts[id(p)]) for i, p in enumerate(group["params"]) if id(p) in cuts and cuts[id(p)][0]]
    if held:
        largest = tuple(map(max, *(size for *_, size in held), (0, 0)))
        found = wrong_cut(optimizer, group, set().union(*(of for *_, of, _ in held)), held[0][1].device, largest)
        if found:
            return next(i for i, _, of, _ in held if found[0] in of), f"{found[0]}, {found[1]}"
    kinds = {(p.device_mesh, p.placements, p.dim()): i for i, p in enumerate(group["params"]) if id(p) in ours}
    if not kinds:
        return 0, ""
    beside = not all(is_dtensor(p) for p in group["params"])
    return min(kinds.values()), wrong_on_dtensors(
        optimizer, group, [group["params"][i] for i in kinds.values()], beside
    )


def _cuts_of_tables() -> Mapping[int, tuple[set[str], Any]]:
    """Of each wrapped model's table that an ordinary optimizer may train in chunks, by the parameter's id, and its
    size."""
    found = {}
    for model in live.models:
        for path, module in model.sharded_modules.items():
            chunks = module.chunked_state() if isinstance(module, ShardedModule) else {}
            for name, p in module.named_parameters():
                if name in chunks and hasattr(p, "_dmp_sharded") and not hasattr(p, "_in_backward_optimizers"):
                    size, layout = tuple(chunks[name].size()), model.plan[join_name(path, name)].layout
                    found[id(p)] = cut_of(layout.shards(size, model.env), size, model.env.table_size), size
    return found


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
    is_whole = hasattr(optimizer, "_optimizer_state_dict_post_hooks")  # not one around another that skips `__init__`
    if is_whole and not optimizer.__dict__.get("_dmp_is_marked"):
        optimizer.__dict__["_dmp_is_marked"] = True
        optimizer.register_state_dict_post_hook(_say_in_state)


def _say_in_state(_: Optimizer, state_dict: dict[str, Any]) -> ChunkState:
    live.look()  # who asks may be another package, which takes chunks for whole tensors
    return ChunkState(state_dict)
