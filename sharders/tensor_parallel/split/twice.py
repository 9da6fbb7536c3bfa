"""Gradients of gradients: penalties on a gradient, Hessians. They come through what converts activations.

torch's backward of `DTensor.from_local` sums what is open in a gradient outside of autograd: a pass that keeps a graph
of itself (`create_graph=True`) lost what was behind, and where something else reached the weights, as a residual
connection does, their gradients were wrong without a word.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def keep_graphs() -> None:
    """From now on it sums by operations that autograd knows, where a graph is kept."""
    # Private: nothing public converts with another backward, and torch's own styles call these.
    from torch.distributed.tensor._api import _FromTorchTensor, _normalize_placements_for_grad

    own = _FromTorchTensor.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None or not torch.is_grad_enabled():
            return own(ctx, gradient)
        asked = ctx.grad_placements or _normalize_placements_for_grad(ctx.forward_input_placements)
        return (gradient.redistribute(placements=asked).to_local(), *[None] * 6)

    _FromTorchTensor.backward = staticmethod(backward)  # type: ignore[assignment, method-assign]
