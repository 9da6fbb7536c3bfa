"""Hooks that a user has registered on a parameter, when another parameter takes its place: they are the new one's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dmp.places import taking_hooks
from dmp.wrap.let_go import letting_go

_log = logging.getLogger("dmp")
_ON_GRADIENT, _ON_ACCUMULATED = "_backward_hooks", "_post_accumulate_grad_hooks"


def carry_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Hooks on the gradient of `old`, and on what is accumulated of it, are called for `new` from now on.

    A handle that `old` has given removes its hook from `new`, whose own are called first.
    """
    for kind in (_ON_GRADIENT, _ON_ACCUMULATED):
        hooks = getattr(old, kind, None) or {}
        users = {key: hook for key, hook in hooks.items() if not hasattr(hook, "_dmp_own")}
        if not users:
            continue
        own = getattr(new, kind, None) or {}
        hooks.clear()  # the same mapping, which handles know
        hooks.update({**own, **users})
        with taking_hooks(new):
            setattr(new, kind, hooks)
        setattr(old, kind, None)  # or what is hung on one were on both


@contextmanager
def carrying_hooks(model: Any, module: nn.Module) -> Iterator[None]:
    """Carry those of parameters of `module` for which `model.module` has others at the end, and let go of them."""
    named = module.named_parameters()
    hooked = {name: p for name, p in named if getattr(p, _ON_GRADIENT, None) or getattr(p, _ON_ACCUMULATED, None)}
    with letting_go(model, module):
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
                "hooks on the gradients of %s are not called: tables that are updated in the backward pass have none; "
                "a hook on the module's output sees what comes back to it",
                ", ".join(map(repr, lost)),
            )
