"""`Updated`: dense parameters with an optimizer in the backward pass, where DDP averages gradients.

`apply_optimizer_in_backward` may be given dense parameters, or tables that no sharder takes. torch's DDP updates them
as each bucket arrives, on a stream of an accelerator: on a machine without one the first backward pass ends in an
error, and a parameter that the loss does not reach is updated by zeros, which moves it where there is momentum. So they
are updated at the end of a pass that was averaged; inside `no_sync` their gradients accumulate, as torch's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dmp import ShardError


class Updated:
    """Those of some parameters that have an optimizer in the backward pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [p for p in parameters if _is_updated(p)]
        if not self._parameters:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for p in self._parameters:  # which would update each rank's copy by its own gradient
            for handle in param_to_optim_hook_handle_map.get(p, []):
                handle.remove()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self._parameters)

    def step(self) -> None:
        """Gradients are averaged: update those that have one, which is None then."""
        for p in self._parameters:
            if p.grad is not None:
                for optimizer in p._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                p.grad = None


def _is_updated(parameter: torch.Tensor) -> bool:
    """Whether it has such an optimizer; an empty list of them, as wrappers leave on tables, updates nothing."""
    return bool(getattr(parameter, "_in_backward_optimizers", ()))


SPLITS = "this mesh splits dense weights, in place or beside these, where it would be lost"
BY_OPTIONS = "with static_graph torch updates them, which needs an accelerator: leave it out"


def refuse_updated(dense: Mapping[str, torch.Tensor], why: str) -> None:
    """Raise for weights with an optimizer in the backward pass.

    Raises:
        ShardError: names them.
    """
    names = [name for name, p in dense.items() if _is_updated(p)]
    if names:
        raise ShardError(
            f"{', '.join(map(repr, names[:3]))}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: an optimizer "
            "in the backward pass (apply_optimizer_in_backward) is taken of tables that a sharder takes, and of "
            f"weights that DDP copies; {why}. Or leave these out of it and give them to an optimizer after wrapping, "
            "or pass a sharder that takes them"
        )
