"""Weights that others were put in the place of since FSDP2 has split them: taken for good, for a call, or refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from dmp import ShardError, is_dtensor
from sharders.data_parallel.fsdp_units import name_of


def take_replaced(root: nn.Module, units: Sequence[Any]) -> bool:
    """Have torch take the chunks that were put in the place of others (`load_state_dict(assign=True)`); whether any.

    Raises:
        ShardError: something else is in a weight's place, where torch would put back what it had.
    """
    is_any = False
    for unit in units:
        for held in unit.fsdp_params:
            place = held._module_info
            found = place.module._parameters.get(place.param_name)
            whole, kept = getattr(held, "_unsharded_param", held), getattr(held, "_sharded_post_forward_param", held)
            if found is held.sharded_param or found is whole or found is kept:  # the last: in as many parts as asked
                continue
            if not is_dtensor(found):
                raise ShardError(
                    f"{name_of(root, held)!r} was replaced after wrapping, where it is split, and FSDP2 would put back "
                    "what it had: write into it under torch.no_grad() (copy_, load_state_dict), or replace it before"
                )
            if (torch.is_grad_enabled() or not unit.is_sharded) and is_lent():
                raise ShardError(
                    f"torch.func.functional_call with another {name_of(root, held)!r}: FSDP2 would keep it as the "
                    "model's own, and give its gradient to nobody. It is right under torch.no_grad(), once what the "
                    "model has computed had its backward pass; else call dmp.to_unsharded(model) with it"
                )
            held.reset_sharded_param()
            is_any = True
    return is_any


def is_lent() -> bool:
    """Whether torch calls the model with others' tensors, and puts back what it has found in their places."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != stateless.__name__:
        frame = frame.f_back
    return frame is not None
