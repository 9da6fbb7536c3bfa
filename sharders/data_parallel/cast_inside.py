"""Weights that the model's own code casts while they are gathered, as Switch Transformers' routers cast theirs.

torch makes chunks of them in the dtype that they had when the model was split: a gradient of another dtype ended in its
words about reduce-scatter, in the middle of the backward pass.
"""

from __future__ import annotations

from typing import Any

from dmp import ShardError
from sharders.data_parallel.fsdp_units import units_of

_BY_POLICY = "mixed_precision casts all weights for the forward; torch.autocast in its place leaves that to the model"


def refuse_casts(unit: Any) -> None:
    """Before a unit's chunks take the places of its weights.

    Args:
        unit: after its forward.

    Raises:
        ShardError: one of the weights has another dtype than it was gathered in.
    """
    for group in units_of([unit]):
        for held in group.fsdp_params:
            gathered, dtype = getattr(held, "_unsharded_param", None), held.param_dtype or held.orig_dtype
            if gathered is not None and gathered.dtype is not dtype and gathered.requires_grad:
                before = f"cast its module before wrapping, by .to({gathered.dtype}), so that this changes nothing"
                raise ShardError(
                    f"{held._param_fqn!r} was cast from {dtype} to {gathered.dtype} by the forward of the model, of "
                    f"which ranks have chunks: {_BY_POLICY if held.param_dtype else before}"
                )
