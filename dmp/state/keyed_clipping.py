"""TorchRec's gradient clipping over parameters of wrapped models, refused where it would take another norm.

It passes over DTensors, and in its modes by process group takes the norm of one rank's chunks, without a word. Its
plain mode calls `torch.nn.utils.clip_grad_norm_`, which is the whole model's, see [Note: torch's clipping] of clip.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from dmp import live_models as live
from dmp.errors import ShardError
from dmp.places import is_dtensor


def check_clipping(own: Any, *args: Any, **options: Any) -> None:
    """A `GradientClippingOptimizer` is made: not one that would clip by another norm than the whole model's."""
    asked = inspect.signature(own).bind(*args, **options)
    asked.apply_defaults()
    _check_clipping(**{k: v for k, v in asked.arguments.items() if k != "self"})
    own(*args, **options)


def _check_clipping(
    optimizer: Any,
    clipping: Any,
    enable_global_grad_clip: bool = False,
    param_to_pgs: Any = None,
    track_grad_norm: bool = False,
    **_: Any,
) -> None:
    """Refuse norms that would not be the whole model's; `torch.nn.utils.clip_grad_norm_`, the default's, is."""
    takes_norm = clipping.name == "NORM"
    by_groups = takes_norm and enable_global_grad_clip and bool(param_to_pgs)
    if not takes_norm and not track_grad_norm:
        return
    ours = {id(p) for model in live.models for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ours]
    trained = [p for p in held if not hasattr(p, "_in_backward_optimizers")]
    if any(map(is_dtensor, trained)):
        what = "weights that are split or sharded (DTensors), whose gradients it passes over"
    elif (by_groups or track_grad_norm) and any(hasattr(p, "_dmp_sharded") for p in trained):
        what = "tables of which a rank has chunks, whose norms it would take by rank"
    else:
        return
    raise ShardError(
        f"TorchRec's GradientClippingOptimizer holds {what}: call dmp.clip_grad_norm_(model, max_norm) before the "
        "optimizer's step, which takes the whole model's norm, and leave the clipping optimizer out"
    )
