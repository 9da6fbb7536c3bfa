"""What a user has hung on a parameter, when another parameter takes its place: hooks, and attributes, as of state-space
models whose loops make groups by `getattr(p, "_no_weight_decay", False)`. They are the new one's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dmp.places import taking_hooks
from dmp.wrap.earlier.let_go import letting_go

_log = logging.getLogger("dmp")
_NOT_USERS = (
    "_dmp_",
    "_in_backward_optimizers",
    "_optimizer_classes",
    "_optimizer_kwargs",
    "_dynamo_static_input_type",
)
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


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """A user's: neither ours, nor torch's own, nor tensors, which are as large as the whole parameter."""
    own = vars(parameter).items() if type(parameter) is nn.Parameter else ()  # others' are how they are made
    return {k: v for k, v in own if not k.startswith(_NOT_USERS) and not isinstance(v, torch.Tensor)}


def give_attributes(new: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Those that it does not have."""
    vars(new).update({key: value for key, value in attributes.items() if key not in vars(new)})


@contextmanager
def carrying_hooks(model: Any, module: nn.Module) -> Iterator[None]:
    """Carry those of parameters of `module` for which `model.module` has others at the end, and let go of them; so
    with attributes."""
    named = dict(module.named_parameters())
    attributes = {name: of for name, p in named.items() if (of := attributes_of(p))}
    kinds = (_ON_GRADIENT, _ON_ACCUMULATED)
    hooked = {name: p for name, p in named.items() if any(getattr(p, kind, None) for kind in kinds)}
    del named  # of which a wrap frees those that it replaces
    with letting_go(model, module):
        yield
        now = dict(model.module.named_parameters()) if hooked or attributes else {}
        for name in attributes.keys() & now.keys():
            give_attributes(now[name], attributes[name])
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
