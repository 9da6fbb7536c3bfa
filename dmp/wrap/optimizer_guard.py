"""Optimizers that compute something else, or fail, when they are given pieces of parameters: refused with the reason.

An optimizer that works on every element by itself is right on any piece. One that needs a whole matrix, or sums over
all parameters, is not, and torch says nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dmp.chunked import PIECE
from dmp.errors import ShardError
from dmp.wrap.earlier_optimizers import follow

UNFIT = {
    "Muon": "orthogonalises whole matrices, and of a piece it gets another result",
    "Adafactor": "keeps means over whole rows and columns, which a piece does not have",
    "LBFGS": "takes inner products over all parameters, and the ranks would each take their own",
    "Shampoo": "multiplies by roots of whole matrices' statistics, which a piece does not have",
    "SOAP": "rotates by eigenvectors of whole matrices' statistics, which a piece does not have",
}
"""Class name (of the optimizer or a base of it, torch's or another's) -> why not."""

_reasons: dict[type, tuple[str, str] | None] = {}
_is_guarding = False


def guard_optimizers() -> None:
    """From now on a step of an unfit optimizer that holds a sharded parameter raises `ShardError`; once per process.

    The check is before the step, so nothing has changed; other optimizers pay two dict lookups a step. Optimizers that
    were made before wrapping get the wrapped model's parameters, see replaced.py.
    """
    global _is_guarding
    if not _is_guarding:
        _is_guarding = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if follow(optimizer) and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        _mark_state(optimizer)
    kind = type(optimizer)
    if kind not in _reasons:
        _reasons[kind] = next(((c.__name__, UNFIT[c.__name__]) for c in kind.__mro__ if c.__name__ in UNFIT), None)
    unfit = _reasons[kind]
    if unfit is None:
        return
    for at, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if is_sharded(p):
                raise ShardError(
                    f"{kind.__name__} cannot train parameter {i} of group {at}, of shape {tuple(p.shape)}, of which "
                    f"this rank holds a piece: {unfit[0]} {unfit[1]}. Use an optimizer that works on each element, "
                    "such as AdamW, or leave the parameter whole (replicated)"
                )


def _mark_state(optimizer: Optimizer) -> None:
    """Have its state dict say, where it is pickled, that it is of this rank's pieces."""
    if not optimizer.__dict__.get("_dmp_is_marked"):
        optimizer.__dict__["_dmp_is_marked"] = True
        optimizer.register_state_dict_post_hook(lambda _, state_dict: state_dict.__setitem__("pieces", PIECE))


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a piece: a DTensor split over more than one rank, or marked `_dmp_sharded`."""
    if getattr(parameter, "_dmp_sharded", False):
        return True
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(size > 1 and not p.is_replicate() for size, p in zip(sizes, parameter.placements, strict=True))
