"""`LaterHooks`: users' hooks on accumulated gradients run when these are averaged.

torch runs such a hook (`register_post_accumulate_grad_hook`) when a gradient is there; before the average over the
ranks is each rank's own: one that makes an optimizer's step, as programs do to save the memory of gradients, would let
copies part without a word. FSDP2 runs them on averaged gradients by itself, and on those to which nothing has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

Hook = Callable[[torch.Tensor], Any]
_resting: list[tuple[dict[int, Any], dict[int, Any]]] = []


def rest(p: torch.Tensor) -> None:
    """Have hooks on a gradient to which nothing has come not run; until `wake`, for torch runs them of all chunks."""
    hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    _resting.append((hooks, dict(hooks)))
    hooks.clear()


def wake() -> None:
    """The backward pass is over."""
    while _resting:
        hooks, were = _resting.pop()
        hooks.update(were)


class LaterHooks:
    """Hooks of some parameters that are averaged together: they wait from `open` to `run`, else run at once."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Hook, torch.Tensor]] | None = None

    def take(self, parameters: Iterable[torch.Tensor | None], own: Hook | None = None) -> None:
        """Before a forward: put each hook off but `own`, in its own place, from which its handle removes it."""
        if torch._C._current_graph_task_id() < 0:  # no checkpoint that is computed again
            self.waiting = None  # a backward that raised has left some
        for p in parameters:
            hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            if len(hooks) > (own is not None):
                for key, hook in hooks.items():
                    if hook != own and not (isinstance(hook, _Later) and hook.hooks() is self):
                        hooks[key] = _Later(hook.hook if isinstance(hook, _Later) else hook, self)

    def open(self) -> None:
        """A backward pass begins whose gradients will be averaged."""
        self.waiting = []

    def run(self, given: Iterable[torch.Tensor] = ()) -> None:
        """They are; `given` have a gradient from other ranks alone, at which torch has run nothing."""
        waiting, self.waiting = self.waiting or [], None
        for p in given:
            hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            waiting += [(hook.hook, p) for hook in hooks.values() if isinstance(hook, _Later)]
        for hook, p in waiting:
            if p.grad is not None:
                hook(p)


class _Later:
    """One hook."""

    def __init__(self, hook: Hook, hooks: LaterHooks) -> None:
        self.hook, self.hooks = hook, ref(hooks)

    def __call__(self, p: torch.Tensor) -> None:
        hooks = self.hooks()
        if hooks is None or hooks.waiting is None:
            self.hook(p)
        else:
            hooks.waiting.append((self.hook, p))
