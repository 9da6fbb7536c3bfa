"""Parameters that were frozen when what averages gradients was made, and are trained by now.

The model's next forward makes that anew, with them. A pass that comes to them before by a part of the model alone
(`model.module(x)`), as in loops that freeze one part while another is trained, would leave each rank its own gradients,
without a word: they are averaged too, also where nothing was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class AfterGradient:
    """What is called when a parameter has a gradient, with the parameter."""

    __slots__ = ()


def forget_earlier(parameters: Iterable[torch.Tensor]) -> None:
    """Drop what was put on parameters for another average: when that is collected is each rank's own affair."""
    for p in parameters:
        hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, AfterGradient)]:
            del hooks[key]


def hear_thawed(frozen: Iterable[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Have a hook called with those that get a gradient when they are trained, later."""
    handles = []
    for p in frozen:
        p.requires_grad_(True)  # torch takes no hooks of others
        handles.append(p.register_post_accumulate_grad_hook(hook))
        p.requires_grad_(False)
    return handles


def can_thaw(p: torch.Tensor) -> bool:
    """Whether a parameter is frozen and may be trained later."""
    return not p.requires_grad and p.is_leaf and (p.is_floating_point() or p.is_complex()) and not p.is_inference()
