"""Hooks that a user has registered on a parameter, when another parameter takes its place: they are the new one's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_log = logging.getLogger("dmp")
_ON_GRADIENT, _ON_ACCUMULATED = "_backward_hooks", "_post_accumulate_grad_hooks"


def carry_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Hooks on the gradient of `old`, and on what is accumulated of it, are called for `new` from now on.

    Where `new` has none of its own, a handle that `old` has given removes its hook from `new`.
    """
    for kind, register in ((_ON_GRADIENT, new.register_hook), (_ON_ACCUMULATED, _register_accumulated(new))):
        hooks = getattr(old, kind, None)
        if hooks and getattr(new, kind, None):
            for hook in hooks.values():
                register(hook)
        elif hooks:
            setattr(new, kind, hooks)
            setattr(old, kind, None)  # or what is hung on one were on both


def _register_accumulated(p: Any) -> Any:
    return p.register_post_accumulate_grad_hook


@contextmanager
def carrying_hooks(model: Any, module: nn.Module) -> Iterator[None]:
    """Carry those of each parameter of `module` for which `model.module` has another one at the end."""
    hooked = {name: p for name, p in module.named_parameters() if _has_hooks(p)}
    yield
    now = dict(model.module.named_parameters()) if hooked else {}
    lost = []
    for name, old in hooked.items():
        new = now.get(name, old)
        if new is old:
            continue
        if hasattr(new, "_in_backward_optimizers"):
            lost.append(name)
        else:
            carry_hooks(old, new)
    if lost and model.env.rank == 0:
        _log.warning(
            "hooks on the gradients of %s are not called: tables that are updated in the backward pass have none; a "
            "hook on the module's output sees what comes back to it",
            ", ".join(map(repr, lost)),
        )


def _has_hooks(p: torch.Tensor) -> bool:
    return bool(getattr(p, _ON_GRADIENT, None) or getattr(p, _ON_ACCUMULATED, None))
